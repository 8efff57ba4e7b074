"""The figures of an analysis as CSV in model analyzer's columns, and as complete JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any, Final

from conch.measure.analyze.report.analysis import Analysis, RankedCandidate, traits_of
from conch.measure.analyze.results import Point
from conch.measure.reports.report import Cell, Table
from conch.measure.reports.text import csv_text, json_text

#: The version of the JSON format; incremented by changes that break existing readers.
FORMAT: Final = 2


def tables(analysis: Analysis) -> Mapping[str, str]:
    """Return the CSV files by model analyzer's names; those of GPUs only if there are figures of GPUs."""
    level = "Concurrency" if analysis.load_kind == "concurrency" else "Request Rate"
    inference = (
        "Model", "Batch", level, "Model Config Path", "Instance Group", "Max Batch Size", "Satisfies Constraints",
        "Throughput (infer/sec)", "p99 Latency (ms)",
    )  # fmt: skip
    gpu = (
        "Model", "GPU UUID", "Batch", level, "Model Config Path", "Instance Group", "Satisfies Constraints",
        "GPU Memory Usage (MB)", "GPU Utilization (%)", "GPU Power Usage (W)",
    )  # fmt: skip
    by_name = {"metrics-model-inference.csv": csv_text(Table.of(inference, _inference(analysis)))}
    if analysis.has_gpus:
        by_name["metrics-model-gpu.csv"] = csv_text(Table.of(gpu, _gpus(analysis)))
    return by_name


def json(analysis: Analysis) -> str:
    """Return the whole analysis as JSON; units are seconds, bytes and fractions from 0 to 1."""
    document = {
        "format": FORMAT,
        "models": list(analysis.models),
        "wanted": analysis.goal,
        "load": analysis.load_kind,
        "server": analysis.server,
        "machine": dict(analysis.machine),
        "settings": dict(analysis.settings),
        "best": analysis.best.name if analysis.best else None,
        "recommended": analysis.recommended.name if analysis.recommended else None,
        "advice": analysis.advice,
        "reason": analysis.reason,
        "best_beside_default": asdict(analysis.comparison) if analysis.comparison else None,
        "notes": list(analysis.notes),
        "configurations": [_candidate(candidate) for candidate in analysis.candidates],
    }
    return json_text(document)


def _candidate(candidate: RankedCandidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "overrides": candidate.result.candidate.overrides,
        "satisfies_constraints": candidate.satisfied,
        "broken_constraints": list(candidate.broken),
        "score": candidate.score if 0.0 < candidate.score < inf else None,  # JSON has no infinity
        "tied": candidate.tied,
        "best_load": candidate.point.load if candidate.point else None,
        "error": candidate.result.error,
        "points": [asdict(point) | {"throughput": point.throughput} for point in candidate.result.points],
        "configs": candidate.result.configs,
    }


def _points(analysis: Analysis) -> Iterator[tuple[RankedCandidate, Point, str, str]]:
    """Yield every point with the shared columns: whether it satisfies the constraints, and the instances."""
    for candidate in analysis.candidates:
        for point in candidate.result.points:
            instances = " / ".join(
                traits_of(candidate.result, model, gpus=analysis.has_gpus).instance_text for model in analysis.models
            )
            yield candidate, point, "Yes" if point.load in candidate.passing else "No", instances


def _inference(analysis: Analysis) -> Iterator[Sequence[Cell]]:
    for candidate, point, satisfies, _ in _points(analysis):
        for model, figures in point.models.items():
            traits = traits_of(candidate.result, model, gpus=analysis.has_gpus)
            yield (
                model, analysis.batch_sizes.get(model, 1), f"{point.load:g}", candidate.name, traits.instance_text,
                traits.max_batch_size, satisfies, f"{figures.throughput:.6g}",
                round(1e3 * figures.percentiles.get(99, 0.0), 3),
            )  # fmt: skip


def _gpus(analysis: Analysis) -> Iterator[Sequence[Cell]]:
    batches = " / ".join(dict.fromkeys(str(analysis.batch_sizes.get(model, 1)) for model in analysis.models))
    for candidate, point, satisfies, instances in _points(analysis):
        for uuid, gpu in point.resources.gpus.items() if point.resources else ():
            yield (
                ", ".join(analysis.models), uuid, batches, f"{point.load:g}", candidate.name, instances,
                satisfies, round(gpu.memory / 1e6, 1), round(100 * gpu.utilisation, 1), round(gpu.power, 1),
            )  # fmt: skip
