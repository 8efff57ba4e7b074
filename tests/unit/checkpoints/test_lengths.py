"""How long texts may be, as the files of a checkpoint say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.checkpoints.folder import Checkpoint, max_length_of, positions_of
from conch.checkpoints.options import Options
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
        ({}, {}, 0, False, 0),
        ({"model_max_length": 10**30}, {}, 0, False, 0),
        ({"model_max_length": 512}, {"max_seq_length": 256}, 384, False, 256),
        ({"model_max_length": 1e3}, {}, 0, False, 1000),
        ({"model_max_length": 64}, {}, 2048, True, 2048),
        ({"model_max_length": 64}, {}, 0, True, 0),
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


@pytest.mark.parametrize(
    ("options", "limit", "length", "refuses"),
    [
        ({}, {}, 512, True),
        ({}, {"model_max_length": 64}, 64, False),
        ({"max_length": "1024"}, {}, 1024, False),
        ({"truncation": "truncate"}, {}, 512, False),
        ({"truncation": "refuse"}, {"model_max_length": 64}, 64, True),
    ],
)
def test_long_texts_are_refused_if_nothing_limits_their_length(
    tmp_path: Path, options: dict[str, str], limit: dict[str, int], length: int, refuses: bool
) -> None:
    config = {"model_type": "mamba", "architectures": ["MambaModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(limit))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    checkpoint = Checkpoint.open(tmp_path, Options.from_values({"task": "feature-extraction", **options}))
    assert (checkpoint.max_length, checkpoint.refuses_long_texts) == (length, refuses)
