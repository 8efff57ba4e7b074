"""Routes of retrieval where they meet other features: remote models, ensembles, the response cache, restricted APIs.

The embedding model is a table, which loads without PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.servers import ConchServer

TEXTS = ["the bus", "anna works at the library", "how can you be sure"]
_ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input [{name: "text_input" data_type: TYPE_STRING dims: [1]}, {name: "task" data_type: TYPE_STRING dims: [1]}]
output [{name: "embedding" data_type: TYPE_FP32 dims: [-1]}]
ensemble_scheduling { step [{
  model_name: "far" model_version: -1
  input_map [{key: "text_input" value: "text_input"}, {key: "task" value: "task"}]
  output_map {key: "embedding" value: "embedding"}
}] }
"""


def write_table(folder: Path) -> None:
    """Write a StaticEmbedding with prompts, as sentence-transformers saves it."""
    folder.mkdir(parents=True)
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: index for index, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    table = np.random.default_rng(0).normal(size=(len(vocabulary), 8)).astype(np.float32)
    save_file({"embedding.weight": table}, folder / "model.safetensors")
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"}
    (folder / "modules.json").write_text(json.dumps([module]))
    prompts = {"prompts": {"query": "how ", "document": "the "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


@pytest.fixture(scope="module")
def back(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    folder = tmp_path_factory.mktemp("retrieval")
    write_table(folder / "models" / "embedder" / "1")
    (folder / "models" / "embedder" / "config.pbtxt").write_text('backend: "huggingface"')
    with ConchServer(folder / "models", log=folder / "log") as server:
        yield server


def ask(server: ConchServer, path: str, status: int = 200, headers: Any = None, **body: Any) -> Any:
    answer = requests.post(f"http://{server.http}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_remote_models_ensembles_and_the_cache_serve_the_routes(
    back: ConchServer, tmp_path: Path, protocol: str
) -> None:
    url = f"http://{back.http}" if protocol == "http" else f"grpc://{back.grpc}"
    parameters = {"url": url, "model": "embedder"}
    lines = [
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' for name, value in parameters.items()
    ]
    far, embed = tmp_path / "models" / "far", tmp_path / "models" / "embed"
    far.mkdir(parents=True)
    (far / "config.pbtxt").write_text("\n".join(['backend: "remote"', "response_cache { enable: true }", *lines]))
    (embed / "1").mkdir(parents=True)
    (embed / "config.pbtxt").write_text(_ENSEMBLE)
    restricted = "--http-restricted-api=inference:X-Key=secret"
    flags = ("--cache-config=local,size=1048576", restricted)
    key = {"X-Key": "secret"}
    with ConchServer(tmp_path / "models", *flags, log=tmp_path / "log") as front:
        text = [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [TEXTS[0]]}]
        (output,) = ask(front, "/v2/models/far/infer", headers=key, inputs=text)["outputs"]
        assert output["name"] == "embedding"
        seen = []
        for members in ({}, {"input_type": "query"}, {"input_type": "document"}, {"truncate_prompt_tokens": 1}):
            expected = ask(back, "/v1/embeddings", model="embedder", input=TEXTS, **members)
            for _ in range(2):
                answer = ask(front, "/v1/embeddings", headers=key, model="far", input=TEXTS, **members)
                assert (answer["data"], answer["usage"]) == (expected["data"], expected["usage"])
            seen.append(json.dumps(expected["data"]))
        assert len(set(seen)) == 4
        expected = ask(back, "/v1/embeddings", model="embedder", input=TEXTS, input_type="query")
        answer = ask(front, "/v1/embeddings", headers=key, model="embed", input=TEXTS, input_type="query")
        assert answer["data"] == expected["data"]
        for path, body in (
            ("/v2/models/far/embed", {"inputs": TEXTS}),
            ("/v2/models/far/tokenize", {"inputs": TEXTS[0]}),
            ("/v2/models/far/decode", {"ids": [5, 6]}),
            ("/v2/models/far/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}}),
        ):
            assert ask(front, path, headers=key, **body) == ask(back, path.replace("far", "embedder"), **body)
        assert ask(front, "/v2/models/far/embed_sparse", 424, key, inputs=TEXTS)["error_type"] == "Backend"
        assert ask(front, "/embed", 401, inputs=TEXTS)["error_type"]
        assert ask(front, "/v1/embeddings", 401, model="far", input=TEXTS)["error"]["message"]
