"""Compares greedy tokens of language models: from conch's I/O format and engine, and from ``generate`` of transformers.

The worker's code for a bare folder completes six prompts of different lengths, one after the other and all at once;
transformers completes each alone, in the same precision. Random weights have ties: if the tokens differ, the logits of
transformers decide whether conch's token was as good.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.day_zero.greedy import generated
from benchmarks.day_zero.outcome import Outcome
from conch.backends.base.arrays import Request, Strings
from conch.backends.base.verification import greedy_difference
from conch.backends.generation.engine import EngineRequest
from conch.backends.generation.generation_backend import choose_engine, open_engine
from conch.backends.generation.options import ServingOptions, engine_spec
from conch.backends.generation.sampling import Defaults, Limits
from conch.backends.io_formats.text import TextInterface
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.task import task_of
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.core.errors import ConchError, one_line
from conch.core.sampling import TEXT_GENERATION
from conch.core.tensors import WireTensor, pack_bytes

PROMPTS: Final = (
    "Where is the nearest library?",
    "Hello!",
    "I am going to the market in the morning. How can you be sure that",
    "A program takes a list",
    "Anna Smith works at the library in Berlin,",
    "The station",
)
TOKENS: Final = 10
#: Tokens are equally good if their logits differ by less than this fraction of the largest one.
TIE: Final = 1e-3
_CPU: Final = {"kind": "CPU", "device_id": 0, "count": 1}


class ServedModel:
    """A language model as in a worker: I/O format, tokenizer and engine. Raises ConchError if it is refused."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        settings = ServingOptions.from_checkpoint(checkpoint)
        tokenizer = open_tokenizer(checkpoint)
        spec = engine_spec(checkpoint, _CPU, tokenizer)
        self._engine = open_engine(choose_engine(checkpoint, on_gpu=False), spec)
        defaults = Defaults.of_checkpoint(checkpoint.json("generation_config.json") or {}, settings.max_tokens)
        self._contract = TextInterface(tokenizer, defaults, Limits(self._engine), decoupled=True)
        self._ids = count(1)

    def answers(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Return the prompt and the completion for each text, in tokens; all texts are completed at once."""
        builders = [self._contract.response_builder(_request(text)) for text in texts]
        running = {}
        for builder in builders:
            ((prompt, sampling),) = builder.prompts
            id = next(self._ids)
            self._engine.add(EngineRequest(id, prompt, sampling))
            running[id] = builder
        while running:
            for step in self._engine.step():
                if step.error is not None:
                    raise step.error
                if running[step.id].add(0, step):
                    del running[step.id]
        completions = []
        for builder in builders:
            (result,) = builder.responses(final=True)
            tokens = result.outputs["token_ids"]
            assert not isinstance(tokens, Strings)
            completions.append((builder.prompts[0][0], tokens.tolist()))
        return completions

    def close(self) -> None:
        self._engine.close()


def compare_causal(folder: Path) -> Outcome:
    """Compare the checkpoint in ``folder``."""
    config = json.loads((folder / "config.json").read_text())
    if task_of(config) != TEXT_GENERATION:
        return Outcome("none", f"{config['architectures'][0]} reads more than text")
    try:
        expected_texts = generated(folder, "AutoModelForCausalLM", PROMPTS, TOKENS)
    except Exception as error:
        return Outcome("none", f"transformers: {type(error).__name__}: {one_line(error)[:200]}")
    try:
        checkpoint = Checkpoint.open(folder, Options(threads=1))
        served = ServedModel(checkpoint)
    except ConchError as error:
        return Outcome("refused", error.message)
    try:
        alone = [served.answers([text])[0] for text in PROMPTS]
        together = served.answers(PROMPTS)
    except Exception as error:
        return Outcome("fails", f"{type(error).__name__}: {one_line(error)[:200]}")
    finally:
        served.close()
    for way, completions in (("alone", alone), ("together", together)):
        for text, (prompt, tokens), (ids, _, expected, logits) in zip(
            PROMPTS, completions, expected_texts, strict=True
        ):
            if prompt != ids:
                return Outcome("differs", f"'{text}' is {prompt[:8]} and not {ids[:8]} to the tokenizer")
            if len(tokens) != len(expected):
                return Outcome(
                    "differs", f"{way}, {len(prompt)} tokens: an answer of {len(tokens)}, not {len(expected)}"
                )
            if reason := greedy_difference(tokens, expected, logits, TIE):
                return Outcome("differs", f"{way}, {len(prompt)} tokens: {reason}")
    return Outcome("exact")


def _request(text: str) -> Request:
    inputs = {
        "text_input": WireTensor("text_input", "BYTES", (1,), pack_bytes([text.encode()])),
        "max_tokens": WireTensor("max_tokens", "INT32", (1,), np.array([TOKENS], np.int32).tobytes()),
        "return_token_ids": WireTensor("return_token_ids", "BOOL", (1,), b"\1"),
    }
    return Request(inputs, frozenset(("text_output", "token_ids")), batched=False)
