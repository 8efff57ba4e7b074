"""``conch analyze``: finds the best configuration of models, with the options of NVIDIA's model analyzer.

What the commands do, in their order; the options are in ``analyze_options.py``, the results in ``analyze_results.py``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from conch.cli.status import INTERRUPTED
from conch.core.errors import ConchError, internal, invalid, one_line, unavailable
from conch.measure.analyze.options.not_taken import NO_EFFECT, REFUSED
from conch.measure.analyze.options.reading import flag_of, read_settings
from conch.measure.analyze.options.settings import OPTIONS, AnalyzeSettings
from conch.measure.analyze.results import is_name_of_candidate

if TYPE_CHECKING:
    from conch.measure.analyze.results import CandidateResult
    from conch.measure.analyze.saved_results import Circumstances, SavedSearch


class ProfileCommand(click.Command):
    """A command whose help shows the common options, and names the others."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Options from a file"):
            formatter.write_dl(
                [
                    (
                        "-f, --config-file FILE",
                        "YAML file with model analyzer's keys; command-line options take precedence.",
                    )
                ]
            )
        for group, names in _by_group(common=True):
            with formatter.section(group):
                formatter.write_dl([_record(name) for name in names])
        with formatter.section("Afterwards"):
            formatter.write_dl(
                [("--apply", "Write the best configuration into the repository, if it is better than the default.")]
            )
        formatter.write("\n")
        for group, names in _by_group(common=False):
            text = f"{group}: {', '.join(map(flag_of, names))}"
            formatter.write(textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False) + "\n")
        formatter.write("\nconch analyze profile --help-all describes them all.\n")


def _by_group(common: bool | None) -> Iterator[tuple[str, list[str]]]:
    """The options by their groups: those that are common, the others, or all (None)."""
    chosen = [name for name, option in OPTIONS.items() if common is None or option.metadata["common"] == common]
    for group, names in groupby(chosen, key=lambda name: str(OPTIONS[name].metadata["group"])):
        yield group, list(names)


def _record(name: str) -> tuple[str, str]:
    metadata = OPTIONS[name].metadata
    short = [flag for flag in metadata["flags"] if not flag.startswith("--")]
    return f"{', '.join([*short, flag_of(name)])} {metadata['metavar']}".rstrip(), metadata["help"]


def help_all(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    formatter = context.make_formatter()
    for group, names in _by_group(common=None):
        with formatter.section(group):
            formatter.write_dl([_record(name) for name in names])
    click.echo(formatter.getvalue().strip())
    context.exit()


def click_option(name: str) -> click.Option:
    """The flags of an option: its name, and the others that it goes by; one of a truth value has none."""
    option = OPTIONS[name]
    flags = [*option.metadata["flags"], f"--{name.replace('_', '-')}"]
    if option.default is False:
        return click.Option([name, *dict.fromkeys(flags)], is_flag=True)
    return click.Option([name, *dict.fromkeys(flags)], multiple=option.metadata["several"])


def foreign_option(name: str) -> click.Option:
    """A flag of model analyzer's that is answered with the reason why it has no effect, or is refused."""
    bare = name in (
        "collect_cpu_metrics",
        "dcgm_disable",
        "skip_detailed_reports",
        "always_report_gpu_metrics",
        "perf_output",
        "use_concurrency_formula",
        "concurrency_sweep_disable",
    )
    return click.Option([name, f"--{name.replace('_', '-')}"], hidden=True, is_flag=bare)


_FOLDER: Final = click.Path(file_okay=False, path_type=Path)
_FILE: Final = click.Path(dir_okay=False, path_type=Path)
#: The options by which ``report`` and ``apply`` may differ from the run that they are about.
_GOALS: Final = ("objectives", "constraints", "latency_budget", "min_throughput", "price")


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
    from conch.cli import terminal
    from conch.cli.analyze_progress import ProfileLine
    from conch.cli.analyze_results import results_of, show_results, write_results
    from conch.cli.interrupting import ended_as_by_ctrl_c
    from conch.measure.analyze.profiling.profile import Profile

    settings, warnings = _settings(config_file, options)
    console, messages = terminal.console(), terminal.console(stderr=True)
    for warning in warnings:
        messages.print(f"warning: {warning}", style="yellow", highlight=False)
    problems: list[ConchError] = []
    status = 0
    line = ProfileLine(messages)
    profile = Profile(settings, line)
    with ended_as_by_ctrl_c():
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
        except ConchError as error:  # the server is not as it was before
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
    """What is said, and what of it has no effect; what is wrong is told before a server is started."""
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


@analyze_command.command("report", short_help="Rank the measurements again, with other goals.")
@click.option("-e", "--export-path", type=_FOLDER, default=Path("analysis"), metavar="DIR",
              help="Directory of the analysis (analysis).")  # fmt: skip
@click.option("--output-formats", "-o", metavar="NAME,…", help="html, csv, json (default: all).")
def _report(export_path: Path, output_formats: str | None, **goals: Any) -> int:
    """Rank the measurements and write the reports again; with other goals, into their own directory."""
    from conch.cli import terminal
    from conch.cli.analyze_results import check_reports, saved_under, show_results, write_results

    settings, circumstances, searches = saved_under(export_path, output_formats, goals)
    if settings.export_path != export_path:
        circumstances = replace(circumstances, repository="")  # 'apply' alone takes the goals of the run
    settings, missing = check_reports(settings, chosen=output_formats is not None)
    for problem in [*([missing] if missing else []), *write_results(settings, circumstances, searches, keep=False)]:
        terminal.console(stderr=True).print(f"warning: {problem}", style="yellow", highlight=False)
    return show_results(terminal.console(), settings, circumstances, searches)


@analyze_command.command("apply", short_help="Write the best configuration into the repository.")
@click.argument("name", default="", metavar="[CONFIGURATION]")
@click.option("-e", "--export-path", type=_FOLDER, default=Path("analysis"), metavar="DIR",
              help="Directory of the analysis (analysis).")  # fmt: skip
@click.option("--force", is_flag=True, help="Apply a configuration that is not proven to be better.")
def _apply_command(name: str, export_path: Path, force: bool, **goals: Any) -> None:
    """Write the best configuration, or the named one, into the repository, and show the difference.

    Without a name, the configuration must have been better than the default in the final rounds.
    """
    from conch.cli.analyze_results import saved_under

    _, circumstances, searches = saved_under(export_path, None, goals)
    _apply(export_path, circumstances, searches, name, force=force)


def _models(settings: AnalyzeSettings) -> str:
    """The names that could be meant, for a message."""
    from conch.repository.scan import ModelRepository

    if settings.model_repository is None:
        return ""
    names = sorted(ModelRepository([settings.model_repository.resolve()]).names())
    return f"; there are {_some(names)}" if names else ""


def _check_output(settings: AnalyzeSettings) -> None:
    """Raise INVALID_ARG where configurations would be written over what somebody else has put there.

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
        raise invalid("apply: the models are on the server; there is no local repository to write to")
    repository = ModelRepository([Path(circumstances.repository)])
    known = [result for search in searches for result in search.results]
    if name and not any(result.candidate.name == name for result in known):
        raise invalid(
            f"{export_path} has no configuration '{name}'; it has {_some(result.candidate.name for result in known)}"
        )
    wanted, refused = [], []
    for search in searches:  # all of them before the first is written: one that is refused refuses all
        named = [result for result in search.results if result.candidate.name == name]
        if name and not named:
            continue
        result, reason = (named[0], "") if named else _recommended(search)
        configs = search.results[0].configs
        overrides = concise(with_ensembles(result.candidate.overrides, configs), configs)
        changed = changes(repository, overrides)
        wanted.append((result, changed))
        if changed and reason:
            refused.append(reason)
    for _, changed in wanted:
        for change in changed:
            click.echo(change.diff, nl=False)
    if refused and not force:
        raise unavailable(f"nothing is applied: {'; '.join(refused)}. 'apply --force' applies it anyway")
    for result, changed in wanted:
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
    """The best configuration, and the reason why it is not recommended, empty if it is.

    Raises UNAVAILABLE if no configuration keeps the constraints.
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
    ProfileCommand(
        "profile",
        callback=_profile,
        help=_profile.__doc__,
        short_help="Measure configurations and find the best one.",
        params=[
            click.Option(["config_file", "-f", "--config-file"], type=_FILE),
            *map(click_option, OPTIONS),
            *map(foreign_option, (*NO_EFFECT, *REFUSED)),
            click.Option(["--apply"], is_flag=True),
            click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=help_all),
        ],
        context_settings={"max_content_width": 100},
        options_metavar="[options]",
    )
)
for _command in ("report", "apply"):
    for _name in _GOALS:
        _option = click_option(_name)
        _option.help = OPTIONS[_name].metadata["help"]
        _option.metavar = OPTIONS[_name].metadata["metavar"]
        analyze_command.commands[_command].params.append(_option)
