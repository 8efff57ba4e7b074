"""``conch analyze``: finds the best configuration of models, with the options of NVIDIA's model analyzer.

``measure/analyze/options/settings.py`` declares the options.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from conch.cli.interrupting import INTERRUPTED
from conch.cli.options import OptionsCommand, hidden_option
from conch.core.errors import ConchError, internal, invalid, one_line, unavailable
from conch.measure.analyze.options.reading import NO_EFFECT, REFUSED, read_settings
from conch.measure.analyze.options.settings import OPTIONS, AnalyzeSettings
from conch.measure.analyze.results import is_name_of_candidate
from conch.options.declaration import File, flag_of, option, options_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from conch.measure.analyze.judging.goals import Goals
    from conch.measure.analyze.profiling.profile import Profile
    from conch.measure.analyze.profiling.progress import SearchProgress
    from conch.measure.analyze.report.analysis import Analysis
    from conch.measure.analyze.results import CandidateResult, Point, Trial
    from conch.measure.analyze.saved_results import Circumstances, SearchOutcome


def check_reports(settings: AnalyzeSettings, *, chosen: bool) -> tuple[AnalyzeSettings, str]:
    """Return the settings without ``html`` if the extra ``report`` is missing, and a warning.

    Raises UNSUPPORTED instead if the user has ``chosen`` the formats.
    """
    from conch.measure.reports.files import require_charts

    if "html" not in settings.output_formats or settings.skip_summary_reports:
        return settings, ""
    try:
        require_charts("the report in HTML")
    except ConchError as error:
        if chosen:
            raise
        formats = tuple(name for name in settings.output_formats if name != "html")
        return replace(settings, output_formats=formats), error.message
    return settings, ""


def results_of(profile: Profile, settings: AnalyzeSettings) -> tuple[Circumstances, list[SearchOutcome]]:
    """Return the results of a profile so far, and how they were measured."""
    from conch.machine.facts import MachineFacts
    from conch.measure.analyze.saved_results import Circumstances
    from conch.measure.analyze.search.axis import axis_of

    searches = [search for search in profile.outcomes if search.results]
    rates = bool(searches) and axis_of(settings, searches[0].models).rates
    local = settings.triton_launch_mode == "local"
    circumstances = Circumstances(
        load_kind="request_rate" if rates else "concurrency",
        batch_sizes={model.name: settings.batch_size_of(model.name) for model in settings.profile_models},
        server="conch serve, started for this" if local else settings.endpoint,
        machine=[("Machine", str(MachineFacts.read()))],
        settings=list(settings.changed_options()),
        reproduce=_shell(sys.argv),
        repository=str(settings.model_repository.resolve()) if settings.model_repository is not None else "",
    )
    return circumstances, searches


def saved_under(
    folder: Path, formats: str | None, options: Mapping[str, Any]
) -> tuple[AnalyzeSettings, Circumstances, list[SearchOutcome]]:
    """Return the results saved in ``folder``, ranked by the current goals."""
    from conch.measure.analyze.saved_results import load

    circumstances, searches = load(folder)
    chosen = {name: value for name, value in options.items() if value not in (None, ())}
    settings = read_settings(chosen | ({"output_formats": formats} if formats else {})).settings
    if not chosen:
        return replace(settings, export_path=folder), circumstances, searches
    searches = [replace(search, goals=_changed_goals(search.goals, settings, chosen)) for search in searches]
    # The reports of the run are unchanged.
    settings = replace(settings, export_path=folder / f"goals-{_slug(searches[0].goals)}")
    return settings, circumstances, searches


def _slug(goals: Goals) -> str:
    """Return a folder name for goals, such as ``highest-throughput-with-p99-latency-at-most-50.0-ms``."""
    from conch.measure.analyze.judging.goals import in_words

    return re.sub(r"[^a-z0-9.]+", "-", in_words(goals).lower()).strip("-")[:100]


def _changed_goals(goals: Goals, settings: AnalyzeSettings, chosen: Mapping[str, Any]) -> Goals:
    models = {
        name: replace(model_goals, **_replaced(settings, name, chosen)) for name, model_goals in goals.models.items()
    }
    return replace(goals, models=models, price=settings.price or goals.price)


def _replaced(settings: AnalyzeSettings, model: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the goals of a model, changed by the options."""
    model_goals = settings.goals([model]).models[model]
    changed: dict[str, Any] = {}
    if "objectives" in chosen:
        changed["objectives"] = model_goals.objectives
    if not {"constraints", "latency_budget", "min_throughput"}.isdisjoint(chosen):
        changed["constraints"] = model_goals.constraints
    return changed


def write_results(
    settings: AnalyzeSettings, circumstances: Circumstances, searches: Sequence[SearchOutcome], *, keep: bool = True
) -> list[str]:
    """Write the results, and the reports of each search: in separate folders if there are several.

    Returns the errors of files that could not be written; the other files are still written.
    """
    from conch.measure.analyze.report.analysis import analysis_of
    from conch.measure.analyze.saved_results import FILENAME, save

    writers: dict[Path, Callable[[Path], object]] = {}
    if keep:
        writers[settings.export_path / FILENAME] = lambda path: save(path.parent, circumstances, searches)
    for search, folder in _folders(settings.export_path, searches):
        analysis = analysis_of(search, circumstances, _apply_line(settings.export_path, circumstances))
        writers |= {folder / name: write for name, write in _writers(settings, analysis)}
    failed = []
    for path, write in writers.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        except (OSError, ConchError) as error:
            failed.append(
                f"{path} is not written: {error.message if isinstance(error, ConchError) else one_line(error)}"
            )
    return failed


def _writers(settings: AnalyzeSettings, analysis: Analysis) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Return the writers of one search's files, by file name."""
    from conch.measure.analyze.report import files
    from conch.measure.analyze.report.page import report
    from conch.measure.reports.files import write_report, write_whole

    def text(content: str) -> Callable[[Path], object]:
        return lambda path: write_whole(path, content.encode())

    if "csv" in settings.output_formats:
        yield from ((name, text(content)) for name, content in files.tables(analysis).items())
    if "json" in settings.output_formats:
        yield "analysis.json", text(files.json(analysis))
    if "html" in settings.output_formats and not settings.skip_summary_reports:
        yield "analysis.html", lambda path: write_report(report(analysis), path)


def show_results(
    console: Any, settings: AnalyzeSettings, circumstances: Circumstances, searches: Sequence[SearchOutcome]
) -> int:
    """Print the rankings; return 1 if no configuration of a search satisfies its constraints."""
    from conch.measure.analyze.report.analysis import analysis_of
    from conch.measure.analyze.report.page import summary
    from conch.measure.reports.terminal import show

    status = 0
    for search, folder in _folders(settings.export_path, searches):
        analysis = analysis_of(search, circumstances, _apply_line(settings.export_path, circumstances))
        show(console, *summary(analysis))
        page = folder / "analysis.html"
        if "html" in settings.output_formats and not settings.skip_summary_reports and page.exists():
            console.print(f"Report: {page}", highlight=False)
        status = status or int(analysis.best is None)
    return status


def _folders(export_path: Path, searches: Sequence[SearchOutcome]) -> Iterator[tuple[SearchOutcome, Path]]:
    for search in searches:
        yield search, export_path if len(searches) == 1 else export_path / "+".join(search.models)


def _apply_line(export_path: Path, circumstances: Circumstances) -> str:
    """Return the command that writes the best configuration; empty if there is no repository to write to."""
    if not circumstances.repository:
        return ""
    chosen = [] if str(export_path) == "analysis" else ["-e", str(export_path)]
    return _shell(["conch", "analyze", "apply", *chosen])


def _shell(arguments: Sequence[str]) -> str:
    return shlex.join(["conch", *arguments[1:]])


class ProfileLine:
    """Prints the progress of a profile: an updated line on a terminal, otherwise one line per measurement.

    A :class:`conch.measure.analyze.profiling.progress.ProfileObserver`.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._known = 0
        self._progress = ""

    def say(self, line: str) -> None:
        """Print a message."""
        self._console.print(line, highlight=False, markup=False)

    def measuring(self, trial: Trial, progress: SearchProgress) -> None:
        """Show the current measurement, its progress, and the remaining time."""
        self._report_known()
        self._progress = f"{progress.done + 1} of about {progress.expected}, about {_time(progress.left)} left"
        if not self._console.is_terminal:
            return
        text = f"{self._progress}: {trial.candidate.name} at {trial.load:g}"
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def measured(self, trial: Trial, point: Point, *, before: bool) -> None:
        """Print the figures of a point; points from the journal are only counted."""
        if before:
            self._known += 1
            return
        p99 = max((model.percentiles.get(99, 0.0) for model in point.models.values()), default=0.0)
        text = f"{trial.candidate.name} at {trial.load:g}: {point.throughput:,.0f} infer/s, p99 {p99 * 1000:,.1f} ms"
        doubts = [word for word, holds in (("ended early", point.stopped), ("disturbed", point.disturbed)) if holds]
        doubt = f" ({', '.join(doubts)})" if doubts else ""
        self.say(text + doubt if self._console.is_terminal else f"[{self._progress}] {text}{doubt}")

    def failed(self, trial: Trial, error: str, *, before: bool) -> None:
        """Print why a candidate is skipped."""
        if before:
            self._known += 1
        else:
            self.say(f"{trial.candidate.name} is skipped: {error}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._report_known()
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _report_known(self) -> None:
        if self._known:
            self.say(f"{self._known} measurements are taken from the journal.")
            self._known = 0


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


#: The options in which ``report`` and ``apply`` may differ from their run.
_GOALS: Final = [OPTIONS[name] for name in ("objectives", "constraints", "latency_budget", "min_throughput", "price")]


@dataclass(frozen=True)
class CommandOptions:
    """Options of the commands that are not settings of an analysis."""

    config_file: File | None = option(
        None, "Options from a file", "YAML file with model analyzer's keys; command-line options take precedence.",
        flags=("-f", "--config-file"), common=True,
    )  # fmt: skip
    apply: bool = option(
        False, "Afterwards", "Write the best configuration into the repository, if it is better than the default.",
        common=True,
    )  # fmt: skip
    force: bool = option(False, "Afterwards", "Apply a configuration that is not proven to be better.")


_OWN: Final = options_of(CommandOptions)


@click.group("analyze")
def analyze_command() -> None:
    """Find the best configuration of a model: measure candidates, rank them and explain the result.

    \b
    conch analyze profile -m models --profile-models minilm --constraint "p99<100ms"
    conch analyze report --constraint "p99<50ms"     rank the measurements by other goals
    conch analyze apply                              write the best configuration into the repository
    """


def _profile(config_file: Path | None, apply: bool, **options: Any) -> int:
    """Start a server, measure configurations of models at several loads, and write the results.

    Resumes an interrupted analysis if the same command is run again.
    """
    from conch.cli.interrupting import signals_as_ctrl_c
    from conch.measure.analyze.profiling.profile import Profile
    from conch.measure.reports import terminal

    settings, warnings = _settings(config_file, options)
    console, messages = terminal.console(), terminal.console(stderr=True)
    for warning in warnings:
        messages.print(f"warning: {warning}", style="yellow", highlight=False)
    problems: list[ConchError] = []
    status = 0
    line = ProfileLine(messages)
    profile = Profile(settings, line)
    with signals_as_ctrl_c():
        try:
            with profile, closing(line):
                try:
                    profile.run()
                except KeyboardInterrupt:
                    line.say("Interrupted. Run the same command to resume.")
                    status = INTERRUPTED
                except ConchError as error:
                    problems.append(error)
                except OSError as error:
                    problems.append(internal(one_line(error)))
        except ConchError as error:  # the server's original state was not restored
            problems.append(error)
    circumstances, searches = results_of(profile, settings)
    if searches:
        problems += map(internal, write_results(settings, circumstances, searches))
        shown = show_results(console, settings, circumstances, searches)
        status = status or shown
    if problems:
        raise ConchError("\n".join(problem.message for problem in problems), problems[0].code)
    if apply and not status:
        _apply(settings.export_path, circumstances, searches)
    return status


def _settings(config_file: Path | None, options: dict[str, Any]) -> tuple[AnalyzeSettings, list[str]]:
    """Return the settings and warnings about options without effect; reports errors before a server is started."""
    from conch.machine.extras import require

    chosen = {name: value for name, value in options.items() if value not in (None, (), False)}
    read = read_settings(chosen, config_file)
    if not read.settings.profile_models:
        raise invalid(
            f"profile_models: name the models to measure, such as --profile-models a,b{_models(read.settings)}"
        )
    if read.settings.run_config_search_mode == "optuna":
        require("the search mode optuna", "optuna")
    _check_output(read.settings)
    formats = read.settings.output_formats
    settings, missing = check_reports(read.settings, chosen=formats != OPTIONS["output_formats"].default)
    return settings, [*read.warnings, *([missing] if missing else [])]


def _report(export_path: str | None, output_formats: str | None, **goals: Any) -> int:
    """Rank the measurements and write the reports again; with other goals, into their own directory."""
    from conch.measure.reports import terminal

    folder = _folder(export_path)
    settings, circumstances, searches = saved_under(folder, output_formats, goals)
    if settings.export_path != folder:
        circumstances = replace(circumstances, repository="")  # only 'apply' uses the goals of the run
    settings, missing = check_reports(settings, chosen=output_formats is not None)
    for problem in [*([missing] if missing else []), *write_results(settings, circumstances, searches, keep=False)]:
        terminal.console(stderr=True).print(f"warning: {problem}", style="yellow", highlight=False)
    return show_results(terminal.console(), settings, circumstances, searches)


def _apply_command(name: str, export_path: str | None, force: bool, **goals: Any) -> None:
    """Write the best configuration, or the named one, into the repository, and show the difference.

    Without a name, the configuration must have been better than the default in the final rounds.
    """
    folder = _folder(export_path)
    _, circumstances, searches = saved_under(folder, None, goals)
    _apply(folder, circumstances, searches, name, force=force)


def _folder(export_path: str | None) -> Path:
    return Path(export_path or OPTIONS["export_path"].default)


def _models(settings: AnalyzeSettings) -> str:
    """Return the valid names for a message."""
    from conch.repository.scan import ModelRepository

    if settings.model_repository is None:
        return ""
    names = sorted(ModelRepository([settings.model_repository.resolve()]).names())
    return f"; the models are {_some(names)}" if names else ""


def _check_output(settings: AnalyzeSettings) -> None:
    """Raise INVALID_ARG if configurations would overwrite other files.

    An analysis that resumes from its journal finds its own candidates.
    """
    from conch.measure.analyze.journal import FILENAME

    folder = settings.output_model_repository_path
    if folder is None or settings.override_output_model_repository or not folder.exists():
        return
    resumed = (settings.checkpoints / FILENAME).exists()
    if not folder.is_dir() or not all(resumed and is_name_of_candidate(path.name) for path in folder.iterdir()):
        raise invalid(
            f"output_model_repository_path: {folder} is not empty; overwrite it with --override-output-model-repository"
        )


def _apply(
    export_path: Path, circumstances: Circumstances, searches: Sequence[SearchOutcome], name: str = "", *,
    force: bool = False,
) -> None:  # fmt: skip
    from conch.measure.analyze.applying import apply, changes
    from conch.measure.analyze.servers import concise, with_ensembles
    from conch.repository.scan import ModelRepository

    if not circumstances.repository:
        raise invalid("apply: the models are on the server, and there is no local repository to write to")
    repository = ModelRepository([Path(circumstances.repository)])
    known = [result for search in searches for result in search.results]
    if name and not any(result.candidate.name == name for result in known):
        raise invalid(
            f"{export_path} has no configuration '{name}'; it has {_some(result.candidate.name for result in known)}"
        )
    accepted, refused = [], []
    for search in searches:  # check all before the first is written, so that none is written if one is refused
        named = [result for result in search.results if result.candidate.name == name]
        if name and not named:
            continue
        result, reason = (named[0], "") if named else _recommended(search)
        configs = search.results[0].configs
        overrides = concise(with_ensembles(result.candidate.overrides, configs), configs)
        changed = changes(repository, overrides)
        accepted.append((result, changed))
        if changed and reason:
            refused.append(reason)
    for _, changed in accepted:
        for change in changed:
            click.echo(change.diff, nl=False)
    if refused and not force:
        raise unavailable(f"nothing is applied: {'; '.join(refused)}. 'apply --force' applies it anyway")
    for result, changed in accepted:
        if not changed:
            click.echo(f"{result.candidate.name}: the repository already has this configuration.")
            continue
        kept = apply(repository, changed)
        click.echo(
            f"Applied {result.candidate.name}. conch serve --model-repository {circumstances.repository} runs it."
        )
        for old in kept:
            click.echo(f"The original is kept as {old}")


def _recommended(search: SearchOutcome) -> tuple[CandidateResult, str]:
    """Return the best configuration, and why it is not recommended; empty if it is.

    Raises UNAVAILABLE if no configuration satisfies the constraints.
    """
    recommendation = search.recommendation
    if recommendation.winner is None:
        raise unavailable(f"nothing is applied: {recommendation.reason}")
    return recommendation.winner.result, recommendation.reason


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


analyze_command.add_command(
    OptionsCommand(
        "profile",
        [_OWN["config_file"], *OPTIONS.values(), _OWN["apply"]],
        [hidden_option(flag_of(name)) for name in (*NO_EFFECT, *REFUSED)],
        callback=_profile,
        help=_profile.__doc__,
        short_help="Measure configurations and find the best one.",
        options_metavar="[options]",
    )
)
analyze_command.add_command(
    OptionsCommand(
        "report",
        [replace(option, common=False) for option in (OPTIONS["export_path"], OPTIONS["output_formats"], *_GOALS)],
        callback=_report,
        help=_report.__doc__,
        short_help="Rank the measurements again, with other goals.",
    )
)
analyze_command.add_command(
    OptionsCommand(
        "apply",
        [replace(option, common=False) for option in (OPTIONS["export_path"], _OWN["force"], *_GOALS)],
        [click.Argument(["name"], default="", metavar="[CONFIGURATION]")],
        callback=_apply_command,
        help=_apply_command.__doc__,
        short_help="Write the best configuration into the repository.",
    )
)
