"""Parses objectives and constraints in model analyzer's syntax and in short forms.

Pure. Objectives: ``throughput``, ``latency:p99``, ``memory=2``, or ``{perf_throughput: 10}``. Constraints:
``p99<100ms``, ``memory<4GB``, or ``{perf_latency_p99: {max: 100}}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from conch.core.errors import ConchError, did_you_mean, invalid
from conch.measure.analyze.judging.goals import (
    ALIASES,
    KNOWN,
    MODEL_ANALYZERS,
    Constraint,
    Figure,
    WeightedObjective,
    metric,
)
from conch.measure.analyze.options.values import OptionProblem, positive, wrong

_BOUND: Final = re.compile(r"\s*([A-Za-z_:. 0-9]+?)\s*(<=|>=|<|>)\s*([\d.]+)\s*([A-Za-z\u00b5\u03bc%/]*)\s*")
_UNITS: Final[Mapping[str, tuple[str, float]]] = {
    **dict.fromkeys(("us", "\u00b5s", "\u03bcs"), ("ms", 1e-6)),
    "ms": ("ms", 1e-3),
    "s": ("ms", 1.0),
    **{unit: ("MB", float(1000**power)) for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
    **{unit: ("MB", float(1024**power)) for power, unit in enumerate(("kib", "mib", "gib", "tib"), 1)},
    "%": ("%", 1e-2),
    "w": ("W", 1.0),
    **dict.fromkeys(("infer/s", "/s", "rps", "qps"), ("infer/s", 1.0)),
    **dict.fromkeys(("core", "cores"), ("cores", 1.0)),
}


def named(option: str, text: Any) -> Figure:
    """Return the figure of a name; raises INVALID_ARG with the nearest name if there is none."""
    name = str(text).strip().lower().replace(":", "_").replace("utilization", "utilisation")
    name = MODEL_ANALYZERS.get(str(text).strip(), ALIASES.get(name, name))
    if re.fullmatch(r"p\d{1,2}(\.\d+)?", name):
        name = f"latency_{name}"
    figure = metric(name)
    if figure is None:
        names = (*KNOWN, "latency_p99", *MODEL_ANALYZERS)
        hint = did_you_mean(str(text), names, f"the figures are latency:p99 (any percentile), {', '.join(KNOWN)}")
        raise OptionProblem(f"{option}: there is no figure '{text}'; {hint}", f"{option}.{text}")
    return figure


def objectives(name: str, value: Any) -> tuple[WeightedObjective, ...]:
    """Parse objectives: a mapping to weights, a list, or texts such as ``throughput`` and ``memory=2``."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        texts = value.split(",") if isinstance(value, str) else value
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise wrong(name, value, "figures, or weights by figure")
        split = [part for text in texts for part in text.split(",")]
        pairs = [(key, weight or 1) for key, _, weight in (part.partition("=") for part in split)]
    if not pairs:
        raise wrong(name, value, "an objective")
    weights = {named(name, key).name: positive(f"{name}.{key}", weight) for key, weight in pairs}
    if len(weights) < len(pairs):
        raise invalid(f"{name}: an objective is named twice")
    return tuple(WeightedObjective(key, weight) for key, weight in weights.items())


def constraints(name: str, value: Any) -> tuple[Constraint, ...]:
    """Parse constraints: model analyzer's mapping, or texts such as ``p99<100ms``."""
    if isinstance(value, Mapping):
        parsed = [_listed(name, key, bounds) for key, bounds in value.items()]
    else:
        texts = value.split(",") if isinstance(value, str) else value
        if not isinstance(texts, Sequence):
            raise wrong(name, value, "bounds such as p99<100ms")
        parsed = [
            constraint
            for text in texts
            for constraint in (constraints(name, text) if isinstance(text, Mapping) else [_written(name, text)])
        ]
    return joined(name, parsed)


def joined(name: str, parsed: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """Intersect the constraints of each figure; raises INVALID_ARG if nothing can satisfy them."""
    joined: dict[str, Constraint] = {}
    for constraint in parsed:
        known = joined.get(constraint.metric, Constraint(constraint.metric))
        minimum = max((bound for bound in (known.minimum, constraint.minimum) if bound is not None), default=None)
        maximum = min((bound for bound in (known.maximum, constraint.maximum) if bound is not None), default=None)
        joined[constraint.metric] = Constraint(constraint.metric, minimum, maximum)
        if minimum is not None and maximum is not None and minimum > maximum:
            raise _impossible(name, joined[constraint.metric])
    return tuple(joined.values())


def _listed(name: str, key: Any, bounds: Any) -> Constraint:
    """Read ``{perf_latency_p99: {max: 100}}``: latencies in ms, memory in MB."""
    figure = named(name, key)
    if not isinstance(bounds, Mapping) or not bounds or not set(bounds) <= {"min", "max"}:
        raise wrong(f"{name}.{key}", bounds, "a mapping with min, max or both")
    minimum, maximum = (
        positive(f"{name}.{key}.{end}", bounds[end]) * figure.scale if end in bounds else None for end in ("min", "max")
    )
    return Constraint(figure.name, minimum, maximum)


def _written(name: str, text: Any) -> Constraint:
    matched = _BOUND.fullmatch(text) if isinstance(text, str) else None
    if matched is None:
        raise wrong(name, text, "a bound such as p99<100ms, memory<4GB or throughput>50")
    figure = named(name, matched[1])
    limit = positive(name, matched[3]) * _scale(name, text, figure, matched[4])
    return Constraint(figure.name, maximum=limit) if "<" in matched[2] else Constraint(figure.name, minimum=limit)


def _scale(name: str, text: str, figure: Figure, unit: str) -> float:
    if not unit:
        if figure.unit in ("ms", "MB"):
            raise invalid(f"{name}: '{text}' has no unit; write {'100ms or 0.1s' if figure.unit == 'ms' else '4GB'}")
        return figure.scale
    kind, scale = _UNITS.get(unit.lower(), ("", 0.0))
    if kind != figure.unit:
        raise invalid(f"{name}: '{text}': {figure.name} is not measured in {unit}, but in {figure.unit}")
    return scale


def _impossible(name: str, constraint: Constraint) -> ConchError:
    figure = metric(constraint.metric)
    assert figure is not None and constraint.minimum is not None and constraint.maximum is not None
    minimum, maximum = figure.shown(constraint.minimum), figure.shown(constraint.maximum)
    return invalid(f"{name}: nothing can satisfy {constraint.metric} of at least {minimum} and at most {maximum}")
