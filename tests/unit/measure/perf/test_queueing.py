"""What is measured of a server whose behaviour is known is what queueing theory says of it.

Bounds hold on a machine of which others use any part: the arithmetic is done with what the server noted itself.
"""

from __future__ import annotations

from itertools import islice
from math import sqrt
from typing import Any

import numpy as np
import pytest

from conch.measure.perf.figures import figures_of
from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import Levels, PerfPlan
from conch.measure.perf.run import Measurement
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.load import Poisson
from conch.measure.perf.senders.records import RECORD, Outcome, Records
from tests.unit.measure.perf.known_server import KnownServer, running

RATE = 200


def plan_of(server: KnownServer, **given: Any) -> PerfPlan:
    fields = {"interval": 1.0, "warm_up": 0.2, "share": 9.0, "trials": 1, "keep_records": True} | given
    return PerfPlan("known", Address("127.0.0.1", server.port), **fields)


def records_of(measured: Measured) -> tuple[Records, float, float]:
    """The requests of a level, and the beginning and the end of its window (s)."""
    assert measured.records is not None
    [(start, end)] = measured.records.spans
    return measured.records.records, start / 1e9, end / 1e9


def obeys_littles_law(measured: Measured, callers: int) -> bool:
    """Whether it holds; what the machine stops at the end of the window is missing from the latencies."""
    latency = measured.figures.latency
    return latency is not None and measured.figures.throughput * latency.average == pytest.approx(callers, rel=0.25)


def frozen(service: float, after: int, level: int, **given: Any) -> tuple[KnownServer, Records]:
    """Measure a server that freezes within the window, long before its end; returns it and the requests."""
    for interval in (3.0, 6.0, 9.0):  # on a busy machine it freezes late
        with running(KnownServer(service=service, freezes_after=after)) as server:
            with Measurement(plan_of(server, interval=interval, **given)) as measurement:
                records, start, end = records_of(measurement.measure(level))
        if start < server.frozen_from and server.frozen_until + 1.0 < end:
            return server, records
    raise AssertionError("it did not freeze within the window")


def test_callers_share_the_slots() -> None:
    """N callers, k slots, service s: min(N, k) / s answers a second, each after s * max(1, N / k)."""
    slots = 2
    with running(KnownServer(service=0.02, slots=slots)) as server, Measurement(plan_of(server)) as measurement:
        for callers in (1, 2, 8):
            measured = measurement.measure(callers)
            _, start, end = records_of(measured)
            service, latency = server.service_between(start, end), measured.figures.latency
            assert latency is not None and service >= 0.02
            # Never faster than the server: an answer that took less than it would be nonsense.
            assert measured.figures.throughput <= min(callers, slots) / service * 1.1
            assert latency.average >= 0.95 * service * max(1, callers / slots)
            assert obeys_littles_law(measured, callers) or any(
                obeys_littles_law(measurement.measure(callers), callers) for _ in range(4)
            )


def test_random_arrivals_wait_as_long_as_they_should() -> None:
    """M/D/1: the mean wait is rho * s / (2 * (1 - rho)); in virtual time, to four standard errors of batch means."""
    service, load = 0.01, 0.7
    due = np.fromiter(islice(Poisson(load / service, seed=3).moments(0), 60_000), np.int64)
    done = np.zeros(len(due))
    free = 0.0
    for number, moment in enumerate(due):
        free = done[number] = max(float(moment), free) + service * 1e9
    records = np.zeros(len(due), RECORD)
    records["due"] = records["sent"] = records["written"] = due
    records["first"] = records["end"] = done
    figures = figures_of(records, [(0, int(done[-1]))], np.array([1]))
    assert figures.latency is not None
    batches = ((done - due) / 1e9).reshape(60, -1).mean(axis=1)
    wait = load * service / (2 * (1 - load))
    assert figures.latency.average - service == pytest.approx(wait, abs=4 * batches.std(ddof=1) / sqrt(len(batches)))
    assert figures.throughput == pytest.approx(load / service, rel=0.02)


def test_errors_are_counted_and_fast_ones_make_no_latency_shorter() -> None:
    with running(KnownServer(service=0.02, fails=4)) as server, Measurement(plan_of(server)) as measurement:
        measured = measurement.measure(3)
    failed, figures = measured.figures.failures[Outcome.REFUSED], measured.figures
    assert abs(failed - (failed + figures.requests) / 4) <= 3  # those that run at both ends of the window
    records, _, _ = records_of(measured)
    well = records[records["outcome"] == Outcome.OK]
    assert (well["end"] - well["due"]).min() >= 0.02e9 and figures.latency is not None
    assert figures.latency.percentiles[50] >= 0.02 and len(well) == figures.requests


def test_a_server_that_freezes_is_seen_by_all_whom_it_keeps_waiting() -> None:
    """An open load of 200 requests per second: 200 are due in the second, and the later one is, the less it waits."""
    server, records = frozen(0.0, 140, RATE, rates=Levels(RATE, RATE, 1))
    due = records["due"] / 1e9
    caught = np.sort(records[(due >= server.frozen_from) & (due < server.frozen_until)], order="due")
    assert len(caught) == pytest.approx(RATE, abs=2)
    waited = (caught["end"] - caught["due"]) / 1e9
    # There is no response before it continues: latencies fall by a second over a second, from the moment due.
    assert (waited >= server.frozen_until - caught["due"] / 1e9 - 1e-3).all()
    assert waited[-20:].mean() < waited[:20].mean()
    latency = (records["end"] - records["due"]) / 1e9
    assert np.percentile(latency, 99) >= 0.9


def test_callers_that_wait_for_their_answers_would_have_seen_it_once() -> None:
    """The same with one caller: of all its requests, one was late. That is why rates are there."""
    server, records = frozen(0.005, 60, 1)
    due, end = records["due"] / 1e9, records["end"] / 1e9
    [waited] = (end - due)[(due < server.frozen_until) & (end > server.frozen_from)]
    assert waited > 0.9 and len(records) > 50
