"""What is recorded of a request, and the files that show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.core.inference import InferRequest
from conch.telemetry.tracing.trace import HTTP
from conch.telemetry.tracing.tracing import TraceFile, Tracing, trace_text
from conch.telemetry.tracing.values import TraceValues
from tests.unit.telemetry.tracing.requests import KeptTraces, TracedServer, answer, child

ON = TraceValues(level=("TIMESTAMPS", "TENSORS"), rate=1, file="t")
COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
HTTP_SEND = ["INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"]


@pytest.fixture
def server() -> TracedServer:
    return TracedServer(ON)


def written(kept: KeptTraces, server: TracedServer) -> list[dict[str, Any]]:
    server.tracing.close()
    [[trace]] = kept.appended
    return list(json.loads(f"[{trace_text(trace)}]"))


def moments(objects: list[dict[str, Any]], id: int) -> list[str]:
    return [one["timestamps"][0]["name"] for one in objects if one["id"] == id and "timestamps" in one]


def test_a_request_is_shown_with_its_moments_and_tensors(server: TracedServer) -> None:
    request = server.request(id="one")
    request.times.compute_infer = 5
    answer(request)
    objects = written(server.kept, server)
    id = objects[0]["id"]

    assert [one for one in objects if "model_name" in one] == [
        {"id": id, "model_name": "m", "model_version": 1, "request_id": "one"}
    ]
    assert [(one["activity"], one["tensor"]) for one in objects if "activity" in one] == [
        ("TENSOR_QUEUE_INPUT", {"name": "text", "data": '"say "x"","y\n"', "shape": "2", "dtype": "BYTES"}),
        ("TENSOR_BACKEND_OUTPUT", {"name": "n", "data": "7", "shape": "1", "dtype": "INT32"}),
    ]
    assert moments(objects, id) == [
        "HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START", *COMPUTE, "REQUEST_END", *HTTP_SEND,
    ]  # fmt: skip
    times = [one["timestamps"][0]["ns"] for one in objects if "timestamps" in one]
    assert times == sorted(times)


def test_requests_made_to_answer_one_name_it_and_the_trace_waits_for_them(server: TracedServer) -> None:
    parent = server.request()
    late = child(parent, "step")
    answer(parent, failed=True)
    server.tracing.update("", {"level": ()})
    assert not server.kept.appended

    answer(late)
    objects = written(server.kept, server)
    headers = [one for one in objects if "model_name" in one]
    assert [header.get("parent_id") for header in headers] == [None, headers[0]["id"]]
    assert moments(objects, headers[1]["id"]) == ["REQUEST_START", "QUEUE_START", *COMPUTE, "REQUEST_END"]


def test_a_request_that_was_refused_ends_its_trace(server: TracedServer) -> None:
    request = InferRequest("m", {}, lambda response: None)

    server.tracing.begin(request, HTTP, request.times.arrived)
    assert request.trace is not None
    request.trace.refused()

    objects = written(server.kept, server)
    assert moments(objects, objects[0]["id"]) == ["HTTP_RECV_START", "HTTP_RECV_END"]


def test_a_call_that_never_reached_its_model_keeps_no_trace_open(server: TracedServer) -> None:
    parent = server.request()
    assert parent.trace is not None
    parent.trace.child()
    answer(parent)
    assert len({one["id"] for one in written(server.kept, server)}) == 1


def test_files_are_whole_when_they_are_closed(tmp_path: Path) -> None:
    values = TraceValues(level=("TIMESTAMPS",), rate=1, file=str(tmp_path / "t.json"))
    server = TracedServer(values)
    server.tracing = Tracing(values)
    server.ask()
    server.ask()
    server.tracing.update("", {"log_frequency": 1})
    server.ask()
    server.tracing.close()

    assert len({load["id"] for load in json.loads((tmp_path / "t.json").read_text())}) == 2
    assert len({load["id"] for load in json.loads((tmp_path / "t.json.0").read_text())}) == 1


def test_a_missing_folder_loses_only_the_traces(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = TracedServer(ON)
    server.ask()
    server.tracing.close()
    file = TraceFile(str(tmp_path / "absent" / "t.json"))
    file.append(server.kept.appended[0])
    file.close()
    assert "failed creating trace file: [Errno 2]" in caplog.text
