"""An engine is compared with transformers when a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers

from conch.backends.base.verification import VERIFIED_TOKENS
from conch.backends.engines.transformers import engine as engine_module
from conch.backends.engines.transformers.cache import PaddedCache
from conch.core.errors import ConchError
from tests.unit.backends.engines.transformers.models import opened, write

PROMPTS = [[5, 6], [7, 8, 9, 10, 11, 12, 13]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("llama"), "llama")


def test_nothing_is_left_of_a_comparison(folder: Path) -> None:
    engine = opened(folder)
    engine.verify(PROMPTS)
    usage = engine.usage()
    assert not engine.busy and (usage.running, usage.waiting, usage.used_tokens, usage.prefix_queries) == (0, 0, 0, 0)


def test_model_that_differs_in_a_batch_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(folder)
    right = PaddedCache.mask

    def blind(self: PaddedCache, new: int, device: Any) -> Any:
        mask, positions = right(self, new, device)
        return mask.new_ones(mask.shape), positions

    monkeypatch.setattr(PaddedCache, "mask", blind)
    monkeypatch.setattr(engine_module, "SLOW_STEP", float("inf"))  # compare on a busy machine, too
    with pytest.raises(
        ConchError, match=r"results differ from those of transformers: after a prompt of 2 tokens .*token \d is"
    ):
        engine.verify(PROMPTS)
    assert not engine.busy


def test_model_with_slow_steps_is_not_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(folder)
    monkeypatch.setattr(engine_module, "SLOW_STEP", -1.0)
    monkeypatch.setattr(transformers.GenerationMixin, "generate", pytest.fail)
    engine.verify(PROMPTS)
    assert not engine.busy


def test_a_prompt_longer_than_the_context_is_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(folder, context=VERIFIED_TOKENS + 5)
    compared: list[list[int]] = []
    generate = transformers.GenerationMixin.generate

    def recorded(model: Any, ids: Any, **settings: Any) -> Any:
        compared.append(ids[0].tolist())
        return generate(model, ids, **settings)

    monkeypatch.setattr(transformers.GenerationMixin, "generate", recorded)
    monkeypatch.setattr(engine_module, "SLOW_STEP", float("inf"))
    engine.verify(PROMPTS)
    assert compared == [PROMPTS[0], PROMPTS[1][:4]]
