"""The result of an analysis in sentences: the best configuration, its advantage, the reasons and the doubts. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from conch.measure.analyze.judging.ranking import DefaultComparison
from conch.measure.analyze.report.analysis import (
    Analysis,
    ConfigTraits,
    Placed,
    load_text,
    memory_of,
    other_changes,
    slowest,
    traits_of,
)
from conch.measure.analyze.results import ModelFigures, Point
from conch.measure.reports.numbers import bytes_of, count, duration, significant, times

#: Changes below this fraction are not mentioned.
_WORTH: Final = 0.05


def title(analysis: Analysis) -> str:
    """Return the result as a title."""
    models = _names(analysis)
    if not analysis.measured:
        return f"No configuration of {models} could be measured"
    return {
        "use": f"A better configuration of {models}",
        "keep": f"Keep the configuration of {models}",
        "unproven": f"No configuration of {models} is proven to be better",
        "none": f"No configuration of {models} satisfies the constraints",
    }[analysis.advice]


def headline(analysis: Analysis) -> str:
    """Return the result in one or two sentences."""
    best, default = analysis.best, analysis.default
    if not analysis.measured:
        return (
            f"No configuration of {_names(analysis)} could be measured: none of {len(analysis.placed)}"
            " completed a request."
        )
    if best is None:
        first = analysis.measured[0]
        if first.disturbed:
            return (
                f"No configuration of {_names(analysis)} reached the goal ({analysis.goal}) while other processes"
                " used the machine."
            )
        violations = f": {'; '.join(first.broken)}" if first.broken else ""
        return (
            f"No configuration of {_names(analysis)} reaches the goal ({analysis.goal})."
            f" The closest is {first.name}{violations}."
        )
    assert best.point is not None
    figures = "" if analysis.disturbed else f": {_figures(analysis, best.point)}"
    if best.is_default:
        doubt = f", but {analysis.reason}" if analysis.advice == "unproven" else ""
        is_best = "looks" if doubt else "is the"
        return f"The configuration of the repository {is_best} best of {len(analysis.measured)}{figures}{doubt}."
    if analysis.advice == "keep":
        own = analysis.comparison.default if analysis.comparison is not None else default.point if default else None
        has = f" ({_figures(analysis, own)})" if own is not None and not own.disturbed else ""
        return f"Keep the configuration of the repository{has}: {analysis.reason}."
    if analysis.advice == "unproven":
        return f"{best.name} looks best of {len(analysis.measured)} configurations{figures}, but {analysis.reason}."
    final = analysis.comparison
    point = final.winner if final is not None else best.point
    return (
        f"{best.name} is the best of {len(analysis.measured)} configurations: {_figures(analysis, point)}"
        f"{_beside(analysis, point)}."
    )


def _beside(analysis: Analysis, best: Point) -> str:
    """Return the default's figures, and the ratio to them."""
    point = analysis.comparison.default if analysis.comparison is not None else None
    if point is None and analysis.default is not None:
        point = analysis.default.point
    if point is None or not point.throughput:
        return "; the default could not be measured"
    ratio = best.throughput / point.throughput
    own = _figures(analysis, point)
    if analysis.comparison is not None and analysis.comparison.unrivalled:
        return f"; the default does not satisfy the constraints ({own})"
    if 1 - _WORTH < ratio < 1 + _WORTH:
        return f"; the default reaches {own}"
    return f", {times(ratio)}{' the throughput of' if ratio >= 2 else ' throughput than'} the default ({own})"


def reasons(analysis: Analysis) -> Iterator[str]:
    """Yield the changes of the best configuration, and their effects."""
    best, default = analysis.best, analysis.default
    if best is None or best.point is None or best.is_default:
        return
    if analysis.comparison is not None and not analysis.disturbed:
        yield f"In the final rounds {best.name} {_as_good(analysis, analysis.comparison)}."
    if analysis.advice == "keep":
        return
    for model in analysis.models:
        of = f"{model}: " if len(analysis.models) > 1 else ""
        after = traits_of(best.result, model, gpus=analysis.has_gpus)
        before = traits_of(default.result, model, gpus=analysis.has_gpus) if default is not None else None
        changes = list(_changes(before, after))
        if other := other_changes(best.result, model):
            changes.append(f"{other} is set")
        if changes:
            yield f"{of}{_capital(_listed(changes))}."
        if default is not None:
            yield from _effects(analysis, best, default, model, of)
    if default is not None and default.point is not None:
        yield from _memory(analysis, best.point, default.point)


def doubts(analysis: Analysis) -> Iterator[str]:
    """Yield the doubts: disturbed measurements, and configurations that are as good."""
    best = analysis.best
    yield from analysis.notes
    if best is not None and best.point is not None:
        if analysis.disturbed:
            yield f"Other processes used the machine while {best.name} was measured. Measure it again."
        for warning in best.point.warnings:
            yield f"{best.name} at {load_text(analysis, best.point.load)}: {warning}."
        tied = [candidate.name for candidate in analysis.placed if candidate.tied and candidate is not best]
        if tied:
            are = "is" if len(tied) == 1 else "are"
            yield f"Within the noise {_listed(tied)} {are} as good as {best.name}, which is the simplest."
    points = [point for candidate in analysis.placed for point in candidate.result.points]
    disturbed = sum(point.disturbed for point in points)
    if disturbed:
        were = "measurement was" if len(points) == 1 else "measurements was" if disturbed == 1 else "measurements were"
        yield f"{disturbed} of {len(points)} {were} disturbed by other processes on the machine."


def missing(analysis: Analysis) -> Iterator[str]:
    """Yield what was not measured or failed, with the reasons."""
    for candidate in analysis.placed:
        if candidate.result.error:
            yield f"{candidate.name}: {candidate.result.error.rstrip('.')}."
        elif candidate.point is None:
            yield f"{candidate.name}: no request succeeded."
        failed = sum(figures.failed for point in candidate.result.points for figures in point.models.values())
        if failed and candidate.point is not None:
            total = failed + sum(f.requests for point in candidate.result.points for f in point.models.values())
            yield f"{candidate.name}: {count(failed)} of {count(total)} requests failed."
    stopped = [
        candidate.name for candidate in analysis.placed if candidate.point is not None and candidate.point.stopped
    ]
    if stopped:
        yield f"Measured briefly, because they were clearly worse: {_listed(stopped)}."


def _as_good(analysis: Analysis, comparison: DefaultComparison) -> str:
    """Return ``has 2.9 times the throughput of the default (2.7 to 3.1 with 95 % confidence)``."""
    ratio = significant(comparison.ratio)
    what = "has {} times the throughput of" if analysis.only_throughput else "is {} times as good as"
    within = comparison.interval
    sure = f"{significant(within.low)} to {significant(within.high)} with 95 % confidence" if within else "one round"
    return f"{what.format(ratio)} the default ({sure})"


def _figures(analysis: Analysis, point: Point) -> str:
    figures = slowest(point)
    latency = f" with a p99 latency of {duration(figures.percentiles.get(99))}" if figures is not None else ""
    return f"{significant(point.throughput)} infer/s{latency} at {load_text(analysis, point.load)}"


def _changes(before: ConfigTraits | None, after: ConfigTraits) -> Iterator[str]:
    if before is None or after.total != before.total:
        instead = f" instead of {before.total}" if before is not None else ""
        work = "instances work" if after.total != 1 else "instance works"
        yield f"{after.total} {work} at the same time{instead}"
    if after.batching and (before is None or not before.batching):
        yield f"requests that wait are computed together, up to {after.max_batch_size} at a time (dynamic batching)"
    elif before is not None and before.batching and not after.batching:
        yield "requests are computed one at a time (no dynamic batching)"
    elif before is not None and after.max_batch_size != before.max_batch_size:
        yield f"batches have up to {after.max_batch_size} requests instead of {before.max_batch_size}"
    if before is not None and after.delay != before.delay:
        held = (
            f"holds requests for up to {duration(after.delay / 1e6)} to fill a batch"
            if after.delay
            else "does not wait"
        )
        yield f"the queue {held}"
    if before is not None and after.preferred != before.preferred and after.preferred:
        yield f"batches of {_listed(list(map(str, after.preferred)))} are preferred"


def _effects(analysis: Analysis, best: Placed, default: Placed, model: str, of: str) -> Iterator[str]:
    """Yield the differences in stage times of the best configuration and the default at the same load."""
    assert best.point is not None
    other = next((point for point in default.result.points if point.load == best.point.load), None)
    if other is None or model not in other.models or model not in best.point.models:
        return
    if other.disturbed or best.point.disturbed:
        return
    now, then = best.point.models[model], other.models[model]
    parts = [
        text
        for stage, name in (("queue", "waits in the queue"), ("compute_infer", "is computed"))
        if (text := _compared(now, then, stage, name))
    ]
    if parts:
        yield f"{of}At {load_text(analysis, best.point.load)} a request {_listed(parts)}."


def _compared(now: ModelFigures, then: ModelFigures, stage: str, name: str) -> str:
    duration_now, duration_then = now.stages.get(stage), then.stages.get(stage)
    if (
        duration_now is None
        or duration_then is None
        or abs(duration_now - duration_then) <= _WORTH * max(duration_then, duration_now)
    ):
        return ""
    return f"{name} for {duration(duration_now)} instead of {duration(duration_then)}"


def _memory(analysis: Analysis, best: Point, default: Point) -> Iterator[str]:
    memory, default_memory = memory_of(best), memory_of(default)
    if memory is None or not default_memory or abs(memory / default_memory - 1) <= _WORTH:
        return
    where = "of GPU memory" if analysis.has_gpus else "of memory"
    ratio = memory / default_memory
    yield (
        f"It takes {bytes_of(memory)} {where}, {times(ratio)}{'' if ratio >= 2 else ' than'} the default's "
        f"{bytes_of(default_memory)}."
    )


def _names(analysis: Analysis) -> str:
    return _listed(list(analysis.models))


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
