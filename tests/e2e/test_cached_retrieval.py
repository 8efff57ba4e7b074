"""Routes of retrieval with the response cache: forms of a result share an entry, and other results do not."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import requests
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling

from tests import text_checkpoints
from tests.retrieval_models import backbone, pooled, saved
from tests.servers import ConchServer

TEXTS = ["anna works at the library", "the bus", "how can you be sure that it is open", "the station"]
PROMPTS = {"query": "how ", "document": "the ", "question": "how "}
KINDS = {"embedder": "feature-extraction", "ranker": "text-ranking", "sparse": "feature-extraction"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    """A server with the models of ``KINDS``, which are cached."""
    folder = tmp_path_factory.mktemp("cached")
    pooled(folder / "embedder", prompts=PROMPTS)
    text_checkpoints.write(folder / "ranker", "AutoModelForSequenceClassification", num_labels=1)
    masked = backbone(folder / "masked", "AutoModelForMaskedLM", "fill-mask")
    saved(folder / "sparse", masked, SpladePooling(), kind=SparseEncoder)
    for name, task in KINDS.items():
        values = {"model": str(folder / name), "task": task}
        lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()]
        lines += ['backend: "huggingface"', "max_batch_size: 2", "response_cache { enable: true }"]
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "config.pbtxt").write_text("\n".join(lines))
    with ConchServer(folder / "models", "--cache-config=local,size=10000000", log=folder / "log") as server:
        yield server


def ask(server: ConchServer, path: str, model: str, *, hits: int, **body: Any) -> Any:
    """The answer of a model to a request, of whose parts ``hits`` come from the cache."""
    before = server.cache_hits(model)
    answer = requests.post(f"http://{server.http}{path}", json={"model": model, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert server.cache_hits(model) - before == hits, (path, body)
    return answer.json()


def embed(server: ConchServer, text: str | list[str], *, hits: int, **members: Any) -> list[Any]:
    """The embeddings of ``/v1/embeddings``."""
    data = ask(server, "/v1/embeddings", "embedder", input=text, hits=hits, **members)["data"]
    return [item["embedding"] for item in data]


def test_forms_of_a_vector_come_from_one_entry(server: ConchServer) -> None:
    [first] = embed(server, TEXTS[0], hits=0)
    vector = np.array(first, np.float32)
    [encoded] = embed(server, TEXTS[0], encoding_format="base64", hits=1)
    assert np.array_equal(np.frombuffer(base64.b64decode(encoded), np.float32), vector)
    [short] = embed(server, TEXTS[0], dimensions=5, hits=1)
    assert np.allclose(short, vector[:5] / np.linalg.norm(vector[:5]), atol=1e-6)
    [bits] = embed(server, TEXTS[0], dimensions=8, output_dtype="ubinary", hits=1)
    assert bits == np.packbits(vector[:8] > 0).tolist()
    assert embed(server, TEXTS[0], hits=1) == [first]


def test_prompts_and_truncations_of_one_text_have_their_own_entries(server: ConchServer) -> None:
    text = TEXTS[2]
    choices: tuple[dict[str, Any], ...] = (
        {}, {"prompt_name": "query"}, {"prompt_name": "document"}, {"prompt": "it "}, {"truncate_prompt_tokens": 4},
        {"truncate_prompt_tokens": 5}, {"truncate_prompt_tokens": 4, "truncation_side": "left"},
    )  # fmt: skip
    first = [embed(server, text, **members, hits=0) for members in choices]
    assert len({str(vectors) for vectors in first}) == len(choices)
    assert [embed(server, text, **members, hits=1) for members in choices] == first
    # Another name of the same prompt, the prompt itself, and a text that begins with it.
    for sent, members in ((text, {"prompt_name": "question"}), (text, {"prompt": "how "}), (f"how {text}", {})):
        assert np.allclose(embed(server, sent, **members, hits=0), first[1], atol=1e-6)


def test_requests_in_parts_join_cached_and_computed_rows_in_order(server: ConchServer) -> None:
    first = embed(server, TEXTS[:2], hits=0)
    both = embed(server, TEXTS, hits=1)
    assert both[:2] == first
    assert embed(server, TEXTS[2:] + TEXTS[:2], hits=2) == both[2:] + first
    usage = ask(server, "/v1/embeddings", "embedder", input=TEXTS, hits=2)["usage"]
    parts = [ask(server, "/v1/embeddings", "embedder", input=TEXTS[at : at + 2], hits=1)["usage"] for at in (0, 2)]
    assert usage["prompt_tokens"] == sum(part["prompt_tokens"] for part in parts) > 0


def test_scores_of_a_query_come_from_one_entry_in_all_forms(server: ConchServer) -> None:
    sent: dict[str, Any] = {"query": "where is the library", "texts": TEXTS[:2]}
    scores = ask(server, "/rerank", "ranker", **sent, hits=0)
    [best, _] = ask(server, "/rerank", "ranker", **sent, return_text=True, hits=1)
    assert best == {**scores[0], "text": TEXTS[scores[0]["index"]]}
    assert ask(server, "/rerank", "ranker", **sent, hits=1) == scores
    assert ask(server, "/rerank", "ranker", query=TEXTS[3], texts=TEXTS[:2], hits=0) != scores
    swapped = ask(server, "/rerank", "ranker", query=sent["query"], texts=TEXTS[1::-1], hits=0)
    expected = {1 - item["index"]: pytest.approx(item["score"]) for item in scores}
    assert {item["index"]: item["score"] for item in swapped} == expected


def test_sparse_vectors_and_tokens_of_one_text_have_their_own_entries(server: ConchServer) -> None:
    path = "/v2/models/sparse/"
    vectors = ask(server, path + "embed_sparse", "sparse", inputs=TEXTS[:2], hits=0)
    assert ask(server, path + "embed_sparse", "sparse", inputs=TEXTS[:2], hits=1) == vectors
    tokens = ask(server, path + "tokenize", "sparse", inputs=TEXTS[:2], hits=0)
    assert ask(server, path + "tokenize", "sparse", inputs=TEXTS[:2], hits=1) == tokens != vectors
