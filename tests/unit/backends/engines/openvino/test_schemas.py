"""The engine ``openvino`` writes valid texts for public JSON schemas, alone and beside other streams."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("openvino_genai")
pytest.importorskip("torch")
pytest.importorskip("llguidance")

import torch
import transformers

from tests.unit.backends.batching.test_public_schemas import public_schemas
from tests.unit.backends.engines import schema_requests
from tests.unit.backends.engines.openvino.models import SIZES, export, opened


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("streams", [0, 16])
def test_texts_of_public_schemas_are_valid(tmp_path: Path, streams: int) -> None:
    tokenizer = schema_requests.smollm2()
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": tokenizer.vocabulary, "initializer_range": 0.02}
    export(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval(), tmp_path)
    engine = opened(tmp_path, config=sizes, eos_ids=tokenizer.special.eos_ids, cache_tokens=16384, tokenizer=tokenizer)
    outcomes = schema_requests.generate(engine, tokenizer, public_schemas(), streams)
    assert outcomes.faults == []
    assert outcomes.counts["written"] + outcomes.counts["cut"] > 240
    assert outcomes.counts["written"] > 100
    assert outcomes.counts["ended by an error"] < 10
