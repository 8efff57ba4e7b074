"""Measurements over gRPC of a server whose behaviour is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from conch.core.errors import ConchError
from conch.measure.perf.inputs.data import DataOptions
from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import PerfPlan, SequenceOptions
from conch.measure.perf.run import Measurement
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.records import Outcome
from tests.unit.measure.perf.known_grpc import KnownGrpcServer, running_grpc


def _measure(server: KnownGrpcServer, level: float = 1, **given: object) -> Measured:
    fields = {"warm_up": 0.0, "requests": 12, "total_requests": 12, "trials": 1, "streaming": True}
    fields |= {"address": Address("127.0.0.1", server.port), **given}
    plan = PerfPlan("known", protocol="grpc", **fields)  # type: ignore[arg-type]
    with Measurement(plan) as measurement:
        return measurement.measure(level)


def test_callers_keep_their_streams_open_from_request_to_request() -> None:
    with running_grpc(KnownGrpcServer()) as server:
        measured = _measure(server, 3)
    assert measured.figures.requests == 12 == len(server.requests) and measured.generation is None
    assert server.streams == 3


def test_responses_of_decoupled_models_are_events_and_the_last_one_ends_the_request() -> None:
    with running_grpc(KnownGrpcServer(decoupled=True, responses=4, distance=0.02)) as server:
        measured = _measure(server, 2)
    figures, generation = measured.figures, measured.generation
    assert figures.requests == 12 and figures.latency is not None and generation is not None
    assert generation.ttft is not None and generation.itl is not None
    assert generation.itl.percentiles[50] >= 0.02
    assert figures.latency.percentiles[50] >= generation.ttft.percentiles[50] + 3 * 0.02
    assert generation.tokens * figures.seconds == pytest.approx(4 * 12)
    assert all(request.parameters["triton_enable_empty_final_response"].bool_param for request in server.requests)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_refused_request_of_a_stream_has_failed_and_the_stream_continues(decoupled: bool) -> None:
    """What a decoupled model sends for it afterwards is not taken for the next request's answer."""
    with running_grpc(KnownGrpcServer(decoupled=decoupled, responses=3 if decoupled else 1, fails=3)) as server:
        measured = _measure(server)
    assert measured.figures.failures == {Outcome.REFUSED: 4} and measured.figures.requests == 8
    assert measured.errors == {"it is its turn": 4}
    assert server.streams == 1 and len(server.requests) == 12
    if measured.generation is not None:
        assert measured.generation.tokens * measured.figures.seconds == pytest.approx(3 * 8)


@pytest.mark.parametrize("streaming", [False, True])
def test_headers_and_parameters_travel_with_requests(streaming: bool) -> None:
    with running_grpc(KnownGrpcServer()) as server:
        _measure(server, headers={"X-Tenant": "a"}, parameters={"n": 3, "s": "t"}, streaming=streaming)
    assert all(one["x-tenant"] == "a" for one in server.metadata)
    assert all(request.parameters["n"].int64_param == 3 for request in server.requests)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_messages_are_compressed(encoding: str) -> None:
    with running_grpc(KnownGrpcServer()) as server:
        assert _measure(server, encoding=encoding, streaming=False).figures.requests == 12
    assert len(server.requests[0].raw_input_contents[0]) == 4


@pytest.mark.parametrize("streaming", [False, True])
def test_each_caller_sends_a_sequence_after_another(streaming: bool) -> None:
    """Whole ones: what was begun is ended, even where so many requests were not asked for."""
    with running_grpc(KnownGrpcServer()) as server:
        options = SequenceOptions(5, 0.0, first=7)
        measured = _measure(server, 2, streaming=streaming, sequences=options)
    assert measured.figures.requests == 12
    sequences: dict[int, list[tuple[bool, bool]]] = {}
    for request in server.requests:
        flags = request.parameters["sequence_start"].bool_param, request.parameters["sequence_end"].bool_param
        sequences.setdefault(request.parameters["sequence_id"].int64_param, []).append(flags)
    assert min(sequences) == 7 and len(sequences) >= 3
    for flags in sequences.values():
        assert [start for start, _ in flags] == [True] + [False] * (len(flags) - 1)
        assert [end for _, end in flags] == [False] * (len(flags) - 1) + [True]
        assert len(flags) <= 5


@pytest.mark.parametrize("streaming", [False, True])
def test_a_wrong_answer_is_a_failed_request(streaming: bool, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"data": [{"IN": [1]}, {"IN": [2]}], "validation_data": [{"IN": [1]}, {"IN": [3]}]}))
    with running_grpc(KnownGrpcServer()) as server:
        measured = _measure(server, streaming=streaming, data=DataOptions(str(file)))
    assert measured.figures.failures == {Outcome.WRONG: 6} and measured.figures.requests == 6
    assert measured.errors == {"output 'IN' differs from validation_data": 6}


def test_calls_travel_over_tls(certificate: Path) -> None:
    key, chain = certificate.with_name("key.pem").read_bytes(), certificate.read_bytes()
    credentials = grpc.ssl_server_credentials([(key, chain)], chain, require_client_auth=True)
    with running_grpc(KnownGrpcServer(), credentials) as server:
        address = Address(
            "localhost", server.port, encrypted=True, authorities=str(certificate), certificate=str(certificate),
            key=str(certificate.with_name("key.pem")),
        )  # fmt: skip
        assert _measure(server, address=address).figures.requests == 12


def test_decoupled_models_need_streams() -> None:
    with (
        running_grpc(KnownGrpcServer(decoupled=True)) as server,
        pytest.raises(ConchError, match="-i grpc --streaming"),
    ):
        _measure(server, streaming=False)


def test_a_server_without_shared_memory_is_told_so_once() -> None:
    with running_grpc(KnownGrpcServer()) as server, pytest.raises(ConchError, match="--shared-memory system"):
        _measure(server, shared_memory=True)
    assert not server.requests


def test_a_server_of_the_protocol_without_its_extensions_is_measured() -> None:
    with running_grpc(PlainGrpcServer()) as server:
        assert _measure(server, streaming=False).figures.requests == 12


class PlainGrpcServer(KnownGrpcServer):
    """Shows neither configurations nor statistics."""

    def ModelConfig(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method")

    def ModelStatistics(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method")


@pytest.mark.parametrize("value", [[1], None, 1 << 64])
def test_parameters_that_grpc_does_not_carry_are_named(value: object) -> None:
    with running_grpc(KnownGrpcServer()) as server, pytest.raises(ConchError, match="--request-parameter n: "):
        _measure(server, parameters={"n": value})
