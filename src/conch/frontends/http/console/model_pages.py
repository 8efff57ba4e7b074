"""The data of the console's page for a model version: facts fixed at load, and current statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from conch.config import render
from conch.config.reading import read_json
from conch.repository.errors import without_directories
from conch.server.execution.ensemble import Ensemble
from conch.server.model import Model
from conch.server.overview import FIELDS, Overview
from conch.telemetry.statistics import Generation, Histogram, ModelStatistics, Work

#: The manifest of a converted model, and its members that the console shows.
_MANIFEST: Final = "conch.json"
_VERDICT: Final = (
    "conch",
    "created",
    "source",
    "task",
    "machine",
    "warnings",
    "variants",
    "auto",
    "by_shape",
    "choice",
)
#: Members of variants and sources that are long and that the console does not show.
_LONG: Final = ("contrasts", "files")


async def page(model: Model, overview: Overview) -> dict[str, Any]:
    """Return what does not change while a version is loaded, and its history."""
    effective = orjson.loads(model.config_json)
    return {
        "name": model.name,
        "version": model.version,
        "serial": model.serial,
        "metadata": model.metadata,
        "config": effective,
        "completed": list(completed_fields(effective, orjson.loads(render.to_json(model.written_config)))),
        "decoupled": model.signature.decoupled,
        "max_batch_size": model.signature.max_batch_size,
        "adapters": model.signature.adapters,
        "facts": model.statistics.runtime_facts,
        "load_seconds": model.statistics.load_ns / 1e9,
        "optional": [name for name, spec in model.signature.inputs.items() if spec.optional],
        "labels": {name: labels for name in model.signature.outputs if (labels := model.labels(name))},
        "verdict": await asyncio.to_thread(_verdict, model),
        "steps": _steps(model),
        "history": overview.history.series(overview.key(model.key, model.version)),
        "fields": FIELDS,
    }


def current(model: Model) -> dict[str, Any]:
    """Return the statistics of a version, the state of its workers, and the times of its steps if it is an ensemble."""
    statistics = model.statistics
    snapshot = statistics.snapshot()
    snapshot.pop("response_stats")
    return {
        "serial": model.serial,
        "statistics": snapshot,
        "failures": {reason.value: count for reason, count in statistics.failures.items() if count},
        "memory": statistics.memory.kinds(),
        "queue": len(statistics.queue),
        "in_flight": model.in_flight,
        "sequences": model.executor.sequences,
        "restarts": {reason.value: count for reason, count in statistics.restarts.items() if count},
        "workers": [
            {
                "name": process.name,
                "pid": process.pid,
                "alive": process.alive,
                "stalled": not process.verdict.responsive,
            }
            for process in model.executor.processes
        ],
        "work": _work(statistics.work),
        "latency": _histogram(statistics.fine_latency, 1 / 1000),
        "generation": _generation(statistics),
        "steps": _steps(model),
    }


def completed_fields(effective: Any, written: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the fields that differ from the written configuration: ``a.b``, ``input[0].dims``."""
    if isinstance(effective, dict):
        for name, value in effective.items():
            other = written.get(name) if isinstance(written, dict) else None
            if _is_leaf(value):
                # A missing message has the defaults of its fields.
                if value != (other if other is not None else _default_of(value)):
                    yield f"{path}{name}"
            else:
                yield from completed_fields(value, other, f"{path}{name}.")
    else:
        for index, value in enumerate(effective):
            other = written[index] if isinstance(written, list) and index < len(written) else None
            where = f"{path.removesuffix('.')}[{index}]"
            if _is_leaf(value):
                if value != other:
                    yield where
            else:
                yield from completed_fields(value, other, f"{where}.")


def _is_leaf(value: Any) -> bool:
    """Whether a value is compared as a whole: a scalar, a list of scalars, or an empty message."""
    if isinstance(value, list):
        return not any(isinstance(element, dict) for element in value)
    return not isinstance(value, dict) or not value


def _default_of(value: Any) -> Any:
    """Return the default of a field that is not set; None if it is unknown, as that of an enumeration is."""
    return type(value)() if isinstance(value, str | int | float | list) else None


def _verdict(model: Model) -> Mapping[str, Any] | None:
    """Return the verdict of ``conch convert``, None for a model that was not converted. Blocks: it reads a file."""
    if model.directory is None:
        return None
    try:
        manifest = read_json(model.directory / _MANIFEST)
        verdict = {name: manifest[name] for name in _VERDICT if name in manifest}
        variants = [_without_long(variant) for variant in verdict.get("variants", ())]
        source = _without_long(verdict.get("source", {}))
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    source["model"] = without_directories(str(source.get("model", "")))
    return {**verdict, "variants": variants, "source": source}


def _without_long(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in _LONG}


def _steps(model: Model) -> list[dict[str, Any]]:
    """Return the steps of an ensemble with their total times (ns); none for another model."""
    executor = model.executor
    if not isinstance(executor, Ensemble):
        return []
    return [
        {
            "model": step.model,
            "version": step.version,
            "inputs": step.inputs,
            "outputs": step.outputs,
            "count": times.count,
            "failed": times.failed,
            "total_ns": times.total_ns,
            "queue_ns": times.queue_ns,
            "compute_ns": times.compute_ns,
        }
        for step, times in zip(executor.steps, executor.step_times, strict=True)
    ]


def _work(work: Work | None) -> dict[str, Any] | None:
    if work is None:
        return None
    return {
        "tokens": work.tokens,
        "padded": work.padded,
        "sequences": work.sequences,
        "runs": work.runs,
        "phases": {
            "prepare": work.prepare_ns, "wait": work.waited_ns, "arrange": work.arrange_ns, "engine": work.engine_ns,
            "respond": work.answer_ns,
        },
        "sequences_per_execution": _histogram(work.sequences_per_execution),
        "tokens_per_execution": _histogram(work.tokens_per_execution),
    }  # fmt: skip


def _generation(statistics: ModelStatistics) -> dict[str, Any] | None:
    generation: Generation | None = statistics.generation
    if generation is None:
        return None
    return {
        **generation.snapshot(),
        "kv_cache_bytes": generation.cache_bytes,
        "histograms": {
            "first_token": _histogram(generation.first_token, 1000),
            "inter_token": _histogram(generation.inter_token, 1000),
            "prompt_length": _histogram(generation.prompt_length),
            "generated_length": _histogram(generation.generated_length),
        },
    }


def _histogram(histogram: Histogram | None, factor: float = 1.0) -> dict[str, Any] | None:
    """Return the non-empty part of a histogram; ``factor`` converts its values."""
    if histogram is None:
        return None
    used = [bucket for bucket, count in enumerate(histogram.counts) if count]
    first, last = (used[0], used[-1] + 1) if used else (0, 0)
    bounds = [0.0, *(bound * factor for bound in histogram.bounds)]
    return {
        "from": bounds[first:last],
        "to": [*bounds[1:], None][first:last],
        "counts": histogram.counts[first:last],
        "count": histogram.count,
        "mean": histogram.sum * factor / histogram.count if histogram.count else None,
    }
