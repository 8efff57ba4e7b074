"""Compares the results of ``conch perf`` with queueing theory, for a server with known behaviour.

The server runs ``k`` requests at a time for a fixed time each, and records how long each actually had its slot. The
expected figures are computed from these times. ``python -m benchmarks.queueing [--seconds 10]``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import Levels, PerfPlan
from conch.measure.perf.run import Measurement
from conch.measure.perf.senders.channels.connecting import Address
from tests.unit.measure.perf.known_server import KnownServer, running

SERVICE = 0.01
SLOTS = 2
CALLERS = (1, 2, 4, 16)
LOADS = (0.5, 0.7, 0.8)
#: Every n-th request fails (n).
FAILS = 5
#: Requests per second to the stalling server.
RATE = 200

Row = tuple[str, str, str, str, str]


def measure(server: KnownServer, level: float, seconds: float, **options: Any) -> tuple[Measured, float]:
    """Measure one window of a load level; also returns how long requests had a slot in it (s)."""
    plan = PerfPlan(
        "known",
        Address("127.0.0.1", server.port),
        interval=seconds,
        warm_up=0.3,
        trials=1,
        keep_records=True,
        **options,
    )
    with Measurement(plan) as measurement:
        measured = measurement.measure(level)
    assert measured.records is not None
    [(start, end)] = measured.records.spans
    return measured, server.service_between(start / 1e9, end / 1e9)


def row(question: str, figure: str, expected: float, measured: float, unit: str) -> Row:
    """Return a line of the table; values are in seconds, converted to milliseconds if ``unit`` is ``ms``."""
    scale = 1000 if unit == "ms" else 1
    off = f"{measured / expected - 1:+.1%}"
    return question, f"{figure} ({unit})", f"{expected * scale:.2f}", f"{measured * scale:.2f}", off


def closed(seconds: float) -> Iterator[Row]:
    """Concurrency N, k slots, service time s: min(N, k) / s responses per second, each after s * max(1, N / k)."""
    for callers in CALLERS:
        with running(KnownServer(service=SERVICE, slots=SLOTS)) as server:
            measured, service = measure(server, callers, seconds)
        latency = measured.figures.latency
        assert latency is not None
        question = f"{callers} callers, {SLOTS} slots"
        yield row(question, "throughput", min(callers, SLOTS) / service, measured.figures.throughput, "infer/s")
        yield row(question, "latency", service * max(1, callers / SLOTS), latency.average, "ms")


def random_arrivals(seconds: float) -> Iterator[Row]:
    """M/D/1: the mean wait is rho * s / (2 * (1 - rho)) in the long run; for given arrivals, it follows from them."""
    for load in LOADS:
        rate = load / SERVICE
        with running(KnownServer(service=SERVICE, slots=1)) as server:
            measured, service = measure(server, rate, seconds, rates=Levels(rate, rate, 1), distribution="poisson")
        assert measured.records is not None
        records = np.sort(measured.records.records, order="due")
        waited = (records["end"] - records["due"]) / 1e9 - service
        free, expected = records["end"][0] / 1e9, [waited[0]]
        for due in records["due"][1:] / 1e9:
            expected.append(max(0.0, free - due))
            free = max(free, due) + service
        rho = rate * service
        formula = f"{rho * service / (2 * (1 - rho)) * 1000:.1f} ms in the long run" if rho < 1 else "without end"
        yield row(
            f"Poisson, {rho:.0%} busy: {formula}", "mean wait of these", float(np.mean(expected)), float(waited.mean()),
            "ms",
        )  # fmt: skip


def failing(seconds: float) -> Iterator[Row]:
    """Errors are returned at once, and do not lower the latency."""
    with running(KnownServer(service=SERVICE, slots=SLOTS, fails=FAILS)) as server:
        measured, service = measure(server, SLOTS, seconds)
    figures, latency = measured.figures, measured.figures.latency
    assert latency is not None
    question = f"every {FAILS}th request fails at once"
    yield row(question, "failures", 100 / FAILS, 100 * measured.failed / (measured.failed + figures.requests), "%")
    yield row(question, "latency of the others", service, latency.average, "ms")


def standing_still(seconds: float) -> Iterator[Row]:
    """The server stalls for a second, which affects the two kinds of load differently."""
    for kind, load_options in (("rate", {"rates": Levels(RATE, RATE, 1)}), ("one caller", {})):
        with running(KnownServer(service=0.001, freezes_after=RATE // 2)) as server:
            measured, _ = measure(server, RATE if load_options else 1, max(3.0, seconds), **load_options)
        assert measured.records is not None
        records = measured.records.records
        latency = (records["end"] - records["due"]) / 1e9
        expected = RATE * 0.5 if load_options else 1
        late = float((latency >= 0.5).sum())
        yield row(f"a second's standstill, {kind}", "later than 0.5 s", expected, late, "requests")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a window (default: 10)")
    seconds = parser.parse_args().seconds
    print("| question | figure | expected | measured | error |\n|---|---|---|---|---|")
    for part in (closed, random_arrivals, failing, standing_still):
        for line in part(seconds):
            print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
