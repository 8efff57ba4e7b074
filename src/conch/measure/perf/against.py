"""Compares two servers or models, measured alternately: the ratio of their figures, and its confidence interval.

Each round measures A, B, B, A, so that a slow drift of the machine affects both sides equally. Each round gives a
ratio; the result is the mean ratio with its 95 % interval. On a shared machine, absolute figures change from minute to
minute, but the ratio of figures that were measured in the same minute does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Final

from conch.measure.perf.figures import PERCENTILES, Interval, WindowFigures, ratio_interval
from conch.measure.perf.measured import Measured

#: Number of undisturbed rounds that suffices; with fewer, the disturbed rounds count too.
ENOUGH: Final = 3
THROUGHPUT: Final = "throughput"

#: Measures one side for one window.
MeasureSide = Callable[[], Measured]


@dataclass(frozen=True, slots=True)
class ComparedRound:
    """The measurements of both sides in one round."""

    a: tuple[Measured, Measured]
    b: tuple[Measured, Measured]

    @property
    def disturbed(self) -> bool:
        """Whether other processes used the machine during one of the measurements."""
        return any(measurement.disturbed for measurement in (*self.a, *self.b))


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A figure of both sides (inferences per second, or seconds), and the ratio ``b`` / ``a`` with its interval.

    ``interval`` is None after a single round.
    """

    name: str
    a: float
    b: float
    ratio: float
    interval: Interval | None

    @property
    def differs(self) -> bool:
        """Whether the difference is larger than the noise."""
        return self.interval is not None and 1.0 not in self.interval


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two sides at one level.

    ``disturbed`` is whether the rounds that count include some in which other processes used the machine. ``errors``
    counts the errors of each side by message. ``ended`` is the reason why there are fewer rounds than requested (empty
    if there are not).
    """

    level: float
    figures: tuple[ComparedFigure, ...]
    rounds: tuple[ComparedRound, ...]
    counted: tuple[ComparedRound, ...]
    disturbed: bool
    errors: tuple[dict[str, int], dict[str, int]]
    ended: str = ""
    stopped: bool = False

    @property
    def whole(self) -> bool:
        """Whether all rounds were taken and every request succeeded."""
        return bool(self.figures) and not (self.ended or self.stopped or any(self.errors))

    def sentence(self, open_load: bool = False) -> str:
        """Return the conclusion: the ratio of throughputs, or of medians if the load sets the request rate."""
        if not self.figures:
            return "nothing could be compared"
        if self.disturbed:
            return "other processes used the machine, so no ratio is reliable: measure again when it is idle"
        name = "p50" if open_load else THROUGHPUT
        figure = next(figure for figure in self.figures if figure.name == name)
        ratio = f"B has {figure.ratio:.2f} times the {'median latency' if open_load else 'throughput'}"
        if figure.interval is None:
            return f"{ratio} in a single round, so the noise is unknown"
        within = f"({figure.interval.low:.2f} … {figure.interval.high:.2f})"
        if figure.differs:
            return f"{ratio} {within}: the difference is larger than the noise"
        return f"no significant difference: {ratio} {within}"

    @property
    def warnings(self) -> Iterator[str]:
        """Reasons to doubt the ratios, one sentence each."""
        if self.ended:
            yield self.ended
        if self.stopped:
            yield f"stopped after {len(self.rounds)} rounds"
        if self.disturbed:
            disturbed = sum(measured_round.disturbed for measured_round in self.rounds)
            yield (
                f"other processes used the machine in {disturbed} of {len(self.rounds)} rounds, which count because too"
                " few rounds were quiet"
            )
        for name, errors in zip("AB", self.errors, strict=True):
            if errors:
                message, _ = max(errors.items(), key=lambda entry: entry[1])
                yield f"{sum(errors.values())} requests to {name} failed and are excluded from the latencies: {message}"


@dataclass(slots=True)
class _RoundsSoFar:
    taken: list[ComparedRound] = field(default_factory=list)
    errors: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))

    def quiet(self) -> list[ComparedRound]:
        return [measured_round for measured_round in self.taken if not measured_round.disturbed]


def compare(
    level: float, a: MeasureSide, b: MeasureSide, rounds: int,
    on_round: Callable[[Sequence[ComparedRound]], object] = lambda rounds: None,
) -> Comparison:  # fmt: skip
    """Measure ``rounds`` rounds, and up to as many again to replace disturbed ones.

    ``on_round`` receives all rounds so far. If a side does not respond, or at KeyboardInterrupt, the comparison ends
    early with the complete rounds.
    """
    so_far = _RoundsSoFar()
    ended, stopped = "", False
    try:
        while len(so_far.taken) < 2 * rounds and len(so_far.quiet()) < rounds:
            measurements: dict[str, list[Measured]] = {"A": [], "B": []}
            for name in "ABBA":
                measurement = a() if name == "A" else b()
                so_far.errors["AB".index(name)].update(measurement.errors)
                if measurement.figures.latency is None:
                    ended = f"{name}: {next(measurement.warnings)}"
                    break
                measurements[name].append(measurement)
            if ended:
                break
            (first_a, last_a), (first_b, last_b) = measurements.values()
            so_far.taken.append(ComparedRound((first_a, last_a), (first_b, last_b)))
            on_round(so_far.taken)
    except KeyboardInterrupt:
        stopped = True
    quiet = so_far.quiet()
    counted = quiet if len(quiet) >= min(ENOUGH, rounds) else so_far.taken
    return Comparison(
        level, _figures(counted), tuple(so_far.taken), tuple(counted),
        any(measured_round.disturbed for measured_round in counted),
        (dict(so_far.errors[0]), dict(so_far.errors[1])), ended, stopped,
    )  # fmt: skip


def _figures(rounds: Sequence[ComparedRound]) -> tuple[ComparedFigure, ...]:
    """Return every figure over the rounds; nothing without rounds."""
    if not rounds:
        return ()
    figures = []
    for name in (THROUGHPUT, "average", *(f"p{number}" for number in PERCENTILES)):
        of_a, of_b = (
            [_mean(side, name) for side in sides] for sides in zip(*((r.a, r.b) for r in rounds), strict=True)
        )
        ratio, interval = ratio_interval([b / a for a, b in zip(of_a, of_b, strict=True)])
        figures.append(ComparedFigure(name, ratio_interval(of_a)[0], ratio_interval(of_b)[0], ratio, interval))
    return tuple(figures)


def _mean(measurements: tuple[Measured, Measured], name: str) -> float:
    """Return the geometric mean of a figure over both measurements, which cancels a drift of the machine."""
    first, last = (_value(measurement.figures, name) for measurement in measurements)
    return sqrt(first * last)


def _value(figures: WindowFigures, name: str) -> float:
    if name == THROUGHPUT:
        return figures.throughput
    assert figures.latency is not None
    return figures.latency.average if name == "average" else figures.latency.percentiles[int(name[1:])]
