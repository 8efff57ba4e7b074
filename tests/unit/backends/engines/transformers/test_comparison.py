"""The comparison of an engine with transformers at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from conch.backends.engines.transformers.comparison import compare
from conch.backends.generation.engine import EngineSpec
from conch.backends.generation.generation_backend import open_engine
from conch.core.errors import Code, ConchError
from tests.checkpoints import train_tokenizer, write_checkpoint

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]


def spec(folder: Path, **settings: Any) -> EngineSpec:
    return EngineSpec(folder, {"dtype": "float32"}, (), **{"dtype": "float32", "threads": 2, **settings})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one size, ``right`` and ``wrong``."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("right", "wrong")):
        write_checkpoint(folder / name, LlamaConfig, {"intermediate_size": 64}, train_tokenizer(), seed=seed)
    return folder


def test_result_says_how_many_tokens_agree(folder: Path) -> None:
    engine = open_engine("transformers", spec(folder / "right"))
    assert compare(engine, spec(folder / "right"), PROMPTS) == (
        "16 of 16 tokens agree, log-probabilities differ by 0.0000 on average"
    )


def test_engine_that_computes_other_weights_is_refused(folder: Path) -> None:
    engine = open_engine("transformers", spec(folder / "wrong"))
    with pytest.raises(
        ConchError, match=r"does not reproduce the outputs of .*right: after a prompt of 3 tokens"
    ) as error:
        compare(engine, spec(folder / "right"), PROMPTS)
    assert error.value.code is Code.INVALID_ARG
    assert not engine.busy


@pytest.mark.parametrize(
    ("settings", "obstacle", "reason"),
    [
        ({}, "an argument", "an argument"),
        ({"threads": 0}, "", "a step in float32 takes more than about 0.5 s on each core"),
        ({"directory": Path("/nowhere")}, "", "engine 'transformers' cannot load '/nowhere': "),
    ],
)
def test_model_that_cannot_be_compared_is_not_refused(
    folder: Path, settings: dict[str, Any], obstacle: str, reason: str
) -> None:
    engine = open_engine("transformers", spec(folder / "right"))
    place = settings.pop("directory", folder / "right")
    assert compare(engine, spec(place, **settings), PROMPTS, obstacle).startswith(f"not checked: {reason}")
