"""How long texts may be, as the files of a checkpoint say."""

from __future__ import annotations

from typing import Any

import pytest

from conch.checkpoints.folder import DEFAULT_MAX_LENGTH, max_length_of, positions_of
from conch.core.errors import Code, ConchError


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, 0),
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": -1, "n_positions": 64}, 64),
        ({"max_encoder_position_embeddings": 32, "max_position_embeddings": 512}, 32),
        ({"model_type": "roberta", "max_position_embeddings": 514}, 512),
        ({"model_type": "esm", "max_position_embeddings": 1026, "pad_token_id": 3}, 1022),
        ({"model_type": "roberta", "max_position_embeddings": 1}, 1),
        ({"model_type": "x", "text_config": {"max_position_embeddings": 77}}, 77),
        ({"max_position_embeddings": "512"}, 0),
    ],
)
def test_positions_are_those_of_the_configuration(config: dict[str, Any], positions: int) -> None:
    assert positions_of(config) == positions


@pytest.mark.parametrize(
    ("tokenizer", "sentence_bert", "positions", "generates", "length"),
    [
        ({}, {}, 0, False, DEFAULT_MAX_LENGTH),
        ({"model_max_length": 10**30}, {}, 0, False, DEFAULT_MAX_LENGTH),
        ({"model_max_length": 512}, {"max_seq_length": 256}, 384, False, 256),
        ({"model_max_length": 1e3}, {}, 0, False, 1000),
        ({"model_max_length": 64}, {}, 2048, True, 2048),
        ({"model_max_length": 64}, {}, 0, True, DEFAULT_MAX_LENGTH),
    ],
)
def test_least_limit_counts_unless_the_model_generates(
    tokenizer: dict[str, Any], sentence_bert: dict[str, Any], positions: int, generates: bool, length: int
) -> None:
    assert max_length_of(0, {}, positions, tokenizer, sentence_bert, generates=generates) == length


def test_more_than_the_positions_is_refused_unless_they_are_relative() -> None:
    assert max_length_of(64, {}, 64, {}, {}, generates=False) == 64
    assert max_length_of(600, {"model_type": "t5"}, 512, {}, {}, generates=False) == 600
    with pytest.raises(ConchError, match="'max_length' is 65; the model has positions for 64 tokens") as refused:
        max_length_of(65, {"model_type": "bert"}, 64, {}, {}, generates=False)
    assert refused.value.code is Code.INVALID_ARG
