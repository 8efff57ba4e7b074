"""Compares greedy output of encoder-decoder models: from conch's task, and from ``generate`` of transformers.

Like ``causal.py``: conch runs the same six prompts one after the other and all at once, transformers runs each alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.day_zero.causal import PROMPTS, TIE, TOKENS
from benchmarks.day_zero.greedy import generated
from benchmarks.day_zero.outcome import Outcome
from conch.backends.base.arrays import Request
from conch.backends.base.verification import greedy_difference
from conch.backends.tasks.text2text import Text2Text
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.task import task_of
from conch.core.errors import ConchError, one_line
from conch.core.tensors import WireTensor, pack_bytes

_WRITES: Final = ("text2text-generation", "translation", "summarization")


def compare_seq2seq(folder: Path) -> Outcome:
    """Compare the checkpoint in ``folder``."""
    config = json.loads((folder / "config.json").read_text())
    if task_of(config) not in _WRITES:
        return Outcome("none", f"{config['architectures'][0]} reads more than text")
    try:
        expected = generated(folder, "AutoModelForSeq2SeqLM", PROMPTS, TOKENS)
    except Exception as error:
        return Outcome("none", f"transformers: {type(error).__name__}: {one_line(error)[:200]}")
    try:
        checkpoint = Checkpoint.open(folder, Options(threads=1))
        served = Text2Text(checkpoint, _no_engine)
    except ConchError as error:
        return Outcome("refused", error.message)
    try:
        alone = [_answers(served, [text])[0] for text in PROMPTS]
        together = _answers(served, PROMPTS)
    except Exception as error:
        return Outcome("fails", f"{type(error).__name__}: {one_line(error)[:200]}")
    for way, completions in (("alone", alone), ("together", together)):
        for text, (ids, tokens), (prompt, begin, expected_tokens, logits) in zip(
            PROMPTS, completions, expected, strict=True
        ):
            if ids != prompt:
                return Outcome("differs", f"'{text}' is {ids[:8]} and not {prompt[:8]} to the tokenizer")
            if reason := greedy_difference(tokens[begin:], expected_tokens, logits, TIE):
                return Outcome("differs", f"{way}, {len(ids)} tokens: {reason}")
    return Outcome("exact")


def _answers(served: Text2Text, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Return the token IDs of each of ``texts``, which run at once, and of its output."""
    prepared = [served.prepare(_request(text)) for text in texts]
    ids = [request.ids[0] for request in prepared]
    completions: list[tuple[list[int], list[int]]] = [([], [])] * len(texts)
    for run in served.runs([len(text) for text in ids]):
        written = served.write([ids[index] for index in run], prepared[0].generation)
        for index, tokens in zip(run, written, strict=True):
            completions[index] = ids[index], tokens
    return completions


def _request(text: str) -> Request:
    inputs = {
        "text_input": WireTensor("text_input", "BYTES", (1, 1), pack_bytes([text.encode()])),
        "max_new_tokens": WireTensor("max_new_tokens", "INT32", (1, 1), np.array([TOKENS], np.int32).tobytes()),
        "num_beams": WireTensor("num_beams", "INT32", (1, 1), np.array([1], np.int32).tobytes()),
        "do_sample": WireTensor("do_sample", "BOOL", (1, 1), b"\0"),
    }
    return Request(inputs, frozenset(("text_output",)))


def _no_engine(head: str, part: Checkpoint | None = None, **settings: Any) -> Any:
    raise AssertionError(f"{head} is loaded by the task")
