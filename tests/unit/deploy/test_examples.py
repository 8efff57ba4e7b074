"""Examples of requests have the inputs of the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.config.pbtxt import parse
from conch.deploy.bundle import EMBEDDINGS, example

CONFIG = """
max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: [1] }
input { name: "SCALES" data_type: TYPE_FP16 dims: [-1, 2] }
input { name: "ON" data_type: TYPE_BOOL dims: [1] }
input { name: "SEED" data_type: TYPE_INT64 dims: [1] optional: true }
"""
QUESTION = "What is a conch?"


@pytest.mark.parametrize(
    ("config", "endpoint", "body"),
    [
        (CONFIG, "generate", {"TEXT": QUESTION, "SCALES": [0.0, 0.0], "ON": False}),
        (CONFIG, EMBEDDINGS, {"model": "m", "input": [QUESTION]}),
        (CONFIG, "openai", {"model": "m", "messages": [{"role": "user", "content": QUESTION}]}),
        ("", "generate_stream", {"text_input": QUESTION}),
        (
            'input { name: "stream" data_type: TYPE_BOOL dims: [1] optional: true } ' + CONFIG,
            "generate_stream",
            {"TEXT": QUESTION, "SCALES": [0.0, 0.0], "ON": False, "stream": True},
        ),
        (
            CONFIG,
            "infer",
            {
                "inputs": [
                    {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [QUESTION]},
                    {"name": "SCALES", "datatype": "FP16", "shape": [1, 1, 2], "data": [0.0, 0.0]},
                    {"name": "ON", "datatype": "BOOL", "shape": [1, 1], "data": [False]},
                ]
            },
        ),
    ],
)
def test_an_example_has_the_inputs_that_must_be_given(config: str, endpoint: str, body: Any) -> None:
    assert json.loads(example(parse(config, "config.pbtxt"), endpoint, "m")) == body


def test_a_language_model_is_asked_to_stream_where_requests_stream() -> None:
    config = parse("", "config.pbtxt")
    assert json.loads(example(config, "generate_stream", "m", writes=True)) == {"text_input": QUESTION, "stream": True}
    assert json.loads(example(config, "generate", "m", writes=True)) == {"text_input": QUESTION}
