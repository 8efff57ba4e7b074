"""JSON schemas as requests of an engine, alone and beside other streams: every text is valid, cut or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from benchmarks.generation import weights
from conch.backends.batching.grammars import CompiledStructure
from conch.backends.generation.engine import EngineRequest, GenerationEngine
from conch.checkpoints.gguf import read_gguf
from conch.checkpoints.tokenizers.open import open_gguf
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import SamplingParams
from conch.core.sampling.structures import Structure, structure_of
from tests.unit.backends.batching import schemas

#: A network with random weights chooses among all tokens alike; these end texts, arrays and objects.
_ENDS: Final = ('"', '"}', '",', "}", "]", ",", '":')
_BIAS: Final = 8.0
_TOKENS: Final = 100
#: Structured requests that run at a time.
_WIDTH: Final = 8


@dataclass
class Outcomes:
    """How many requests ended in which way, and the invalid texts."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def generate(
    engine: GenerationEngine, tokenizer: TextTokenizer, documents: Mapping[str, Any], streams: int
) -> Outcomes:
    """Request a text for each schema, ``_WIDTH`` at a time beside ``streams`` other requests."""
    outcomes = Outcomes()
    prompt = tokenizer.encode("A document:")
    biases = {tokens[0]: _BIAS for text in _ENDS if len(tokens := tokenizer.encode(text, special_tokens=False)) == 1}
    compiled: dict[str, tuple[Structure, CompiledStructure]] = {}
    for name, schema in documents.items():
        try:
            structure = structure_of("json", schema, "response_format")
            compiled[name] = structure, engine.compile(structure)
        except ConchError as error:
            assert error.code is Code.INVALID_ARG, error
            outcomes.counts["refused"] += 1
    ids, waiting = count(), list(compiled)
    running: dict[int, tuple[str, list[int]]] = {}
    beside: set[int] = set()
    while waiting or running:
        while len(beside) < streams:
            beside.add(id := next(ids))
            engine.add(EngineRequest(id, prompt, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)))
        while waiting and len(running) < _WIDTH:
            name = waiting.pop()
            running[id := next(ids)] = name, []
            structure, matcher = compiled[name]
            sampling = SamplingParams(
                max_tokens=_TOKENS, temperature=1.0, seed=id, logit_bias=biases, structured_outputs=structure
            )
            engine.add(EngineRequest(id, prompt, sampling, compiled=matcher))
        for step in engine.step():
            if step.id in beside:
                assert step.error is None
                beside -= {step.id} if step.finish else set()
                continue
            name, tokens = running[step.id]
            tokens += step.tokens
            if step.error is not None:
                # The name of a feature that a text cannot continue with; never a limit of time.
                assert "too complex" in step.error.message or "no unique item" in step.error.message, step.error
                outcomes.counts["ended by an error"] += 1
                del running[step.id]
            elif step.finish:
                outcomes.counts["cut" if step.finish == "length" else "written"] += 1
                del running[step.id]
                if step.finish == "stop":
                    text = b"".join(compiled[name][1].tokens[token] for token in tokens[:-1])
                    if problem := schemas.fault(schemas.judge(documents[name]), text):
                        outcomes.faults.append(f"{name}: {problem}")
    for id in beside:
        engine.cancel(id)
    return outcomes


def smollm2() -> TextTokenizer:
    """Return the tokenizer of SmolLM2."""
    return open_gguf(read_gguf(weights.gguf()))
