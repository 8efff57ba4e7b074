"""What verbose logging says of a call, over both protocols, and that it says nothing otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.conformance.raw import Request, get, post, send, tensor
from tests.e2e.conftest import Serve
from tests.events import eventually

BODY = {"id": "mine", "inputs": [tensor("INPUT", "FP32", [1.5, 2.5], [2, 1])]}
SIZES = r"\d+ bytes in, \d+ out, [\d.]+ ms"
REQUEST = r"version 1: OK, batch of 2, waited [\d.]+ ms, computed for [\d.]+ ms, [\d.]+ ms in all"


def test_calls_are_told_while_logging_is_verbose(serve: Serve, tmp_path: Path) -> None:
    server = serve("identity_batched")
    log = tmp_path / "server.log"
    path = "/v2/models/identity_batched/infer"
    given = grpcclient.InferInput("INPUT", [2, 1], "FP32")
    given.set_data_from_numpy(np.array([[1.5], [2.5]], dtype=np.float32))
    client = grpcclient.InferenceServerClient(server.grpc)

    def calls() -> list[str]:
        """The lines that the calls below add to the log."""
        before = len(log.read_text())
        assert post(server.http, path, BODY).status == 200
        assert get(server.http, "/v2/models/absent").status == 404
        client.infer("identity_batched", [given], request_id="yours")
        with pytest.raises(grpcclient.InferenceServerException):
            client.infer("absent", [given])
        get(server.http, "/v2/health/live")
        return re.findall(r'\] "(.*)"', log.read_text()[before:])

    assert calls() == []
    post(server.http, "/v2/logging", {"log_verbose_level": 1})
    lines = calls()
    infer = "gRPC /inference.GRPCInferenceService/ModelInfer"
    for expected in (
        f"HTTP POST {path}: 200, {SIZES}, request mine",
        f"request mine of 'identity_batched' {REQUEST}",
        f"HTTP GET /v2/models/absent: 404, {SIZES}",
        f"{infer}: OK, {SIZES}, request yours",
        f"request yours of 'identity_batched' {REQUEST}",
        f"{infer}: NOT_FOUND, {SIZES}",
    ):
        assert [line for line in lines if re.fullmatch(expected, line)], (expected, lines)
    assert not [line for line in lines if " ran " in line]
    post(server.http, "/v2/logging", {"log_verbose_level": 2})
    assert [line for line in calls() if "identity_batched_0 ran 1 requests with a batch of 2" in line]
    post(server.http, "/v2/logging", {"log_verbose_level": 0})
    assert calls() == []


def test_access_log_in_json_has_a_line_for_each_call_with_its_key_request_and_trace(
    serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("search=s3cret\n")
    flags = (f"--api-key-file={tmp_path}/keys", "--log-access=true", "--log-format=json")
    server = serve("identity_batched", flags=flags)
    path = "/v2/models/identity_batched/infer"
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    key = {"Authorization": "Bearer s3cret"}
    headers = {**key, "traceparent": f"00-{trace}-00f067aa0ba902b7-01", "X-Request-ID": "theirs"}
    given = grpcclient.InferInput("INPUT", [2, 1], "FP32")
    given.set_data_from_numpy(np.array([[1.5], [2.5]], dtype=np.float32))
    client = grpcclient.InferenceServerClient(server.grpc)
    post(server.http, path, BODY, headers)
    send(server.http, Request("GET", "/v2/models/absent", headers=headers))
    get(server.http, "/v2/models/absent")
    lowered = {name.lower(): value for name, value in headers.items()}
    client.infer("identity_batched", [given], request_id="yours", headers=lowered)

    def calls() -> list[dict[str, Any]]:
        written = map(json.loads, (tmp_path / "server.log").read_text().splitlines())
        return [
            event
            for event in written
            if event["file"] == "access_log.py" and not event["path"].startswith("/v2/health")
        ]

    eventually(lambda: len(calls()) == 4, "the log has four calls")
    infer = "/inference.GRPCInferenceService/ModelInfer"
    members = ("method", "path", "status", "key", "request_id", "trace_id")
    assert [tuple(event.get(name) for name in members) for event in calls()] == [
        ("POST", path, 200, "search", "mine", trace),
        ("GET", "/v2/models/absent", 404, "search", "theirs", trace),
        ("GET", "/v2/models/absent", 401, None, None, None),
        (None, infer, "OK", "search", "yours", trace),
    ]
    assert all(event["duration_ms"] >= 0 and event["level"] == "INFO" for event in calls())
