"""Models of retrieval in several repositories, where names may be the same, over both HTTP ports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from tests.models import write
from tests.oracle.run import free_ports
from tests.servers import ConchServer

_TEXT = 'input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }'
_EMBEDS = f'backend: "python" max_batch_size: 8 {_TEXT} output {{ name: "embedding" data_type: TYPE_FP32 dims: [ 2 ] }}'
_RANKS = f"""
backend: "python" max_batch_size: 8 {_TEXT}
input {{ name: "text_pair" data_type: TYPE_STRING dims: [ 1 ] }}
output {{ name: "score" data_type: TYPE_FP32 dims: [ 1 ] }}
"""
_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, TEXTS).as_numpy()[:, 0]
            rows = np.array([[len(text), NUMBER][:SIZE] for text in texts], np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(OUTPUT, rows)]))
        return responses
"""


def embedder(repository: Path, name: str, number: int) -> None:
    code = {"TEXTS": '"text_input"', "NUMBER": str(number), "SIZE": "2", "OUTPUT": '"embedding"'}
    _write(repository, name, _EMBEDS, code)


def _write(repository: Path, name: str, config: str, values: dict[str, str]) -> None:
    code = _MODEL
    for key, value in values.items():
        code = code.replace(key, value)
    write(repository, name, config, {"1/model.py": code})


class Ports(NamedTuple):
    """The addresses of the port for all APIs, and of the one for OpenAI's."""

    http: str
    openai: str


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    root = tmp_path_factory.mktemp("namespaces")
    embedder(root / "one", "twin", 1)
    embedder(root / "two", "twin", 2)
    embedder(root / "two", "single", 3)
    ranks = {"TEXTS": '"text_pair"', "NUMBER": "0", "SIZE": "1", "OUTPUT": '"score"'}
    _write(root / "one", "ranker", _RANKS, ranks)
    (port,) = free_ports(1)
    flags = (f"--model-repository={root / 'two'}", "--model-namespacing=true", f"--openai-port={port}")
    with ConchServer(root / "one", *flags) as server:
        yield Ports(server.http, f"127.0.0.1:{port}")


def post(address: str, path: str, **body: Any) -> tuple[int, Any]:
    response = requests.post(f"http://{address}{path}", json=body, timeout=60)
    return response.status_code, response.json()


@pytest.mark.parametrize("port", ["http", "openai"])
def test_models_with_a_name_of_their_own_serve_requests_by_name_or_by_kind(ports: Ports, port: str) -> None:
    address = getattr(ports, port)
    listed = requests.get(f"http://{address}/v1/models", timeout=60).json()["data"]
    assert [model["id"] for model in listed] == ["ranker", "single"]

    status, body = post(address, "/v1/embeddings", model="single", input="four")
    assert status == 200 and body["data"][0]["embedding"] == [4.0, 3.0]
    assert post(address, "/embed", inputs=["four"], normalize=False) == (200, [[4.0, 3.0]])
    status, body = post(address, "/rerank", query="a", documents=["b", "long"])
    assert status == 200 and [result["index"] for result in body["results"]] == [1, 0]


@pytest.mark.parametrize("port", ["http", "openai"])
def test_a_name_of_two_models_is_refused_in_the_form_of_each_api(ports: Ports, port: str) -> None:
    message = "There are 2 identifiers of model 'twin' in global map"
    status, body = post(getattr(ports, port), "/v1/embeddings", model="twin", input="four")
    assert status == 400 and message in body["error"]["message"]
    status, body = post(getattr(ports, port), "/v2/models/twin/embed", inputs="four")
    assert status == 422 and message in body["error"]


def test_the_console_has_a_page_for_each_of_two_models_with_a_name(ports: Ports) -> None:
    def page(path: str) -> tuple[int, Any]:
        response = requests.get(f"http://{ports.http}/console/models/{path}", timeout=60)
        return response.status_code, response.json()

    status, body = page("twin")
    assert status == 400 and "There are 2 identifiers of model 'twin'" in body["error"]
    pages = [page(f"twin/versions/1?repository={number}")[1] for number in (1, 2)]
    for number, shown in enumerate(pages, 1):
        status, current = page(f"twin/statistics?repository={number}")
        assert (status, current["serial"]) == (200, shown["serial"])
    assert pages[0]["serial"] != pages[1]["serial"]
    for path in ("twin?repository=3", "single?repository=1", "twin?repository=x"):
        assert page(path)[0] == 404, path
