"""Converts the settings into plans of ``conch perf``.

Pure. ``perf_analyzer_flags`` are the flags of ``conch perf`` and perf_analyzer for the data of requests and the length
of windows; the analysis sets the address, the model and the load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from conch.core.errors import did_you_mean, invalid
from conch.measure.analyze.options import values
from conch.measure.analyze.options.settings import AnalyzeSettings
from conch.measure.analyze.options.values import Reader
from conch.measure.perf.inputs.data import DataOptions
from conch.measure.perf.plan import Levels, PerfPlan
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.texts.shapes import Mix, parse_mix

#: Default length of a window (s); shorter than perf_analyzer's, as there are many points to measure.
INTERVAL: Final = 2.0
#: Maximum number of windows with a budget.
_TRIALS: Final = 5


def _shapes(name: str, value: Any) -> Mapping[str, tuple[int, ...]]:
    """Read ``INPUT:D,D``, or a list of such texts."""
    shapes = {}
    for text in [value] if isinstance(value, str) else value if isinstance(value, Sequence) else ():
        tensor, _, dims = str(text).rpartition(":")
        if not tensor or not all(part.strip().isdigit() for part in dims.split(",")):
            raise values.wrong(name, text, "input:dimension,dimension, as in input_ids:128")
        shapes[tensor] = tuple(int(part) for part in dims.split(","))
    if not shapes:
        raise values.wrong(name, value, "input:dimension,dimension")
    return shapes


def _mix(name: str, value: Any) -> Mix:
    return parse_mix(values.text(name, value))


def _text(name: str, value: Any) -> str:
    return str(value)


def _share(name: str, value: Any) -> float:
    return values.positive(name, value) / 100


#: The field and the reader of each flag.
_OF_DATA: Final[Mapping[str, tuple[str, Reader]]] = {
    "input-data": ("source", values.text),
    "shape": ("shapes", _shapes),
    "string-data": ("string_data", _text),
    "string-length": ("string_length", values.count),
    "expect": ("mix", _mix),
}
_OF_PLAN: Final[Mapping[str, tuple[str, Reader]]] = {
    "measurement-interval": ("interval", values.milliseconds),
    "stability-percentage": ("share", _share),
    "warm-up": ("warm_up", values.positive),
    "max-trials": ("trials", values.count),
    "percentile": ("percentile", values.percentage),
    "measurement-request-count": ("requests", values.count),
    "streaming": ("streaming", values.flag),
    "request-distribution": ("distribution", values.one_of("constant", "poisson")),
    "max-threads": ("max_calls", values.count),
    "model-version": ("version", _text),
    "endpoint": ("endpoint", values.text),
}
#: Short flags of perf_analyzer.
_SHORT: Final = {"p": "measurement-interval", "s": "stability-percentage", "r": "max-trials", "x": "model-version"}


def plan_of(
    settings: AnalyzeSettings, model: str, address: Address, percentiles: Sequence[float] = ()
) -> PerfPlan:  # fmt: skip
    """Return the plan for ``model`` without its load; ``percentiles`` are those that the goals need.

    Raises INVALID_ARG for unknown flags.
    """
    fields, data = _read({**settings.perf_analyzer_flags, **settings.model(model).perf_flags})
    plan = PerfPlan(
        model, address, settings.client_protocol, batch_size=settings.batch_size_of(model), interval=INTERVAL,
        data=DataOptions(**data), further_percentiles=percentiles,
    )  # fmt: skip
    if settings.budget is not None:
        # For about 30 measurements, a third of them in the final rounds.
        plan = replace(plan, interval=min(INTERVAL, max(0.5, settings.budget / 300)), trials=_TRIALS)
    return replace(plan, **fields)


def at_load(plan: PerfPlan, load: float, *, rate: bool) -> PerfPlan:
    """Return the plan for one load: requests per second, or callers."""
    levels = Levels(load, load, 1.0)
    return replace(plan, rates=levels) if rate else replace(plan, concurrency=levels)


def _read(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the plan and of its data."""
    fields: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for flag, value in flags.items():
        name = flag.lstrip("-").replace("_", "-")
        name = _SHORT.get(name, name)
        for known, into in ((_OF_PLAN, fields), (_OF_DATA, data)):
            if name in known:
                target, read = known[name]
                into[target] = read(f"perf_analyzer_flags.{flag}", value)
                break
        else:
            names = (*_OF_PLAN, *_OF_DATA)
            hint = did_you_mean(name, names, f"it takes {', '.join(sorted(names))}")
            raise invalid(f"perf_analyzer_flags: '{flag}' is none that an analysis takes; {hint}")
    return fields, data
