"""What the senders can do is measured against a server that answers at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conch.measure.perf.figures import figures_of
from conch.measure.perf.measured import Measured
from conch.measure.perf.requests.encoding import MODEL_INFER, http_post
from conch.measure.perf.requests.payload import Payload
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.channels.grpc import Rpc
from conch.measure.perf.senders.channels.http import read_generate
from conch.measure.perf.senders.generator import Generators, Traffic
from conch.measure.perf.senders.limit import NullServer, SenderLimit
from conch.measure.perf.senders.records import RECORD

#: More than a frame, a window and what a socket takes at once.
LARGE = bytes(300_000)
NOWHERE = Address("127.0.0.1", 9)


def traffic(protocol: str) -> Traffic:
    if protocol == "grpc":
        messages = [Payload(b"\0" + len(data).to_bytes(4, "big") + data) for data in (b"small", LARGE)]
        return Traffic(NOWHERE, messages, Rpc(MODEL_INFER))
    return Traffic(NOWHERE, [Payload(http_post("/v2/models/m/infer", {"Host": "h"}, data)) for data in (b"{}", LARGE)])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_limit_is_measured_once_for_a_number_of_callers(protocol: str) -> None:
    limit = SenderLimit(traffic(protocol), 1)
    try:
        found = limit.at(3)
        assert found is not None and found > 0
    finally:
        limit.close()
    assert limit.at(3) == found  # which is not measured again


@pytest.mark.parametrize(("protocol", "processes"), [("grpc", 1), ("http", 2)])
def test_every_request_is_answered_whatever_its_size_by_processes_that_share_a_port(
    protocol: str, processes: int
) -> None:
    server = NullServer(processes, grpc=protocol == "grpc")
    try:
        there = replace(traffic(protocol), address=Address("127.0.0.1", server.port), judge=None)
        with Generators(there, processes) as senders:
            senders.run_closed(8)
            payloads: set[int] = set()
            while payloads != {0, 1}:
                collected = senders.collect().records
                assert not collected["outcome"].any()
                payloads |= set(collected["payload"].tolist())
    finally:
        server.close()


def test_where_it_would_mean_nothing_there_is_none() -> None:
    assert SenderLimit(replace(traffic("http"), address=Address("h", 1, encrypted=True)), 1).at(1) is None
    assert SenderLimit(replace(traffic("http"), read=read_generate), 1).at(1) is None


def test_a_result_near_the_limit_carries_a_warning() -> None:
    records = np.zeros(90, RECORD)
    records["end"] = 1
    figures = figures_of(records, [(0, 10**9)], np.array([1]))

    def warnings(limit: float) -> list[str]:
        return list(Measured(1, figures, None, (figures,), True, (), {}, 0.5, 0, 0, limit=limit).warnings)

    [warning] = warnings(100)
    assert warning.startswith("90 requests per second are 90% of the 100 that the senders can reach")
    assert warnings(200) == []
