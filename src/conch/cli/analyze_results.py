"""Writes the results of ``conch analyze``: the saved results, the reports and the table on the terminal."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.core.errors import ConchError, one_line
from conch.measure.analyze.options.reading import read_settings
from conch.measure.analyze.options.settings import AnalyzeSettings

if TYPE_CHECKING:
    from conch.measure.analyze.judging.goals import Goals
    from conch.measure.analyze.profiling.profile import Profile
    from conch.measure.analyze.report.analysis import Analysis
    from conch.measure.analyze.saved_results import Circumstances, SavedSearch


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


def results_of(profile: Profile, settings: AnalyzeSettings) -> tuple[Circumstances, list[SavedSearch]]:
    """Return the results of a profile so far, and how they were measured."""
    from conch.machine.facts import MachineFacts
    from conch.measure.analyze.saved_results import Circumstances, SavedSearch
    from conch.measure.analyze.search.axis import axis_of

    outcomes = [outcome for outcome in profile.outcomes if outcome.results]
    rates = bool(outcomes) and axis_of(settings, outcomes[0].search.models).rates
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
    searches = [
        SavedSearch(outcome.search.models, outcome.search.goals, outcome.results, outcome.complete, outcome.final)
        for outcome in outcomes
    ]
    return circumstances, searches


def saved_under(
    folder: Path, formats: str | None, options: Mapping[str, Any]
) -> tuple[AnalyzeSettings, Circumstances, list[SavedSearch]]:
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
    settings: AnalyzeSettings, circumstances: Circumstances, searches: Sequence[SavedSearch], *, keep: bool = True
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
    console: Any, settings: AnalyzeSettings, circumstances: Circumstances, searches: Sequence[SavedSearch]
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


def _folders(export_path: Path, searches: Sequence[SavedSearch]) -> Iterator[tuple[SavedSearch, Path]]:
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
