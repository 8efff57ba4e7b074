"""The engine ``transformers``: how much of a prompt a step reads beside decoding rows."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from conch.backends.engines.transformers.engine import TransformersEngine
from conch.backends.engines.transformers.network import DecoderNetwork
from conch.backends.generation.engine import EngineRequest
from conch.core.sampling.parameters import SamplingParams
from tests.unit.backends.engines.transformers.models import spec, write


class Machine:
    """A clock that advances by 10 ms for each run of a network, and by ``token_seconds`` for each of its tokens."""

    def __init__(self, token_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        run = DecoderNetwork.run

        def slowly(network: DecoderNetwork, ids: Any, cache: Any, media: Any = None) -> Any:
            self.now += 0.01 + token_seconds * ids.numel()
            return run(network, ids, cache, media)

        monkeypatch.setattr(DecoderNetwork, "run", slowly)


@pytest.mark.parametrize("token_seconds", [0.00001, 0.0001, 0.0005])
def test_long_prompts_delay_the_tokens_of_others_by_at_most_three_times_the_median(
    token_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(token_seconds, monkeypatch)
    engine = TransformersEngine(spec(write(tmp_path, "llama"), prefix_caching=False), clock=lambda: machine.now)
    for id in range(4):
        engine.add(EngineRequest(id, [3 + id, 4, 5], SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)))
    gaps: list[float] = []
    last = machine.now
    for step in range(300):
        if step % 50 == 20:
            engine.add(EngineRequest(100 + step, [3 + step % 7] * 100, SamplingParams(max_tokens=1, temperature=0.0)))
        if any(progress.id == 0 for progress in engine.step()):
            gaps.append(machine.now - last)
            last = machine.now
    gaps.sort()
    assert gaps[int(0.99 * len(gaps))] <= 3 * median(gaps)
    assert gaps[-1] > 1.5 * gaps[0]
