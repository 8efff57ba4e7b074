"""Several texts in one body of generate, and their answers."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from conch.core.errors import ConchError
from conch.core.inference import InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor, pack_bytes
from conch.wire.json.generate import encode_texts, split_texts

SIGNATURE = ModelSignature(
    "m",
    1,
    0,
    {
        "text_input": TensorSpec("text_input", "BYTES", (1,), optional=True),
        "max_tokens": TensorSpec("max_tokens", "INT32", (1,), optional=True),
        "stop_words": TensorSpec("stop_words", "BYTES", (-1,), optional=True),
    },
    {},
    by_row=True,
)


def test_each_text_gets_a_body_of_its_own() -> None:
    document = {"text_input": ["a", "b"], "max_tokens": [1, 2], "stop_words": ["x", "y"], "parameters": {"n": 1}}
    shared = {"stop_words": ["x", "y"], "parameters": {"n": 1}}
    assert split_texts(document, SIGNATURE) == [
        {"text_input": "a", "max_tokens": 1, **shared},
        {"text_input": "b", "max_tokens": 2, **shared},
    ]


def test_body_without_a_list_of_texts_is_not_split() -> None:
    assert split_texts({"text_input": "a", "stop_words": ["x"], "other": [1]}, SIGNATURE) is None


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"text_input": ["a", "b"], "max_tokens": [1]},
            "'text_input' has 2 values and 'max_tokens' has 1; lists must have one value per text",
        ),
        ({"text_input": []}, "'text_input' is a list of 0; a request may have 1 to 256 texts"),
        ({"text_input": ["a"] * 257}, "'text_input' is a list of 257; a request may have 1 to 256 texts"),
    ],
)
def test_lists_that_make_no_sense_are_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError) as caught:
        split_texts(document, SIGNATURE)
    assert caught.value.message == message


def test_answers_come_in_the_order_of_the_texts() -> None:
    requests = [InferRequest("m", {}, lambda response: None, model_version=1, id="q") for _ in range(2)]
    text = WireTensor("text_output", "BYTES", (1,), pack_bytes([b"hi"]))
    count = WireTensor("count", "INT32", (2,), struct.pack("<2i", 3, 4))
    body = encode_texts(requests, [InferResponse([text]), InferResponse([text, count], parameters={"cut": True})])
    assert json.loads(body) == {
        "model_name": "m", "model_version": "1", "id": "q",
        "text_output": ["hi", "hi"], "count": [None, [3, 4]], "cut": [None, True],
    }  # fmt: skip
