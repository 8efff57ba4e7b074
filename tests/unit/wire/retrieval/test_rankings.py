"""Requests to rerank, score and classify, and their responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conch.core.errors import Code, ConchError
from conch.core.inference import TensorSpec
from conch.core.tensors import WireTensor
from conch.wire.retrieval.models import kinds
from conch.wire.retrieval.plans import Results
from tests.unit.wire.retrieval.models import (
    CLASSIFIER,
    EMBEDDER,
    MULTI_VECTOR,
    RANKER,
    body,
    decoded,
    refusal,
    signature,
    texts,
)

DOCUMENTS = ["low", "high", "middle", "high too", "lowest"]
SCORES = np.array([[0.25], [0.75], [0.5], [0.75], [0.125]], np.float32)
ORDER = [1, 3, 2, 0, 4]


def rerank(endpoint: str = "cohere_rerank", **members: Any) -> Any:
    request = decoded(endpoint, RANKER, query="q", documents=DOCUMENTS, **members)
    return body(request, score=SCORES, num_input_tokens=[[3]] * 5)


def test_documents_are_ranked_by_score_and_equal_ones_keep_their_order() -> None:
    answer = rerank()
    assert [result["index"] for result in answer["results"]] == ORDER
    assert [result["relevance_score"] for result in answer["results"]] == [0.75, 0.75, 0.5, 0.25, 0.125]
    assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[index] for index in ORDER]
    assert answer["usage"]["total_tokens"] == 15
    assert answer["meta"]["billed_units"] == {"search_units": 1}


def test_every_document_is_a_pair_with_the_query() -> None:
    request = decoded("cohere_rerank", RANKER, query="q", documents=[*DOCUMENTS[:4], {"text": "lowest"}])
    assert texts(request) == [["q"] * 4, ["q"]]
    assert texts(request, "text_pair") == [DOCUMENTS[:4], DOCUMENTS[4:]]


def test_best_results_alone_are_returned_on_request() -> None:
    assert [result["index"] for result in rerank(top_n=2)["results"]] == [1, 3]
    assert len(rerank(top_n=100)["results"]) == 5


def test_newer_cohere_clients_get_no_documents_unless_they_ask() -> None:
    assert set(rerank("cohere_rerank_v2")["results"][0]) == {"index", "relevance_score"}
    assert "document" in rerank("cohere_rerank_v2", return_documents=True)["results"][0]
    assert "document" not in rerank(return_documents=False)["results"][0]


def test_texts_in_place_of_documents_are_teis_request() -> None:
    request = decoded("cohere_rerank", RANKER, query="q", texts=DOCUMENTS, return_text=True)
    answer = body(request, score=SCORES)
    assert [result["index"] for result in answer] == ORDER
    assert answer[0] == {"index": 1, "score": 0.75, "text": "high"}
    assert texts(request, "function_to_apply") == [["sigmoid"] * 4, ["sigmoid"]]
    assert texts(decoded("tei_rerank", RANKER, query="q", texts=["a"], raw_scores=True), "function_to_apply") == [
        ["none"]
    ]


@pytest.mark.parametrize(
    ("members", "param", "reason"),
    [
        ({"documents": ["a"]}, "query", "missing_required_parameter"),
        ({"query": "q"}, "documents", "missing_required_parameter"),
        ({"query": "q", "documents": []}, "documents", "empty_input"),
        ({"query": "q", "documents": ["a"] * 10_000}, "documents", "too_many_inputs"),
        ({"query": "q", "documents": ["a", ""]}, "documents[1]", "empty_input"),
        ({"query": "q", "documents": ["a", {"txt": "b"}]}, "documents[1].text", None),
        ({"query": "q", "documents": [{"text": 7}]}, "documents[0].text", None),
        ({"query": "q", "documents": [{"text": "", "id": 1}]}, "documents[0].text", "empty_input"),
        ({"query": "q", "documents": [{"text": ""}]}, "documents[0].text", "empty_input"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n", None),
        ({"query": "q", "documents": ["a"], "topn": 1}, "topn", "unknown_parameter"),
        ({"query": "", "texts": ["a"]}, "query", "empty_input"),
        ({"query": "q", "texts": []}, "texts", "empty_input"),
    ],
)
def test_bad_reranking_is_refused_by_name(members: Any, param: str, reason: str | None) -> None:
    error = refusal("cohere_rerank", RANKER, **members)
    assert (error.param, error.reason) == (param, reason)


@pytest.mark.parametrize(
    ("members", "parameters"),
    [
        ({"truncate_prompt_tokens": -1}, {"truncation": "right"}),
        ({"truncate_prompt_tokens": 9, "max_tokens_per_doc": 5},
         {"truncation": "right", "max_length": 9, "max_pair_tokens": 5}),
        ({}, {}),
    ],
)  # fmt: skip
def test_truncation_of_documents_is_a_parameter_of_the_request(members: Any, parameters: Any) -> None:
    request = decoded("cohere_rerank", RANKER, query="q", documents=["a"], **members)
    assert request.plan.parameters == parameters


def test_model_with_several_scores_per_pair_does_not_rank() -> None:
    several = signature(list(RANKER.inputs.values()), [TensorSpec("score", "FP32", (3,))])
    assert refusal("cohere_rerank", several, query="q", documents=["a"]).code is Code.UNSUPPORTED


@pytest.mark.parametrize(("endpoint", "route"), [("cohere_rerank", "/v1/embeddings"), ("tei_rerank", "/embed")])
def test_embedding_model_does_not_rank(endpoint: str, route: str) -> None:
    error = refusal(endpoint, EMBEDDER, query="q", documents=["a"])
    assert error.code is Code.UNSUPPORTED
    assert error.message.endswith(f"'m' embeds texts: use {route}")


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_one_text_is_scored_with_many_or_each_with_its_own(names: tuple[str, str]) -> None:
    first, second = names
    one = decoded("vllm_score", RANKER, **{first: "q", second: ["a", "b"]})
    assert (texts(one), texts(one, "text_pair")) == ([["q", "q"]], [["a", "b"]])
    pairs = decoded("vllm_score", RANKER, **{first: ["q", "r"], second: ["a", "b"]})
    assert texts(pairs) == [["q", "r"]]
    answer = body(pairs, score=SCORES[:2])
    assert [item["score"] for item in answer["data"]] == [0.25, 0.75]
    assert refusal("vllm_score", RANKER, **{first: ["q", "r"], second: ["a", "b", "c"]}).param == first


def test_embedding_model_scores_by_the_cosine_of_vectors() -> None:
    request = decoded("vllm_score", EMBEDDER, text_1="q", text_2=["a", "b"])
    answer = body(request, embedding=np.array([[3, 4], [6, 8], [4, -3]] * 1, np.float32))
    assert [item["score"] for item in answer["data"]] == pytest.approx([1, 0], abs=1e-7)


LABELS = [["b", "c", "a"], ["a", "b", "c"]]
RANKED = np.array([[0.5, 0.375, 0.125], [0.75, 0.25, 0]], np.float32)
LOGITS = np.array([[-1, 3, 2], [5, 4, 3]], np.float32)


def test_classes_have_the_order_of_the_checkpoint() -> None:
    answer = body(decoded("vllm_classify", CLASSIFIER, input=["x", "y"]), label=LABELS, score=RANKED, logits=LOGITS)
    assert answer["data"][0] == {"index": 0, "label": "b", "probs": [0.125, 0.5, 0.375], "num_classes": 3}
    assert answer["data"][1]["probs"] == [0.75, 0.25, 0]
    pooled = body(decoded("vllm_pooling", CLASSIFIER, input=["x", "y"]), label=LABELS, score=RANKED, logits=LOGITS)
    assert pooled["data"][0]["data"] == [0.125, 0.5, 0.375]


def test_all_classes_are_requested_of_a_model_that_may_leave_some_out() -> None:
    for endpoint in ("vllm_classify", "vllm_pooling"):
        (inputs,) = decoded(endpoint, CLASSIFIER, input=["x", "y"]).inputs
        assert (inputs["top_k"].shape, inputs["top_k"].data) == ((2, 1), np.full(2, 2**31 - 1, "<i4").tobytes())
        with pytest.raises(ConchError, match="gave 1 scores for 3 classes") as caught:
            body(decoded(endpoint, CLASSIFIER, input="x"), label=[["b"]], score=[[0.5]], logits=LOGITS[:1])
        assert caught.value.code is Code.INTERNAL


#: A classifier that gives its classes and scores in an order of its own, without logits.
FOREIGN = signature([CLASSIFIER.inputs["text_input"]], [CLASSIFIER.outputs["label"], CLASSIFIER.outputs["score"]])


def test_classes_without_logits_have_the_order_of_their_names() -> None:
    request = decoded("vllm_classify", FOREIGN, input=["x", "y"])
    assert request.plan.outputs == ("label", "score")
    answer = body(request, label=[["c", "a", "b"], ["a", "b", "c"]], score=[[0.25, 0.125, 0.625], [0.5, 0.25, 0.25]])
    assert [(item["label"], item["probs"]) for item in answer["data"]] == [
        ("b", [0.125, 0.625, 0.25]), ("a", [0.5, 0.25, 0.25]),
    ]  # fmt: skip
    pooled = body(decoded("vllm_pooling", FOREIGN, input=["x"]), label=[["c", "a"]], score=[[0.25, 0.75]])
    assert pooled["data"][0]["data"] == [0.75, 0.25]


@pytest.mark.parametrize("labels", [[["a", "b"], ["a", "c"]], [["a", "a"], ["a", "a"]], [["a"], ["a"]]])
def test_classes_without_logits_that_differ_between_texts_are_the_models_failure(labels: list[list[str]]) -> None:
    with pytest.raises(ConchError, match="same labels") as caught:
        body(decoded("vllm_pooling", FOREIGN, input=["x", "y"]), label=labels, score=[[0.25, 0.75], [0.5, 0.5]])
    assert caught.value.code is Code.INTERNAL


def test_rows_of_different_sizes_are_the_models_failure() -> None:
    parts = [[WireTensor("score", "FP32", (rows, size), bytes(4 * rows * size))] for rows, size in ((4, 2), (1, 3))]
    plan = decoded("vllm_classify", FOREIGN, input=["x"] * 5).plan
    with pytest.raises(ConchError, match="'score' has rows of 2, 3 elements") as caught:
        Results(plan, parts).numbers("score")
    assert caught.value.code is Code.INTERNAL


def test_fill_mask_is_no_classifier() -> None:
    outputs = [*FOREIGN.outputs.values(), TensorSpec("text_output", "BYTES", (1,))]
    model = signature([*CLASSIFIER.inputs.values()], outputs)
    assert kinds(model) == []
    assert refusal("vllm_classify", model, input="x").code is Code.UNSUPPORTED


def test_both_places_of_raw_scores_are_known() -> None:
    request = decoded("tei_predict", CLASSIFIER, inputs="x", raw_scores=True, parameters={"raw_scores": False})
    assert texts(request, "function_to_apply") == [["none"]]


def test_texts_of_both_members_are_limited_for_an_embedding_model() -> None:
    error = refusal("vllm_score", EMBEDDER, text_1=["q"] * 1025, text_2=["a"] * 1025)
    assert (error.param, error.reason) == ("text_2", "too_many_inputs")
    assert decoded("vllm_score", EMBEDDER, text_1=["q"] * 1024, text_2=["a"] * 1024)


def test_tei_gets_classes_best_first_for_a_text_or_a_list_of_texts() -> None:
    one = body(decoded("tei_predict", CLASSIFIER, inputs="x"), label=LABELS[:1], score=RANKED[:1])
    assert one[0] == {"score": 0.5, "label": "b"}
    many = body(decoded("tei_predict", CLASSIFIER, inputs=[["x"], ["y"]]), label=LABELS, score=RANKED)
    assert [row[0]["label"] for row in many] == ["b", "a"]


def test_two_texts_are_a_pair_to_tei() -> None:
    request = decoded("tei_predict", CLASSIFIER, inputs=["x", "y"], raw_scores=True)
    assert (texts(request), texts(request, "text_pair")) == ([["x"]], [["y"]])
    assert texts(request, "function_to_apply") == [["none"]]
    assert refusal("tei_predict", CLASSIFIER, inputs=[["x"], ["y", "z"]]).param == "inputs"


def test_vector_is_pooled_as_it_is() -> None:
    answer = body(decoded("vllm_pooling", EMBEDDER, input="x", task="embed"), embedding=[[1, 2]])
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": [1, 2]}]
    assert refusal("vllm_pooling", EMBEDDER, input="x", task="classify").param == "task"


def test_vectors_of_tokens_score_by_maxsim() -> None:
    request = decoded("cohere_rerank", MULTI_VECTOR, query="q", documents=["a", "b", "c", "d", "e"])
    assert texts(request) == [["q"], ["a", "b", "c", "d"], ["e"]]
    assert texts(request, "task") == [["query"], ["document"] * 4, ["document"]]
    vectors = np.zeros((6, 2, 2))
    vectors[0] = [[1, 0], [0, 1]]
    vectors[1:] = [[[1, 1], [0, 0]], [[2, 0], [9, 9]], [[0.5, 0], [0, 0.5]], [[-1, -3], [9, 9]], [[9, 9], [9, 9]]]
    answer = body(request, token_embeddings=vectors, num_vectors=[[2], [2], [1], [2], [1], [0]])
    found = [(result["index"], result["relevance_score"]) for result in answer["results"]]
    assert found == [(0, 2), (1, 2), (2, 1), (4, 0), (3, -4)]
    request = decoded("vllm_score", MULTI_VECTOR, queries=["q", "r"], documents=["a", "b"])
    vectors = np.array([[[1, 0]], [[0, 1]], [[1, 2]], [[3, 4]]])
    scores = body(request, token_embeddings=vectors, num_vectors=[[1]] * 4)["data"]
    assert [item["score"] for item in scores] == [1, 4]


def test_reranker_of_texts_refuses_images() -> None:
    error = refusal("cohere_rerank", RANKER, query="q", documents=["a", {"image": "data:image/png;base64,eA=="}])
    assert "scores no images" in error.message
