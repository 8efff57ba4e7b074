"""Measures a loaded candidate at a series of loads; each measurement is a point.

All models that are profiled together receive requests at the same time, each from its own sending processes, which live
as long as the candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from math import ceil
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any, Final

from conch.core.errors import did_you_mean, internal, invalid
from conch.measure.analyze.options import values
from conch.measure.analyze.options.settings import AnalyzeSettings
from conch.measure.analyze.results import ModelFigures, Point
from conch.measure.analyze.servers import ServerGone
from conch.measure.perf.figures import Interval, WindowFigures, average_of, student
from conch.measure.perf.inputs.data import DataOptions
from conch.measure.perf.level import OnWindow
from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import Levels, PerfPlan
from conch.measure.perf.run import CALLERS_PER_PROCESS, Measurement
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.texts.shapes import Mix, parse_mix
from conch.options.declaration import Reader

# ``perf_analyzer_flags`` are the flags of ``conch perf`` and perf_analyzer for the data of requests and the length of
# windows; the analysis sets the address, the model and the load.


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
            hint = did_you_mean(name, names, f"the flags are {', '.join(sorted(names))}")
            raise invalid(f"perf_analyzer_flags: an analysis has no flag '{flag}'; {hint}")
    return fields, data


#: Receives the windows so far, each as if it were the point; returns True to end the measurement.
Hopeless = Callable[[Sequence[Point]], bool]


class CandidateMeasurement:
    """Sends requests to the loaded models of ``plans`` (by name); ``rate`` is whether loads are request rates.

    A context manager: on exit, all requests stop.
    """

    def __init__(self, plans: Mapping[str, PerfPlan], *, rate: bool) -> None:
        self._plans, self._rate = plans, rate
        self._open: dict[str, Measurement] = {}
        self._stack = ExitStack()
        self._size = 0

    def __enter__(self) -> CandidateMeasurement:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the sending processes."""
        self._open = {}
        self._stack.close()
        self._size = 0

    def measure(self, load: float, hopeless: Hopeless | None = None) -> Point:
        """Measure the point at ``load``; ``hopeless`` may end it early.

        Raises the errors of :class:`Measurement`, and INTERNAL if a model completed no request.
        """
        self._connect(load)
        windows = WindowsSoFar(load, self._open, hopeless)
        together = Barrier(len(self._open))
        with ThreadPoolExecutor(len(self._open)) as threads:
            running = {
                name: threads.submit(_measure, opened, load, windows.observer(name), together)
                for name, opened in self._open.items()
            }
            try:
                wait(running.values())
            except BaseException:
                # At Ctrl+C, the threads end with their windows without waiting for each other.
                windows.stop()
                together.abort()
                raise
        measured = {name: future.result() for name, future in running.items()}
        for name, measurement in measured.items():
            if measurement.gone:
                raise ServerGone(measurement.gone)
            if not measurement.figures.requests:
                why = max(measurement.errors, key=measurement.errors.__getitem__, default="") or next(
                    measurement.warnings, ""
                )
                raise internal(f"model '{name}' completed no request: {why}")
        return _point(load, measured, stopped=windows.stopped)

    def _connect(self, load: float) -> None:
        """Start the number of sending processes that the load requires."""
        size = ceil(load / CALLERS_PER_PROCESS) if not self._rate else 1
        if size == self._size:
            return
        self.close()
        for name, plan in self._plans.items():
            self._open[name] = self._stack.enter_context(Measurement(at_load(plan, load, rate=self._rate)))
        self._size = size


def _measure(measurement: Measurement, load: float, on_window: OnWindow, together: Barrier) -> Measured:
    """Measure one model, and keep its requests running until all models are measured."""

    def wait_for_others() -> None:
        with suppress(BrokenBarrierError):
            together.wait()

    try:
        return measurement.measure(load, on_window, wait_for_others)
    except BaseException:
        together.abort()
        raise


class WindowsSoFar:
    """The windows of all models so far; ``hopeless`` is called when every model has a new window."""

    def __init__(self, load: float, models: Mapping[str, object], hopeless: Hopeless | None) -> None:
        self._load, self._hopeless = load, hopeless
        self._windows: dict[str, list[WindowFigures]] = {name: [] for name in models}
        self._lock = Lock()
        self.stopped = False

    def stop(self) -> None:
        """End the measurement with the current windows."""
        self.stopped = True

    def observer(self, name: str) -> Callable[[WindowFigures], bool]:
        """Return a function that receives the windows of one model, and returns True to end its measurement."""

        def observe(window: WindowFigures) -> bool:
            with self._lock:
                if window.interference is not None and window.interference.disturbs:
                    return self.stopped  # a disturbed window is not evidence about the candidate
                self._windows[name].append(window)
                points = self._points()
                if self._hopeless is not None and points and self._hopeless(points):
                    self.stopped = True
                return self.stopped

        return observe

    def _points(self) -> list[Point]:
        count = min(map(len, self._windows.values()))
        return [
            Point(self._load, {name: _figures(windows[at]) for name, windows in self._windows.items()}, None)
            for at in range(count)
        ]


def _point(load: float, measured: Mapping[str, Measured], *, stopped: bool) -> Point:
    many = len(measured) > 1
    warnings = [
        f"{name}: {text}" if many else text for name, measurement in measured.items() for text in measurement.warnings
    ]
    models = {
        name: replace(_figures(measurement.figures), stages=_stages(name, measurement), noise=_noise(measurement))
        for name, measurement in measured.items()
    }
    seen = [measurement.resources for measurement in measured.values() if measurement.resources is not None]
    return Point(
        load, models, max(seen, key=lambda sample: sample.memory, default=None), warnings=tuple(warnings),
        disturbed=any(measurement.disturbed for measurement in measured.values()), stopped=stopped,
    )  # fmt: skip


def _figures(window: WindowFigures) -> ModelFigures:
    latency = window.latency
    return ModelFigures(
        throughput=window.throughput,
        average=average_of(latency),
        percentiles=dict(latency.percentiles) if latency else {},
        client_send=average_of(window.send),
        client_wait=average_of(window.wait),
        stages={},
        requests=window.requests,
        failed=sum(window.failures.values()),
    )


def _noise(measured: Measured) -> Mapping[str, float]:
    """Return the relative standard errors of the figures."""
    confidence, latency = measured.confidence, measured.figures.latency
    if confidence is None or latency is None:
        return {}
    intervals: dict[str, tuple[Interval | None, float]] = {
        "throughput": (confidence.throughput, measured.figures.throughput),
        "latency_average": (confidence.average, latency.average),
        **{
            f"latency_p{number:g}": (interval, latency.percentiles.get(number, 0.0))
            for number, interval in confidence.percentiles.items()
        },
    }
    return {
        name: share_of_error(interval, value, confidence.count)
        for name, (interval, value) in intervals.items()
        if interval is not None and interval.high > 0 and value > 0
    }


def share_of_error(interval: Interval, value: float, count: int) -> float:
    """Return the relative standard error of the mean of ``count`` numbers, from its confidence interval.

    An interval that would begin below 0 is cut there; its width then follows from ``value``, the mean.
    """
    half = (interval.high - interval.low) / 2 if interval.low > 0 else interval.high - value
    return half / (interval.high - half) / student(count - 1)


def _stages(name: str, measured: Measured) -> Mapping[str, float]:
    """Return the averages of a model's server stages over its versions, weighted by their counts."""
    totals: dict[str, tuple[int, float]] = {}
    for version in measured.server:
        if version.model == name:
            for stage, figures in version.stages.items():
                count, seconds = totals.get(stage, (0, 0.0))
                totals[stage] = (count + figures.count, seconds + figures.count * figures.average)
    return {stage: seconds / count for stage, (count, seconds) in totals.items() if count}
