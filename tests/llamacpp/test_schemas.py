"""The engine ``llamacpp`` writes valid texts for public JSON schemas, alone and beside other streams."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("llama_cpp") is None:
    pytest.skip("needs llama.cpp: make test-llamacpp", allow_module_level=True)

from tests.llamacpp.models import opened, write
from tests.unit.backends.batching.test_public_schemas import public_schemas
from tests.unit.backends.engines import schema_requests


@pytest.mark.timeout(900)
@pytest.mark.parametrize("streams", [0, 16])
def test_texts_of_public_schemas_are_valid(tmp_path: Path, streams: int) -> None:
    tokenizer = schema_requests.smollm2()
    sizes = {"vocab_size": tokenizer.vocabulary, "max_position_embeddings": 512, "initializer_range": 0.02}
    path = write(tmp_path / "model.gguf", "llama", "F16", **sizes)
    settings = {"tokenizer": tokenizer, "eos_ids": tokenizer.special.eos_ids, "cache_tokens": 16384}
    with opened(path, **settings) as engine:
        outcomes = schema_requests.generate(engine, tokenizer, public_schemas(), streams)
    assert outcomes.faults == []
    assert outcomes.counts["written"] + outcomes.counts["cut"] > 240
    assert outcomes.counts["written"] > 100
    assert outcomes.counts["ended by an error"] < 10
