"""Measurements of a server whose behaviour is known: what is sent, what is said where something is wrong, files."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from conch.core.errors import Code, ConchError
from conch.measure.perf.figures import figures_of
from conch.measure.perf.inputs.data import DataOptions
from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import PerfPlan
from conch.measure.perf.report import files
from conch.measure.perf.run import Measurement
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.records import RECORD
from tests.unit.measure.perf.known_server import KnownServer, running


def _plan(server: KnownServer, **given: object) -> PerfPlan:
    fields = {"interval": 0.5, "warm_up": 0.2, "share": 9.0, "trials": 3} | given
    return PerfPlan("known", Address("127.0.0.1", server.port), **fields)  # type: ignore[arg-type]


def _measure(server: KnownServer, level: float, **given: object) -> Measured:
    with Measurement(_plan(server, **given)) as measurement:
        return measurement.measure(level)


def test_a_server_that_hangs_up_is_asked_again() -> None:
    with running(KnownServer(service=0.005)) as server, Measurement(_plan(server)) as measurement:
        measurement.measure(4)
        server.hang_up()
        after = measurement.measure(4)
    assert after.figures.requests


def test_requests_hold_what_was_asked_for() -> None:
    with running(KnownServer(service=0.01)) as server:
        given = {"batch_size": 2, "data": DataOptions("zero", {"IN": (4,)})}
        figures = _measure(server, 1, **given).figures
        body = server.bodies[0]
    end = body.index(b"}}") + 2 if b"}}" in body else 0
    head = json.loads(body[: body.rindex(b"}") + 1])
    assert end and head["inputs"][0]["shape"] == [2, 4]
    assert body.endswith(struct.pack("<8f", *[0] * 8))
    assert figures.throughput == pytest.approx(2 * figures.requests / figures.seconds)


def test_what_is_wrong_is_said_before_anything_is_sent() -> None:
    with running(KnownServer()) as server:
        with pytest.raises(ConchError, match="takes at most 8"):
            _measure(server, 1, batch_size=9)
        with pytest.raises(ConchError, match="--endpoint nope: expected infer, generate or generate_stream"):
            _measure(server, 1, endpoint="nope")
        with pytest.raises(ConchError, match="does not fit input 'IN'"):
            _measure(server, 1, data=DataOptions(shapes={"IN": (3,)}))
        with pytest.raises(ConchError) as unknown:
            Measurement(PerfPlan("other", Address("127.0.0.1", server.port)))
        assert unknown.value.code is Code.NOT_FOUND
    with pytest.raises(ConchError, match="no server responds") as down:
        Measurement(PerfPlan("known", Address("127.0.0.1", server.port)))
    assert down.value.code is Code.UNAVAILABLE


def test_files_have_a_row_for_each_level() -> None:
    with running(KnownServer(service=0.005)) as server:
        plan = _plan(server, trials=1)
        with Measurement(plan) as measurement:
            measured = [measurement.measure(level) for level in (1, 2)]
    rows = files.csv_of(plan, measured).splitlines()
    assert rows[0].startswith("Concurrency,Inferences/Second,Client Send,") and len(rows) == 3
    document = json.loads(files.json_of(plan, measured))
    assert [level["concurrency"] for level in document["levels"]] == [1, 2]
    assert document["levels"][0]["requests"] == measured[0].figures.requests


def test_a_window_without_answers_has_no_latency() -> None:
    records = np.zeros(0, RECORD)
    figures = figures_of(records, [(0, 10**9)], np.array([1]))
    assert (figures.requests, figures.throughput, figures.latency) == (0, 0.0, None)
