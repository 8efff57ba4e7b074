"""Checkpoints that embed, rank and classify over the client APIs of retrieval: the numbers are those over Triton's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import openai
import pytest
import requests
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling
from sentence_transformers.util.quantization import quantize_embeddings
from sentence_transformers.util.similarity import maxsim
from torch import nn
from transformers import BertTokenizer

from conch.wire.retrieval.plans import quantized
from tests import text_checkpoints
from tests.retrieval_models import backbone, dense, saved
from tests.servers import ConchServer

TEXTS = ["anna works at the library", "the bus", "how can you be sure that it is open"]
LONG = "anna works at the library near the station " * 60


class Site:
    """A server, and requests to it."""

    def __init__(self, server: ConchServer, models: Path, tokenizer: BertTokenizer) -> None:
        self.server = server
        self.models = models
        self.tokenizer = tokenizer

    def url(self, path: str) -> str:
        return f"http://{self.server.http}{path}"

    def ask(self, path: str, **body: Any) -> Any:
        answer = requests.post(self.url(path), json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, **body: Any) -> tuple[int, Any]:
        answer = requests.post(self.url(path), json=body, timeout=60)
        return answer.status_code, answer.json()

    def outputs(self, model: str, output: str, **inputs: list[str]) -> Any:
        """An output over Triton's protocol, ``[rows, elements]``."""
        tensors = [
            {"name": name, "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
            for name, texts in inputs.items()
        ]
        answer = self.ask(f"/v2/models/{model}/infer", inputs=tensors, outputs=[{"name": output}])
        return np.array(answer["outputs"][0]["data"]).reshape(answer["outputs"][0]["shape"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("retrieval")
    models = folder / "models"
    embedder = text_checkpoints.write(models / "embedder" / "1", "AutoModel")
    prompts = {"prompts": {"query": "how ", "document": "the "}, "default_prompt_name": None}
    (embedder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling")]
    (embedder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": int(name), "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
                for name, path, kind in modules
            ]
        )
    )
    (embedder / "1_Pooling").mkdir()
    size = text_checkpoints.SIZES["hidden_size"]
    pooling = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True}
    (embedder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    text_checkpoints.write(models / "ranker" / "1", "AutoModelForSequenceClassification", num_labels=1)
    labels = {0: "bad", 1: "good", 2: "odd"}
    text_checkpoints.write(models / "classifier" / "1", "AutoModelForSequenceClassification", id2label=labels)
    for name, task in (
        ("embedder", "feature-extraction"),
        ("ranker", "text-ranking"),
        ("classifier", "text-classification"),
    ):
        _name_task(models / name, task)
    first = backbone(folder / "splade", "AutoModelForMaskedLM", "fill-mask")
    saved(models / "sparse" / "1", first, SpladePooling(), kind=SparseEncoder)
    projection = dense(nn.Identity(), 8, bias=False, module_input_name="token_embeddings")
    saved(models / "colbert" / "1", backbone(folder / "colbert"), projection, kind=MultiVectorEncoder)
    with ConchServer(models, log=folder / "log") as server:
        yield Site(server, models, BertTokenizer.from_pretrained(embedder))


def _name_task(model: Path, task: str) -> None:
    parameter = f'parameters {{ key: "task" value {{ string_value: "{task}" }} }}'
    (model / "config.pbtxt").write_text(f'name: "{model.name}" backend: "huggingface" {parameter}')


@pytest.fixture(scope="module")
def vectors(site: Site) -> Any:
    return site.outputs("embedder", "embedding", text_input=TEXTS)


def unit(vectors: Any) -> Any:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_vectors_are_the_same_over_all_apis(site: Site, vectors: Any) -> None:
    for answer in (
        [item["embedding"] for item in site.ask("/v1/embeddings", model="embedder", input=TEXTS)["data"]],
        site.ask("/v2/embed", model="embedder", texts=TEXTS)["embeddings"]["float"],
        site.ask("/embed", inputs=TEXTS, normalize=False),
        site.ask("/v2/models/embedder/embed", inputs=TEXTS, normalize=False),
        [item["data"] for item in site.ask("/pooling", model="embedder", input=TEXTS)["data"]],
    ):
        assert np.allclose(answer, vectors, rtol=1e-5, atol=1e-6)
    assert np.allclose(site.ask("/embed", inputs=TEXTS), unit(vectors), rtol=1e-5, atol=1e-6)


def test_openai_client_gets_shorter_and_quantized_vectors(site: Site, vectors: Any) -> None:
    with openai.OpenAI(base_url=site.url("/v1"), api_key="any", max_retries=0) as client:
        answer = client.embeddings.create(model="embedder", input=TEXTS, dimensions=5)
        assert np.allclose([item.embedding for item in answer.data], unit(vectors[:, :5]), rtol=1e-5, atol=1e-6)
        assert answer.usage.prompt_tokens == sum(len(site.tokenizer(text)["input_ids"]) for text in TEXTS)
        answer = client.embeddings.create(
            model="embedder", input=TEXTS, encoding_format="float", extra_body={"output_dtype": "ubinary"}
        )
        assert np.array_equal([item.embedding for item in answer.data], np.packbits(vectors > 0, axis=-1))


def test_token_ids_are_embedded_as_their_text(site: Site, vectors: Any) -> None:
    ids = [site.tokenizer(text)["input_ids"] for text in TEXTS]
    answer = site.ask("/v1/embeddings", model="embedder", input=ids)
    assert np.allclose([item["embedding"] for item in answer["data"]], vectors, rtol=1e-5, atol=1e-6)
    assert np.allclose(site.ask("/embed", inputs=ids[0], normalize=False), vectors[:1], rtol=1e-5, atol=1e-6)
    status, answer = site.refused("/v1/embeddings", model="embedder", input=[10**6])
    assert status == 400 and "must come from the model's own tokenizer" in answer["error"]["message"]


def test_named_prompt_is_put_before_each_text(site: Site) -> None:
    expected = site.outputs("embedder", "embedding", text_input=[f"how {text}" for text in TEXTS])
    for chosen in ({"prompt_name": "query"}, {"input_type": "query"}, {"task": "retrieval.query"}, {"prompt": "how "}):
        answer = site.ask("/v1/embeddings", model="embedder", input=TEXTS, **chosen)
        assert np.allclose([item["embedding"] for item in answer["data"]], expected, rtol=1e-5, atol=1e-6)
    answer = site.ask("/v2/embed", model="embedder", texts=TEXTS, input_type="search_query")
    assert np.allclose(answer["embeddings"]["float"], expected, rtol=1e-5, atol=1e-6)
    status, answer = site.refused("/embed", inputs="a", prompt_name="nobody")
    assert status == 413 and "query" in answer["error"] and answer["error_type"] == "Validation"


def test_sparse_vectors_are_those_of_sentence_transformers(site: Site) -> None:
    encoder = SparseEncoder(str(site.models / "sparse" / "1"), device="cpu")
    for text, elements in zip(TEXTS, site.ask("/embed_sparse", inputs=TEXTS), strict=True):
        expected = encoder.encode(text).to_dense().numpy()
        assert [element["index"] for element in elements] == np.flatnonzero(expected).tolist()
        values = [element["value"] for element in elements]
        assert np.allclose(values, expected[np.flatnonzero(expected)], rtol=1e-4, atol=1e-5)


def test_vectors_of_tokens_are_those_of_sentence_transformers(site: Site) -> None:
    encoder = MultiVectorEncoder(str(site.models / "colbert" / "1"), device="cpu")
    for chosen, encode in (({}, encoder.encode), ({"input_type": "query"}, encoder.encode_query)):
        answer = site.ask("/pooling", model="colbert", input=TEXTS, task="token_embed", **chosen)["data"]
        for text, item in zip(TEXTS, answer, strict=True):
            assert np.allclose(item["data"], encode(text).numpy(), rtol=1e-4, atol=1e-4)
    assert [len(vectors) for vectors in site.ask("/embed_all", inputs=TEXTS)] == [
        len(encoder.encode(text)) for text in TEXTS
    ]


def test_multi_vector_model_ranks_and_scores_by_maxsim(site: Site) -> None:
    reference = MultiVectorEncoder(str(site.models / "colbert" / "1"), device="cpu")
    query, documents = reference.encode_query(TEXTS[0]), [reference.encode_document(text) for text in TEXTS]
    expected = maxsim([query], documents)[0].numpy()
    answer = site.ask("/rerank", model="colbert", query=TEXTS[0], documents=TEXTS)["results"]
    found = sorted(answer, key=lambda result: int(result["index"]))
    assert np.allclose([result["relevance_score"] for result in found], expected, rtol=1e-5, atol=1e-5)
    asked: dict[str, Any] = {"model": "colbert", "query": TEXTS[0], "return_documents": False}
    length = len(site.tokenizer.tokenize(TEXTS[1]))
    longer = site.ask("/rerank", **asked, documents=[f"{TEXTS[1]} {TEXTS[2]}"], max_tokens_per_doc=length)
    assert longer["results"][0]["relevance_score"] == pytest.approx(expected[1], abs=1e-5)
    answer = site.ask("/score", model="colbert", text_1=TEXTS[0], text_2=TEXTS)["data"]
    assert np.allclose([item["score"] for item in answer], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_quantized_vectors_are_those_of_sentence_transformers(precision: str) -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 32)).astype(np.float32)
    vectors[:, 0] = 0.5  # a dimension without a range
    quantized_vectors = quantized(vectors, precision, member="output_dtype")
    expected = quantize_embeddings(vectors, precision)
    assert quantized_vectors.dtype == expected.dtype
    assert np.array_equal(quantized_vectors, expected)


def test_documents_are_ranked_as_their_scores_say(site: Site) -> None:
    scores = site.outputs("ranker", "score", text_input=[TEXTS[0]] * 3, text_pair=TEXTS)[:, 0]
    answer = site.ask("/v2/rerank", model="ranker", query=TEXTS[0], documents=TEXTS)
    assert [result["index"] for result in answer["results"]] == np.argsort(-scores, kind="stable").tolist()
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(
        sorted(scores, reverse=True), rel=1e-5
    )
    scored = site.ask("/score", model="ranker", text_1=TEXTS[0], text_2=TEXTS)["data"]
    assert [item["score"] for item in scored] == pytest.approx(scores.tolist(), rel=1e-5)
    counts = [len(site.tokenizer(TEXTS[0], text)["input_ids"]) for text in TEXTS]
    assert answer["usage"]["total_tokens"] == sum(counts)
    logits = site.outputs("ranker", "logits", text_input=[TEXTS[0]] * 3, text_pair=TEXTS)[:, 0]
    raw = site.ask("/rerank", query=TEXTS[0], texts=TEXTS, raw_scores=True, return_text=True)
    assert {result["text"]: result["score"] for result in raw} == pytest.approx(
        dict(zip(TEXTS, logits.tolist(), strict=True)), rel=1e-5
    )


def test_classes_are_in_each_apis_order(site: Site) -> None:
    logits = site.outputs("classifier", "logits", text_input=TEXTS)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    answer = site.ask("/classify", model="classifier", input=TEXTS)["data"]
    assert np.allclose([item["probs"] for item in answer], probabilities, rtol=1e-5)
    assert [item["label"] for item in answer] == [("bad", "good", "odd")[row.argmax()] for row in logits]
    (ranked,) = site.ask("/predict", inputs=[[TEXTS[0]]])
    assert [item["score"] for item in ranked] == pytest.approx(sorted(probabilities[0], reverse=True), rel=1e-5)


def test_tokens_have_their_places_in_the_text(site: Site) -> None:
    text = TEXTS[0]
    encoding = site.tokenizer(text, return_offsets_mapping=True)
    (tokens,) = site.ask("/tokenize", inputs=text, model="embedder")
    assert [token["id"] for token in tokens] == encoding["input_ids"]
    inner = [token for token in tokens if not token["special"]]
    assert [(token["start"], token["stop"]) for token in inner] == encoding["offset_mapping"][1:-1]
    assert all(token["text"] == text[token["start"] : token["stop"]] for token in inner)
    assert tokens[0]["text"] == "[CLS]" and tokens[0]["start"] is None
    prompted = site.ask("/tokenize", inputs=text, model="embedder", prompt_name="query")[0]
    assert [token["id"] for token in prompted] == site.tokenizer(f"how {text}")["input_ids"]
    status, answer = site.refused("/tokenize", inputs=text, model="embedder", prompt_name="other")
    assert (status, answer["error"]) == (413, "prompt_name is 'other'; the checkpoint has query, document")
    bare = site.ask("/v2/models/ranker/tokenize", inputs=[text], add_special_tokens=False)[0]
    assert [token["id"] for token in bare] == encoding["input_ids"][1:-1]
    assert site.ask("/tokenize", model="embedder", prompt="")["tokens"] == site.tokenizer("")["input_ids"]
    shown = site.ask("/tokenize", model="embedder", prompt=text, return_token_strs=True)
    assert (shown["tokens"], shown["count"]) == (encoding["input_ids"], len(encoding["input_ids"]))
    assert shown["token_strs"] == site.tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    assert site.ask("/decode", model="embedder", ids=encoding["input_ids"]) == [text]
    decoded = site.ask("/detokenize", model="embedder", tokens=encoding["input_ids"])["prompt"]
    assert decoded == f"[CLS] {text} [SEP]"


def test_long_text_is_truncated_or_refused_as_the_request_says(site: Site) -> None:
    assert len(site.ask("/embed", inputs=LONG)) == 1
    begin, end = (
        site.ask("/embed", inputs=LONG, truncate=True, truncation_direction=side) for side in ("Right", "Left")
    )
    assert np.allclose(begin, site.ask("/embed", inputs=LONG), atol=1e-6)
    assert not np.allclose(begin, end, atol=1e-3)
    status, answer = site.refused("/embed", inputs=LONG, truncate=False)
    assert (status, answer["error_type"]) == (413, "Validation")
    assert site.refused("/v2/embed", model="embedder", texts=[LONG], truncate="NONE")[0] == 400
    assert site.refused("/v1/embeddings", model="embedder", input=LONG, truncate=False)[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/embed", {"inputs": []}, 400),
        ("/embed", {"inputs": ""}, 400),
        ("/embed", {"inputs": "a" * 2_000_000}, 413),
        ("/embed", {"inputs": ["a"] * 10_000}, 413),
        ("/embed", {"inputs": "a", "dimensions": 4096}, 422),
        ("/embed_sparse", {"inputs": "a", "model": "embedder"}, 424),
        ("/embed", {"inputs": "a", "model": "sparse"}, 424),
        ("/rerank", {"query": "q", "documents": []}, 400),
        ("/rerank", {"query": "q", "documents": ["a"] * 10_000}, 400),
        ("/v2/embed", {"texts": ["a"], "input_type": "nobody"}, 400),
        ("/v1/embeddings", {"model": "ranker", "input": "a"}, 400),
    ],
)
def test_bad_request_has_one_clear_error(site: Site, path: str, body: Any, status: int) -> None:
    got, answer = site.refused(path, **body)
    assert got == status, answer
    assert answer.get("message") or answer["error"]


def test_hugging_face_client_finds_its_routes(site: Site, vectors: Any) -> None:
    client = huggingface_hub.InferenceClient()
    answer = client.feature_extraction(TEXTS[0], model=site.url("/embed"), normalize=False, truncate=True)
    assert np.allclose(answer, vectors[:1], rtol=1e-5, atol=1e-6)
    similar = client.sentence_similarity(TEXTS[0], TEXTS[1:], model=site.url("/similarity"))
    assert np.allclose(similar, unit(vectors)[1:] @ unit(vectors)[0], atol=1e-5)
    # The client expects a list of lists, which TEI gives for a list of texts alone: it returns the best class.
    best: Any = client.text_classification(TEXTS[0], model=site.url("/predict"))
    assert best.label == site.ask("/predict", inputs=TEXTS[0])[0]["label"]


def test_every_text_model_is_listed_for_clients(site: Site) -> None:
    names = {model["id"] for model in requests.get(site.url("/v1/models"), timeout=60).json()["data"]}
    assert names == {"embedder", "ranker", "classifier", "sparse", "colbert"}
    info = requests.get(site.url("/v2/models/embedder/info"), timeout=60).json()
    assert info["max_input_length"] > 0 and info["model_type"] == {"embedding": {}}
