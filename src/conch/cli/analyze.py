"""``conch analyze``: finds the best configuration of models, with the options of NVIDIA's model analyzer.

The options come from their declarations in ``analyze/options/settings.py``; none is named here but for special care.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from conch.analyze.options.not_taken import NO_EFFECT, REFUSED
from conch.analyze.options.reading import flag_of, read_settings
from conch.analyze.options.settings import OPTIONS, AnalyzeSettings
from conch.errors import ConchError, invalid

if TYPE_CHECKING:
    from conch.analyze.profiling.profile import Profile
    from conch.analyze.storage.saved_results import Circumstances, SavedSearch

_FOLDER: Final = click.Path(file_okay=False, path_type=Path)
_FILE: Final = click.Path(dir_okay=False, path_type=Path)
#: The options by which ``report`` and ``apply`` may differ from the run that they are about.
_GOALS: Final = ("objectives", "constraints", "latency_budget", "min_throughput", "price")


@click.group("analyze")
def analyze_command() -> None:
    """Find the best configuration of a model: measure several, rank them, say why.

    \b
    conch analyze profile -m models --profile-models minilm --constraint "p99<100ms"
    conch analyze report --constraint "p99<50ms"     the same measurements under other goals
    conch analyze apply                              the best configuration into the repository
    """


def _profile(config_file: Path | None, apply: bool, apply_disturbed: bool, **given: Any) -> int:
    """Start a server, measure configurations of models at several loads, and write what was found.

    Goes on from where it was interrupted, when it is run again.
    """
    from conch.analyze.profiling.profile import Profile
    from conch.cli import terminal
    from conch.cli.analyzing import ProfileLine

    read = read_settings({name: value for name, value in given.items() if value not in (None, (), False)}, config_file)
    console, messages = terminal.console(), terminal.console(stderr=True)
    for warning in read.warnings:
        messages.print(f"warning: {warning}", style="yellow", highlight=False)
    if not read.settings.profile_models:
        raise invalid(f"profile_models: name the models to measure, as --profile-models a,b{_models(read.settings)}")
    _check_output(read.settings)
    problem: ConchError | None = None
    status = 0
    line = ProfileLine(messages)
    with Profile(read.settings, line) as profile, closing(line):
        try:
            profile.run()
        except KeyboardInterrupt:
            messages.print("Interrupted: the same command goes on from here.", highlight=False)
            status = 130
        except ConchError as error:
            problem = error
        circumstances, searches = _results(profile, read.settings)
    if searches:
        _write(read.settings, circumstances, searches)
        status = status or _show(console, read.settings.export_path, circumstances, searches)
    if problem is not None:
        raise problem
    if apply and not status:
        _apply(read.settings.export_path, circumstances, searches, "", apply_disturbed)
    return status


@analyze_command.command("report", short_help="Rank the same measurements again, under other goals.")
@click.option("-e", "--export-path", type=_FOLDER, default=Path("analysis"), metavar="DIR",
              help="Folder of the analysis (analysis).")  # fmt: skip
@click.option("--output-formats", "-o", metavar="NAME,…", help="html, pdf, csv, json (default: all but pdf).")
def _report(export_path: Path, output_formats: str | None, **goals: Any) -> int:
    """Rank what was measured, under other goals if they are given, and write the reports again."""
    from conch.cli import terminal

    settings, circumstances, searches = _saved(export_path, output_formats, goals)
    _write(settings, circumstances, searches, keep=False)
    return _show(terminal.console(), export_path, circumstances, searches)


@analyze_command.command("apply", short_help="Write the best configuration into the repository.")
@click.argument("name", default="", metavar="[CONFIGURATION]")
@click.option("-e", "--export-path", type=_FOLDER, default=Path("analysis"), metavar="DIR",
              help="Folder of the analysis (analysis).")  # fmt: skip
@click.option("--apply-disturbed", is_flag=True, help="Even if its measurement was disturbed.")
def _apply_command(name: str, export_path: Path, apply_disturbed: bool, **goals: Any) -> None:
    """Write the best configuration, or the one that is named, into the repository, and show the difference."""
    _, circumstances, searches = _saved(export_path, None, goals)
    _apply(export_path, circumstances, searches, name, apply_disturbed)


def _models(settings: AnalyzeSettings) -> str:
    """The names that could be meant, for a message."""
    from conch.repository.scan import ModelRepository

    if settings.model_repository is None:
        return ""
    names = sorted(ModelRepository([settings.model_repository.resolve()]).names())
    return f"; there are {_some(names)}" if names else ""


def _check_output(settings: AnalyzeSettings) -> None:
    """Raise INVALID_ARG where configurations would be written over what somebody else has put there."""
    folder = settings.output_model_repository_path
    if folder is None or settings.override_output_model_repository or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise invalid(
            f"output_model_repository_path: {folder} has something in it; write over it with"
            " --override-output-model-repository"
        )


def _results(profile: Profile, settings: AnalyzeSettings) -> tuple[Circumstances, list[SavedSearch]]:
    from conch.analyze.search.strategies.choice import axis_of
    from conch.analyze.storage.saved_results import Circumstances, SavedSearch
    from conch.machine.facts import MachineFacts

    outcomes = [one for one in profile.outcomes if one.results]
    rates = bool(outcomes) and axis_of(settings, outcomes[0].search).rates
    local = settings.triton_launch_mode == "local"
    circumstances = Circumstances(
        load_kind="request_rate" if rates else "concurrency",
        batch_sizes={one.name: settings.batch_size_of(one.name) for one in settings.profile_models},
        server="conch serve, started for this" if local else settings.endpoint,
        machine=[("Machine", str(MachineFacts.read()))],
        settings=list(settings.given()),
        reproduce=_shell(sys.argv),
        repository=str(settings.model_repository.resolve()) if settings.model_repository is not None else "",
    )
    searches = [SavedSearch(one.search.models, one.search.goals, one.results, one.complete) for one in outcomes]
    return circumstances, searches


def _shell(arguments: Sequence[str]) -> str:
    import shlex

    return shlex.join(["conch", *arguments[1:]])


def _saved(folder: Path, formats: str | None, given: Mapping[str, Any]) -> tuple[
    AnalyzeSettings, Circumstances, list[SavedSearch]
]:  # fmt: skip
    """What was saved, under the goals that are given now."""
    from dataclasses import replace

    from conch.analyze.judging.goals import Goals
    from conch.analyze.storage.saved_results import load

    circumstances, searches = load(folder)
    chosen = {name: value for name, value in given.items() if value not in (None, ())}
    settings = read_settings(chosen | ({"output_formats": formats} if formats else {})).settings
    settings = replace(settings, export_path=folder)
    if not chosen:
        return settings, circumstances, searches
    searches = [
        replace(one, goals=Goals(
            {name: replace(wanted, **_replaced(settings, name, chosen)) for name, wanted in one.goals.models.items()},
            settings.price or one.goals.price,
        ))
        for one in searches
    ]  # fmt: skip
    return settings, circumstances, searches


def _replaced(settings: AnalyzeSettings, model: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The goals of a model that the options change."""
    wanted = settings.goals([model]).models[model]
    changed: dict[str, Any] = {}
    if "objectives" in chosen:
        changed["objectives"] = wanted.objectives
    if not {"constraints", "latency_budget", "min_throughput"}.isdisjoint(chosen):
        changed["constraints"] = wanted.constraints
    return changed


def _write(
    settings: AnalyzeSettings, circumstances: Circumstances, searches: Sequence[SavedSearch], *, keep: bool = True
) -> None:
    """Write the results, and the reports of each search: in a folder of its own where there are several."""
    from conch.analyze.report import files
    from conch.analyze.report.assembling import analysis_of
    from conch.analyze.report.page import page
    from conch.analyze.storage.saved_results import save

    if keep:
        save(settings.export_path, circumstances, searches)
    for search, folder in _folders(settings.export_path, searches):
        folder.mkdir(parents=True, exist_ok=True)
        analysis = analysis_of(search, circumstances, _apply_line(settings.export_path))
        if "csv" in settings.output_formats:
            for name, text in files.tables(analysis).items():
                (folder / name).write_text(text, encoding="utf-8")
        if "json" in settings.output_formats:
            (folder / "analysis.json").write_text(files.json(analysis), encoding="utf-8")
        if settings.skip_summary_reports:
            continue
        if "html" in settings.output_formats:
            from conch.reports.html import html

            (folder / "analysis.html").write_text(html(page(analysis)), encoding="utf-8")
        if "pdf" in settings.output_formats:
            from conch.reports.pdf import pdf

            (folder / "analysis.pdf").write_bytes(pdf(page(analysis)))


def _folders(export_path: Path, searches: Sequence[SavedSearch]) -> Iterator[tuple[SavedSearch, Path]]:
    for search in searches:
        yield search, export_path if len(searches) == 1 else export_path / "+".join(search.models)


def _apply_line(export_path: Path) -> str:
    return _shell(["conch", "analyze", "apply", *(["-e", str(export_path)] if str(export_path) != "analysis" else [])])


def _show(
    console: Any, export_path: Path, circumstances: Circumstances, searches: Sequence[SavedSearch]
) -> int:  # fmt: skip
    """Print the rankings; 1 where a search has no configuration that keeps its constraints."""
    from conch.analyze.report.assembling import analysis_of
    from conch.analyze.report.terminal import shown

    status = 0
    for search, folder in _folders(export_path, searches):
        analysis = analysis_of(search, circumstances, _apply_line(export_path))
        for part in shown(analysis, console.width):
            console.print(part, highlight=False)
        if (folder / "analysis.html").exists():
            console.print(f"Report: {folder / 'analysis.html'}", highlight=False)
        status = status or int(analysis.best is None)
    return status


def _apply(
    export_path: Path, circumstances: Circumstances, searches: Sequence[SavedSearch], name: str, disturbed: bool
) -> None:
    from conch.analyze.applying import apply, changes, chosen
    from conch.analyze.judging.ranking import rank
    from conch.analyze.servers.configurations import concise, with_ensembles
    from conch.repository.scan import ModelRepository

    if not circumstances.repository:
        raise invalid("apply: the server has the models; there is no repository here to write to")
    repository = ModelRepository([Path(circumstances.repository)])
    known = [one for search in searches for one in search.results]
    if name and not any(one.candidate.name == name for one in known):
        raise invalid(
            f"{export_path} has no configuration '{name}'; it has {_some(one.candidate.name for one in known)}"
        )
    for search in searches:
        named = [one for one in search.results if one.candidate.name == name]
        if name and not named:
            continue
        result = named[0] if named else chosen(rank(search.results, search.goals), disturbed=disturbed)
        configs = search.results[0].configs
        overrides = concise(with_ensembles(result.candidate.overrides, configs), configs)
        changed = changes(repository, overrides)
        if not changed:
            click.echo(f"{result.candidate.name}: the repository says so already.")
            continue
        kept = apply(repository, changed)
        for change in changed:
            click.echo(change.diff, nl=False)
        click.echo(
            f"Applied {result.candidate.name}. conch serve --model-repository {circumstances.repository} runs it."
        )
        for old in kept:
            click.echo(f"What was there before: {old}")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


class _ProfileCommand(click.Command):
    """A command whose help shows the common options, and names the others."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Options from a file"):
            formatter.write_dl([("-f, --config-file FILE", "YAML with model analyzer's keys; flags go before it.")])
        for group, names in _by_group(common=True):
            with formatter.section(group):
                formatter.write_dl([_record(name) for name in names])
        with formatter.section("Afterwards"):
            formatter.write_dl(
                [
                    ("--apply", "Write the best configuration into the repository."),
                    ("--apply-disturbed", "Even if its measurement was disturbed."),
                ]
            )
        formatter.write("\n")
        for group, names in _by_group(common=False):
            text = f"{group}: {', '.join(map(flag_of, names))}"
            formatter.write(textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False) + "\n")
        formatter.write("\nconch analyze profile --help-all describes them all.\n")


def _by_group(common: bool | None) -> Iterator[tuple[str, list[str]]]:
    """The options by their groups: those that are common, the others, or all (None)."""
    chosen = [name for name, one in OPTIONS.items() if common is None or one.metadata["common"] == common]
    for group, names in groupby(chosen, key=lambda name: str(OPTIONS[name].metadata["group"])):
        yield group, list(names)


def _record(name: str) -> tuple[str, str]:
    metadata = OPTIONS[name].metadata
    short = [flag for flag in metadata["flags"] if not flag.startswith("--")]
    return f"{', '.join([*short, flag_of(name)])} {metadata['metavar']}".rstrip(), metadata["help"]


def _help_all(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    formatter = context.make_formatter()
    for group, names in _by_group(common=None):
        with formatter.section(group):
            formatter.write_dl([_record(name) for name in names])
    click.echo(formatter.getvalue().strip())
    context.exit()


def _click_option(name: str) -> click.Option:
    """The flags of an option: its name, and the others that it goes by; one of a truth value has none."""
    one = OPTIONS[name]
    flags = [*one.metadata["flags"], f"--{name.replace('_', '-')}"]
    if one.default is False:
        return click.Option([name, *dict.fromkeys(flags)], is_flag=True)
    return click.Option([name, *dict.fromkeys(flags)], multiple=one.metadata["several"])


def _foreign_option(name: str) -> click.Option:
    """A flag of model analyzer's that is answered with the reason why it has no effect, or is refused."""
    bare = name in (
        "collect_cpu_metrics",
        "dcgm_disable",
        "skip_detailed_reports",
        "always_report_gpu_metrics",
        "perf_output",
        "use_concurrency_formula",
    )
    return click.Option([name, f"--{name.replace('_', '-')}"], hidden=True, is_flag=bare)


analyze_command.add_command(
    _ProfileCommand(
        "profile",
        callback=_profile,
        help=_profile.__doc__,
        short_help="Measure configurations, and say which is best and why.",
        params=[
            click.Option(["config_file", "-f", "--config-file"], type=_FILE),
            *map(_click_option, OPTIONS),
            *map(_foreign_option, (*NO_EFFECT, *REFUSED)),
            click.Option(["--apply"], is_flag=True),
            click.Option(["--apply-disturbed"], is_flag=True),
            click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help_all),
        ],
        context_settings={"max_content_width": 100},
        options_metavar="[options]",
    )
)
for _command in ("report", "apply"):
    for _name in _GOALS:
        _option = _click_option(_name)
        _option.help = OPTIONS[_name].metadata["help"]
        _option.metavar = OPTIONS[_name].metadata["metavar"]
        analyze_command.commands[_command].params.append(_option)
