"""Transcriptions by Python models, which are loaded when a request needs them, from several repositories."""

from __future__ import annotations

import gzip
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.models import write
from tests.servers import ConchServer

CONFIGURATION = """
backend: "python"
input { name: "audio" data_type: TYPE_STRING dims: [ 1 ] }
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "chunks" data_type: TYPE_STRING dims: [ 1 ] }
]
"""
#: Transcribes a recording as WORD and the number of its bytes.
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            size = len(pb_utils.get_input_tensor_by_name(request, "audio").as_numpy()[0])
            values = {"text_output": f"WORD {size}", "chunks": "[]"}
            tensors = [pb_utils.Tensor(name, np.array([text.encode()], np.object_)) for name, text in values.items()]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""


@pytest.fixture(scope="module", params=["--model-control-mode=on-demand", "--model-namespacing=true"])
def client(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("speech")
    write(folder / "first", "alone", CONFIGURATION, {"1/model.py": MODEL.replace("WORD", "first")})
    flags = [request.param]
    if "namespacing" in request.param:
        for repository in ("first", "second"):
            write(folder / repository, "both", CONFIGURATION, {"1/model.py": MODEL.replace("WORD", repository)})
        flags.append(f"--model-repository={folder / 'second'}")
    with (
        ConchServer(folder / "first", *flags, log=folder / "log") as server,
        openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize("size", [5, 1 << 20])
def test_model_is_loaded_for_its_recording(client: Any, size: int) -> None:
    answer = client.audio.transcriptions.create(model="alone", file=("a.wav", bytes(size)))
    assert answer.text == f"first {size}"
    assert answer.usage is None


def test_name_of_no_model_or_of_several_is_refused(client: Any) -> None:
    with pytest.raises(openai.APIStatusError, match=r"2 identifiers of model 'both'|unknown model: 'both'") as refused:
        client.audio.transcriptions.create(model="both", file=b"RIFF")
    assert refused.value.status_code in (400, 404)


def test_member_without_an_input_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="model 'alone' has no input for 'language'") as refused:
        client.audio.transcriptions.create(model="alone", file=b"RIFF", language="de")
    assert refused.value.param == "language"


def test_form_can_be_compressed(client: Any) -> None:
    part = b"--e\r\nContent-Disposition: form-data; name=%b\r\n\r\n%b\r\n"
    form = part % (b"model", b"alone") + part % (b"file", bytes(1 << 20)) + b"--e--"
    headers = {"Content-Type": "multipart/form-data; boundary=e", "Content-Encoding": "gzip"}
    url = f"{client.base_url}audio/transcriptions"
    with urllib.request.urlopen(urllib.request.Request(url, gzip.compress(form), headers), timeout=60) as reply:
        assert json.load(reply) == {"text": f"first {1 << 20}"}
