"""``conch perf`` against both servers: every kind of request that it can send gets the right response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
from tritonclient.http import InferenceServerClient

from conch.measure.perf.inputs.data import DataOptions
from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import PerfPlan, SequenceOptions, read_address
from conch.measure.perf.run import Measurement
from tests.conftest import Server, Start
from tests.models import build

TEXT = {"model": "identity_string", "data": DataOptions(string_data="some text")}
#: By the kind of request.
CASES: dict[str, dict[str, Any]] = {
    "http": TEXT,
    "http json": {**TEXT, "binary": False, "binary_output": False},
    "http batches": {**TEXT, "batch_size": 3},
    "grpc": {**TEXT, "protocol": "grpc"},
    "grpc gzip": {**TEXT, "protocol": "grpc", "encoding": "gzip"},
    "stream": {**TEXT, "protocol": "grpc", "streaming": True},
    "stream decoupled": {
        "model": "repeat", "protocol": "grpc", "streaming": True,
        "data": DataOptions("zero", {"IN": (3,), "DELAY": (3,)}),
    },
    "ensemble": {"model": "diamond", "batch_size": 2, "data": DataOptions(shapes={"X": (4,)})},
    "memory http": {"model": "add_sub", "shared_memory": True},
    "memory grpc": {"model": "add_sub", "shared_memory": True, "protocol": "grpc"},
    "memory stream": {**TEXT, "shared_memory": True, "protocol": "grpc", "streaming": True},
    "sequences http": {"model": "accumulate"},
    "sequences grpc": {"model": "accumulate", "protocol": "grpc"},
    "sequences stream": {"model": "accumulate", "protocol": "grpc", "streaming": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def sharing(start: Start, server_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Each server, with shared memory enabled."""
    repository = build(tmp_path_factory.mktemp("shared") / "models", "add_sub", "identity_string")
    with start(repository, *(["--allow-client-shm=true"] if server_kind == "conch" else [])) as server:
        yield server


def _measure(server: Server, **given: Any) -> Measured:
    """Send 20 requests with a concurrency of two."""
    address, _ = read_address(server.grpc if given.get("protocol") == "grpc" else server.http, "http")
    fields = {"warm_up": 0.0, "requests": 20, "total_requests": 20, "trials": 1, "timeout": 30.0} | given
    with Measurement(PerfPlan(address=address, **fields)) as measurement:
        return measurement.measure(2)


@pytest.mark.parametrize("name", CASES)
def test_every_request_is_answered(name: str, server: Server, sharing: Server) -> None:
    given = CASES[name]
    measured = _measure(sharing if "shared_memory" in given else server, **given)
    assert measured.errors == {} and measured.figures.requests == 20
    if given["model"] == "repeat":
        assert measured.generation is not None and measured.generation.itl is not None
        assert measured.generation.tokens * measured.figures.seconds == pytest.approx(60)


def test_memory_is_given_back_while_callers_run(sharing: Server) -> None:
    """Not before their requests have ended: the server does not unregister a region that is in use."""
    address, _ = read_address(sharing.http, "http")
    client = InferenceServerClient(sharing.http)
    plan = PerfPlan("add_sub", address, shared_memory=True, warm_up=0.0, interval=0.2, trials=1)
    with Measurement(plan) as measurement:
        (region,) = client.get_system_shared_memory_status()
        assert measurement.measure(8).figures.requests
        assert region["name"].startswith("conch_perf_")
    assert client.get_system_shared_memory_status() == []
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(region["name"])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_sequences_keep_their_state_apart(protocol: str, server: Server, tmp_path: Path) -> None:
    """The model returns the sum of a sequence so far, which is right only for complete sequences in order."""
    file = tmp_path / "data.json"
    data = [[{"INPUT": [1]}, {"INPUT": [2]}, {"INPUT": [3]}], [{"INPUT": [10]}, {"INPUT": [20]}]]
    sums = [[{"OUTPUT": [1]}, {"OUTPUT": [3]}, {"OUTPUT": [6]}], [{"OUTPUT": [10]}, {"OUTPUT": [30]}]]
    file.write_text(json.dumps({"data": data, "validation_data": sums}))
    options = SequenceOptions(first=70, last=74)
    measured = _measure(server, model="accumulate", protocol=protocol, data=DataOptions(str(file)), sequences=options)
    assert measured.errors == {} and measured.figures.requests == 20
