"""``conch analyze``: finds the best configuration of models, with the options of NVIDIA's model analyzer.

``measure/analyze/options/settings.py`` declares the options; ``analyze_results.py`` writes the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from conch.cli.interrupting import INTERRUPTED
from conch.cli.options import OptionsCommand, hidden_option
from conch.core.errors import ConchError, internal, invalid, one_line, unavailable
from conch.measure.analyze.options.reading import read_settings
from conch.measure.analyze.options.settings import OPTIONS, AnalyzeSettings
from conch.measure.analyze.options.unsupported import NO_EFFECT, REFUSED
from conch.measure.analyze.results import is_name_of_candidate
from conch.options.declaration import File, flag_of, option, options_of

if TYPE_CHECKING:
    from conch.measure.analyze.results import CandidateResult
    from conch.measure.analyze.saved_results import Circumstances, SavedSearch


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
    conch analyze report --constraint "p99<50ms"     the same measurements under other goals
    conch analyze apply                              the best configuration into the repository
    """


def _profile(config_file: Path | None, apply: bool, **options: Any) -> int:
    """Start a server, measure configurations of models at several loads, and write the results.

    Resumes an interrupted analysis if the same command is run again.
    """
    from conch.cli.analyze_progress import ProfileLine
    from conch.cli.analyze_results import results_of, show_results, write_results
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
    from conch.cli.analyze_results import check_reports
    from conch.machine.extras import require

    chosen = {name: value for name, value in options.items() if value not in (None, (), False)}
    read = read_settings(chosen, config_file)
    if not read.settings.profile_models:
        raise invalid(f"profile_models: name the models to measure, as --profile-models a,b{_models(read.settings)}")
    if read.settings.run_config_search_mode == "optuna":
        require("the search mode optuna", "optuna")
    _check_output(read.settings)
    formats = read.settings.output_formats
    settings, missing = check_reports(read.settings, chosen=formats != OPTIONS["output_formats"].default)
    return settings, [*read.warnings, *([missing] if missing else [])]


def _report(export_path: str | None, output_formats: str | None, **goals: Any) -> int:
    """Rank the measurements and write the reports again; with other goals, into their own directory."""
    from conch.cli.analyze_results import check_reports, saved_under, show_results, write_results
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
    from conch.cli.analyze_results import saved_under

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
    export_path: Path, circumstances: Circumstances, searches: Sequence[SavedSearch], name: str = "", *,
    force: bool = False,
) -> None:  # fmt: skip
    from conch.measure.analyze.applying import apply, changes
    from conch.measure.analyze.servers.configurations import concise, with_ensembles
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


def _recommended(search: SavedSearch) -> tuple[CandidateResult, str]:
    """Return the best configuration, and why it is not recommended; empty if it is.

    Raises UNAVAILABLE if no configuration satisfies the constraints.
    """
    from conch.measure.analyze.judging.ranking import recommend

    recommendation = recommend(search.results, search.goals, search.final, complete=search.complete)
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
