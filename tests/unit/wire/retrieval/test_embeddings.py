"""Requests for embeddings in OpenAI's, Cohere's and TEI's form, and their responses."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conch.core.errors import Code, ConchError
from conch.core.inference import TensorSpec
from conch.wire.openai.reading import ApiError
from conch.wire.retrieval.tei import info_body
from tests.unit.wire.retrieval.models import (
    EMBEDDER,
    MULTI_VECTOR,
    PLAIN_EMBEDDER,
    RANKER,
    SPARSE,
    body,
    decoded,
    optional,
    refusal,
    signature,
    texts,
)

VECTORS = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
TEXTS = [f"text {index}" for index in range(6)]


def embeddings(**members: Any) -> Any:
    return np.array(
        [item["embedding"] for item in body(decoded("embeddings", input=TEXTS, **members), embedding=VECTORS)["data"]]
    )


def test_vectors_come_in_the_order_of_the_texts_with_the_tokens_of_all() -> None:
    request = decoded("embeddings", input=TEXTS)
    assert texts(request) == [TEXTS[:4], TEXTS[4:]]
    answer = body(request, embedding=VECTORS, num_input_tokens=[[2]] * 6)
    assert np.array_equal(np.array([item["embedding"] for item in answer["data"]], np.float32), VECTORS)
    assert [item["index"] for item in answer["data"]] == list(range(6))
    assert answer["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    assert body(decoded("embeddings", input="a"), embedding=VECTORS[:1])["usage"]["prompt_tokens"] == 0


def test_requests_have_as_many_texts_as_the_model_takes() -> None:
    def shapes(dims: tuple[int, ...], output: tuple[int, ...], batch: int) -> list[tuple[int, ...]]:
        text, vector = PLAIN_EMBEDDER.inputs["text_input"], PLAIN_EMBEDDER.outputs["embedding"]
        model = signature([type(text)("text_input", "BYTES", dims)], [type(vector)("embedding", "FP32", output)], batch)
        return [inputs["text_input"].shape for inputs in decoded("embeddings", model, input=["a", "b", "c"]).inputs]

    assert shapes((1,), (4,), 2) == [(2, 1), (1, 1)]
    assert shapes((1,), (4,), 0) == [(1,), (1,), (1,)]
    assert shapes((-1,), (-1, 4), 0) == [(3,)]
    assert shapes((-1,), (4,), 0) == [(1,), (1,), (1,)]


def test_token_ids_are_rows_padded_with_minus_one() -> None:
    (inputs,) = decoded("embeddings", input=[[5, 6, 7], [8]]).inputs
    assert np.frombuffer(inputs["token_ids"].data, "<i4").reshape(inputs["token_ids"].shape).tolist() == [
        [5, 6, 7],
        [8, -1, -1],
    ]
    (inputs,) = decoded("embeddings", input=[5, 6]).inputs
    assert inputs["token_ids"].shape == (1, 2)
    assert "no token ids" in refusal("embeddings", PLAIN_EMBEDDER, input=[5, 6]).message


@pytest.mark.parametrize(
    "rows", [[[1] * 200_000, *[[2]] * 255], [[2], [1] * 200_000, [3, 4]], [[1, 2]] * 300, [[1] * 70_000] * 3]
)
def test_token_ids_are_not_padded_to_much_more_than_their_size(rows: list[list[int]]) -> None:
    model = replace(EMBEDDER, max_batch_size=256)
    requests = decoded("embeddings", model, input=rows).inputs
    padded = [np.frombuffer(inputs["token_ids"].data, "<i4").reshape(inputs["token_ids"].shape) for inputs in requests]
    assert [[id for id in row if id >= 0] for part in padded for row in part.tolist()] == rows
    assert sum(part.size for part in padded) <= 2 * sum(map(len, rows)) + 65_536
    assert len(requests) <= 3


def test_dimensions_keep_the_first_numbers_scaled_to_length_one() -> None:
    expected = VECTORS[:, :3] / np.linalg.norm(VECTORS[:, :3], axis=1, keepdims=True)
    assert np.allclose(embeddings(dimensions=3), expected, atol=1e-7)
    assert refusal("embeddings", input="a", dimensions=9).message == "'dimensions' is 9; the model has 8"


@pytest.mark.parametrize(("dtype", "bits"), [("binary", False), ("ubinary", True)])
def test_binary_vectors_have_a_bit_for_each_dimension(dtype: str, bits: bool) -> None:
    packed = np.packbits(VECTORS > 0, axis=-1)
    expected = packed if bits else packed.astype(int) - 128
    for member in ("embedding_type", "output_dtype"):
        assert np.array_equal(embeddings(**{member: dtype}), expected)


def test_int8_vectors_divide_the_range_of_each_dimension_in_the_request() -> None:
    starts, steps = VECTORS.min(0), (VECTORS.max(0) - VECTORS.min(0)) / 255
    expected = np.floor((VECTORS - starts) / steps)
    assert np.array_equal(embeddings(output_dtype="uint8"), expected)
    assert np.array_equal(embeddings(output_dtype="int8"), expected - 128)
    with pytest.raises(ApiError, match="at least two texts"):
        body(decoded("embeddings", input="a", output_dtype="int8"), embedding=VECTORS[:1])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_not_quantized(dtype: str, value: float) -> None:
    wrong = VECTORS.copy()
    wrong[1, 2] = value
    with pytest.raises(ConchError, match="not finite") as caught:
        body(decoded("embeddings", input=TEXTS, output_dtype=dtype), embedding=wrong)
    assert caught.value.code is Code.INTERNAL


def test_base64_has_the_bytes_of_the_datatype() -> None:
    data = body(decoded("embeddings", input=TEXTS, encoding_format="base64"), embedding=VECTORS)["data"]
    assert np.array_equal(np.frombuffer(b64decode(data[1]["embedding"]), "<f4"), VECTORS[1])
    data = body(
        decoded("embeddings", input=TEXTS, encoding_format="base64", output_dtype="ubinary"), embedding=VECTORS
    )["data"]
    assert b64decode(data[1]["embedding"]) == np.packbits(VECTORS[1] > 0).tobytes()


@pytest.mark.parametrize(
    ("members", "inputs"),
    [
        ({"input_type": "search_query"}, {"task": "query"}),
        ({"input_type": "passage"}, {"task": "document"}),
        ({"task": "retrieval.passage"}, {"task": "document"}),
        ({"task": "classification"}, {"task": "classification"}),
        ({"input_type": "clustering"}, {"task": "clustering"}),
        ({"input_type": "sts"}, {"prompt_name": "sts"}),
        ({"prompt_name": "sts"}, {"prompt_name": "sts"}),
        ({}, {}),
    ],
)
def test_query_or_document_becomes_an_input_of_every_row(members: dict[str, str], inputs: dict[str, str]) -> None:
    request = decoded("embeddings", input=["a", "b"], **members)
    chosen = {name: texts(request, name) for name in request.inputs[0] if name != "text_input"}
    assert chosen == {name: [[value, value]] for name, value in inputs.items()}


def test_model_without_prompts_embeds_queries_and_documents_alike() -> None:
    assert decoded("embeddings", PLAIN_EMBEDDER, input="a", input_type="query").inputs[0].keys() == {"text_input"}
    assert "has no prompts" in refusal("embeddings", PLAIN_EMBEDDER, input="a", prompt_name="sts").message
    assert "cannot be combined" in refusal("embeddings", input="a", prompt_name="sts", task="query").message


@pytest.mark.parametrize(
    ("members", "parameters"),
    [
        ({"truncate_prompt_tokens": 5}, {"truncation": "right", "max_length": 5}),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, {"truncation": "left", "max_length": 5}),
        ({"truncate_prompt_tokens": -1}, {"truncation": "right"}),
        ({"truncate": "NONE"}, {"truncation": "refuse"}),
        ({"truncate": "START"}, {"truncation": "left"}),
        ({"truncate": False}, {"truncation": "refuse"}),
        ({"truncate": True}, {}),
        ({"prompt": "query: "}, {"prompt": "query: "}),
    ],
)
def test_truncation_and_prompt_are_parameters_of_the_request(members: Any, parameters: Any) -> None:
    assert decoded("embeddings", input="a", **members).plan.parameters == parameters


@pytest.mark.parametrize(
    ("members", "param", "message"),
    [
        ({}, "input", "'input' is missing"),
        ({"inputs": "a"}, "input", "'input' is missing; 'inputs' is not known here"),
        ({"input_type": "query"}, "input", "'input' is missing"),
        ({"input": []}, "input", "'input' must not be empty"),
        ({"input": ""}, "input", "'input' must not be empty"),
        ({"input": ["a", ""]}, "input[1]", "'input[1]' must not be empty"),
        ({"input": ["a"] * 2049}, "input", "'input' has 2049 elements; at most 2048 are allowed"),
        ({"input": ["a", 1]}, "input[1]", "'input[1]' is 1; it must be a string"),
        ({"input": 5}, "input", "'input' is 5; it must be a string or an array"),
        ({"input": {"text": "a"}}, "input", "'input' is {\"text\":\"a\"}; it must be a string or an array"),
        ({"input": [[1], []]}, "input[1]", "'input[1]' must not be empty"),
        ({"input": [1, -1]}, "input[1]", "'input[1]' is -1; it must be a token id, from 0 to 2147483647"),
        ({"input": "a", "dimension": 3}, "dimension", "'dimension' is not known here; did you mean 'dimensions'?"),
        ({"input": "a", "output_dtype": "int4"}, "output_dtype",
         "'output_dtype' is \"int4\"; it must be one of float, int8, uint8, binary, ubinary"),
        ({"input": "a", "embedding_type": "binary", "output_dtype": "ubinary"}, "output_dtype",
         "'output_dtype' cannot be combined with 'embedding_type'"),
    ],
)  # fmt: skip
def test_bad_member_is_refused_by_name(members: Any, param: str, message: str) -> None:
    error = refusal("embeddings", **members)
    assert (error.param, error.message) == (param, message)


def test_model_of_another_kind_is_refused_with_the_route_that_serves_it() -> None:
    error = refusal("embeddings", RANKER, input="a")
    assert error.code is Code.UNSUPPORTED
    assert error.message == "this route needs a model that embeds texts; 'm' scores pairs of texts: use /rerank"


@pytest.mark.parametrize("size", [0, 7])
def test_vectors_of_wrong_size_are_the_models_failure(size: int) -> None:
    with pytest.raises(ConchError) as caught:
        body(decoded("embeddings", input=["a", "b"]), embedding=np.zeros((1, size)))
    assert caught.value.code is Code.INTERNAL


def test_cohere_gets_a_list_for_each_type() -> None:
    answer = body(
        decoded("cohere_embed", texts=TEXTS, embedding_types=["float", "int8", "ubinary", "base64"]),
        embedding=VECTORS, num_input_tokens=[[1]] * 6,
    )  # fmt: skip
    assert set(answer["embeddings"]) == {"float", "int8", "ubinary", "base64"}
    assert answer["embeddings"]["ubinary"] == np.packbits(VECTORS > 0, axis=-1).tolist()
    assert answer["texts"] == TEXTS
    assert answer["meta"]["billed_units"] == {"input_tokens": 6}
    assert "relative" in answer["meta"]["warnings"][0]


def test_older_cohere_clients_get_one_list() -> None:
    answer = body(decoded("cohere_embed_v1", texts=["a"]), embedding=VECTORS[:1])
    assert np.allclose(answer["embeddings"], VECTORS[:1])
    assert answer["response_type"] == "embeddings_floats"


def test_cohere_takes_texts_as_contents_but_no_images() -> None:
    part = {"type": "text", "text": "a"}
    assert texts(decoded("cohere_embed", inputs=[{"content": [part, part]}])) == [["a\na"]]
    assert refusal("cohere_embed", inputs=[{"content": [{"type": "video"}]}]).param == "inputs[0].content[0].type"
    assert refusal("cohere_embed", images=["data:image/png;base64,eA=="]).code is Code.UNSUPPORTED
    assert (
        refusal("cohere_embed", texts=["a"], output_dimension=9).message == "'output_dimension' is 9; the model has 8"
    )


def test_tei_gets_bare_vectors_of_length_one_unless_it_asks_for_others() -> None:
    lengths = np.linalg.norm(VECTORS, axis=1, keepdims=True)
    request = {"inputs": TEXTS}
    assert np.allclose(body(decoded("tei_embed", **request), embedding=VECTORS), VECTORS / lengths, atol=1e-7)
    assert np.allclose(body(decoded("tei_embed", **request, normalize=False), embedding=VECTORS), VECTORS)
    shorter = body(decoded("tei_embed", **request, normalize=False, dimensions=2), embedding=VECTORS)
    assert np.allclose(shorter, VECTORS[:, :2])
    shorter = body(decoded("tei_embed", **request, dimensions=2), embedding=VECTORS)
    assert np.allclose(np.linalg.norm(shorter, axis=1), 1)


def test_tei_truncates_on_the_side_that_it_names_or_not_at_all() -> None:
    for members, parameters in (
        ({}, {}),
        ({"truncate": False}, {"truncation": "refuse"}),
        ({"truncate": True, "truncation_direction": "Left"}, {"truncation": "left"}),
    ):
        assert decoded("tei_embed", inputs="a", **members).plan.parameters == parameters  # type: ignore[arg-type]


def test_tei_is_told_whether_the_model_truncates() -> None:
    for facts, truncates in (({}, True), ({"truncation": "refuse"}, False)):
        assert json.loads(info_body(EMBEDDER, facts))["auto_truncate"] is truncates


def test_similarities_are_cosines_with_the_first_text() -> None:
    inputs = {"source_sentence": "a", "sentences": ["b", "c"]}
    answer = body(decoded("tei_similarity", inputs=inputs), embedding=VECTORS[:3])
    unit = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    assert np.allclose(answer, unit[1:3] @ unit[0], atol=1e-6)
    assert refusal("tei_similarity", inputs={"source_sentence": "a"}).param == "inputs.sentences"


def test_similarities_refuse_a_prompt_that_the_model_lacks() -> None:
    inputs = {"source_sentence": "a", "sentences": ["b"]}
    error = refusal("tei_similarity", PLAIN_EMBEDDER, inputs=inputs, parameters={"prompt_name": "sts"})
    assert (error.param, error.message) == (
        "parameters.prompt_name", "model 'm' has no prompts, and takes no 'parameters.prompt_name'",
    )  # fmt: skip


def test_both_names_of_normalization_are_known() -> None:
    lengths = np.linalg.norm(VECTORS, axis=1, keepdims=True)
    for first, second in ((True, True), (True, False), (False, True)):
        assert np.allclose(embeddings(normalize=first, normalized=second), VECTORS / lengths, atol=1e-6)
    assert np.allclose(embeddings(normalize=False, normalized=False), VECTORS)


def test_only_inputs_that_replace_the_text_are_filled() -> None:
    foreign = signature([*EMBEDDER.inputs.values(), TensorSpec("tenant", "BYTES", (1,))], [*EMBEDDER.outputs.values()])
    assert decoded("embeddings", foreign, input="a").inputs[0].keys() == {"text_input"}
    assert decoded("embeddings", foreign, input=[5, 6]).inputs[0].keys() == {"text_input", "token_ids"}
    ranker = signature([*RANKER.inputs.values()], [*RANKER.outputs.values(), TensorSpec("tokens", "BYTES", (1,))])
    request = decoded("tei_tokenize", ranker, inputs="a")
    assert (texts(request), texts(request, "text_pair")) == ([["a"]], [[""]])


def test_root_path_does_what_the_model_is_for() -> None:
    assert body(decoded("tei_root", inputs=["a"], normalize=False), embedding=[[1, 2]]) == [[1, 2]]
    similar = decoded("tei_root", inputs={"source_sentence": "a", "sentences": ["b"]})
    assert body(similar, embedding=[[1, 0], [0, 1]]) == [0]
    assert body(decoded("tei_root", RANKER, query="q", texts=["a"]), score=[[0.5]]) == [{"index": 0, "score": 0.5}]
    error = refusal("tei_root", RANKER, inputs={"source_sentence": "a", "sentences": ["b"]})
    assert error.code is Code.UNSUPPORTED


def test_jinas_objects_with_a_text_are_texts() -> None:
    assert texts(decoded("embeddings", input=[{"text": "a"}, "b"])) == [["a", "b"]]
    assert refusal("embeddings", input=[{"video": "a"}]).param == "input[0]"


def test_texts_without_a_vector_give_an_empty_list() -> None:
    request = decoded("tei_embed_all", MULTI_VECTOR, inputs=["a", "b"])
    assert body(request, token_embeddings=np.zeros((2, 0, 2)), num_vectors=[[0], [0]]) == [[], []]
    request = decoded("tei_embed_sparse", SPARSE, inputs=["a"])
    assert body(request, sparse_indices=np.zeros((1, 0)), sparse_values=np.zeros((1, 0))) == [[]]


def test_sparse_vectors_are_indices_with_values_without_padding() -> None:
    request = decoded("tei_embed_sparse", SPARSE, inputs=["a", "b"])
    answer = body(request, sparse_indices=[[3, 9], [5, -1]], sparse_values=[[0.5, 1], [2, 0]])
    assert answer == [[{"index": 3, "value": 0.5}, {"index": 9, "value": 1}], [{"index": 5, "value": 2}]]
    error = refusal("tei_embed_sparse", PLAIN_EMBEDDER, inputs="a")
    assert error.code is Code.UNSUPPORTED and error.message.endswith("use /embed")


@pytest.mark.parametrize("endpoint", ["tei_embed_all", "vllm_pooling"])
def test_each_text_has_as_many_vectors_as_the_model_gives(endpoint: str) -> None:
    request = decoded(endpoint, MULTI_VECTOR, **{"inputs" if "tei" in endpoint else "input": ["a", "b"]})
    answer = body(request, token_embeddings=[[[1, 2], [3, 4]], [[5, 6], [0, 0]]], num_vectors=[[2], [1]])
    vectors = answer if "tei" in endpoint else [item["data"] for item in answer["data"]]
    assert vectors == [[[1, 2], [3, 4]], [[5, 6]]]


CHAT = signature(
    [optional(name) for name in ("text_input", "messages", "tools", "chat_template_kwargs")],
    [TensorSpec("text_output", "BYTES", (-1,)), TensorSpec("tokens", "BYTES", (1,))],
    batch=0,
)


def test_chats_are_tokenized_as_their_template_renders_them() -> None:
    messages = [{"role": "user", "content": "hi"}]
    request = decoded("vllm_tokenize", CHAT, messages=messages, add_generation_prompt=False)
    assert json.loads(texts(request, "messages")[0][0]) == messages
    assert json.loads(texts(request, "chat_template_kwargs")[0][0]) == {"add_generation_prompt": False}
    assert request.plan.parameters == {"add_special_tokens": False}
    assert decoded("vllm_tokenize", CHAT, messages=messages).inputs[0].keys() == {"messages"}
    assert decoded("vllm_tokenize", CHAT, prompt="a").plan.parameters == {"add_special_tokens": True}
    assert refusal("vllm_tokenize", CHAT, messages=messages, chat_template="{{ x }}").param == "chat_template"
    assert refusal("vllm_tokenize", messages=messages).param == "messages"


def test_dense_model_gives_the_vectors_of_its_tokens() -> None:
    hidden = TensorSpec("last_hidden_state", "FP32", (-1, -1))
    dense = signature([*EMBEDDER.inputs.values()], [*EMBEDDER.outputs.values(), hidden])
    outputs = {"last_hidden_state": [[[1, 2], [3, 4]], [[5, 6], [0, 0]]], "num_input_tokens": [[2], [1]]}
    vectors = [[[1, 2], [3, 4]], [[5, 6]]]
    assert body(decoded("tei_embed_all", dense, inputs=["a b", "a"]), **outputs) == vectors
    pooled = body(decoded("vllm_pooling", dense, input=["a b", "a"], task="token_embed"), **outputs)
    assert [row["data"] for row in pooled["data"]] == vectors
    assert "use /v1/embeddings" not in refusal("tei_embed_all", inputs="a").message


def test_teis_prompts_for_queries_and_documents_select_the_task_too() -> None:
    request = decoded("tei_embed", inputs="a", prompt_name="query")
    assert (texts(request, "prompt_name"), texts(request, "task")) == ([["query"]], [["query"]])
    assert "task" not in decoded("tei_embed", inputs="a", prompt_name="sts").inputs[0]
