"""Clients receive the reason why a model does not load, but no paths of the server."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import conch
from tests.models import write
from tests.refusals import refused

#: An ensemble of ``m`` alone.
ENSEMBLE = """
platform: "ensemble"
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "embedding" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step [{
  model_name: "m" model_version: -1
  input_map { key: "text_input" value: "text_input" } output_map { key: "embedding" value: "embedding" }
}] }
"""
SHOWN = "model folder 'elsewhere/minilm' does not exist"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model whose checkpoint is in a folder that does not exist, and an ensemble of it."""
    root = tmp_path / "models"
    document = json.dumps({"model": str(tmp_path / "elsewhere" / "minilm")})
    write(root, "m", 'backend: "huggingface"', {"1/model.json": document})
    write(root, "e", ENSEMBLE, {"1/none": ""})
    return root


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    return refused(call, *arguments).message


def served(repository: Path, mode: str) -> conch.Server:
    return conch.Server(model_repository=repository, model_control_mode=mode, http_port=0, grpc_port=0)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_load_and_index(repository: Path, protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    full = f"model folder '{repository.parent}/elsewhere/minilm' does not exist"
    with served(repository, "explicit") as server, conch.Client(server.urls[protocol]) as client:
        for name in ("m", "e"):
            message = refusal(client.load, name)
            assert SHOWN in message and str(repository.parent) not in message
        [reason] = [entry["reason"] for entry in client.models() if entry["name"] == "m"]
        assert reason == f"Invalid argument: {SHOWN}"
        assert full in refusal(server.load, "m")
        [reason] = [entry["reason"] for entry in server.models() if entry["name"] == "m"]
        assert reason == f"Invalid argument: {full}"
    assert any(full in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_requests_that_wait_for_a_load(repository: Path, protocol: str) -> None:
    with served(repository, "on-demand") as server, conch.Client(server.urls[protocol]) as client:
        for name in ("m", "m", "e"):  # the second is refused without another load
            message = refusal(client.infer, name, {"text_input": ["a"]})
            assert SHOWN in message and str(repository.parent) not in message


def test_openai_requests_that_wait_for_a_load(repository: Path) -> None:
    with served(repository, "on-demand") as server:
        body = json.dumps({"model": "m", "input": "a"}).encode()
        request = Request(f"{server.urls['http']}/v1/embeddings", body, {"Content-Type": "application/json"})
        with pytest.raises(HTTPError) as raised:
            urlopen(request, timeout=60)
        message = json.load(raised.value)["error"]["message"]
        assert SHOWN in message and str(repository.parent) not in message
