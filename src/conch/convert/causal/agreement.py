"""Compares a language model's variant with the reference by perplexity, next tokens and continuations, and judges it.

Predictions come from the checkpoint's network or from :class:`ServedGraph`, an exported model as the server runs it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.batching.decoder import Chunk
from conch.backends.generation.engine import EngineSpec
from conch.convert.evidence import Z
from conch.convert.libraries import silence_libraries


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of one network.

    ``logprobs`` are, by text, the natural log-probabilities of all tokens after the first, and ``next_tokens`` the most
    likely tokens at these positions. ``continuations`` are greedy continuations by prompt.
    """

    logprobs: Sequence[Array]
    next_tokens: Sequence[Array]
    continuations: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of the variant (``value``) and of torch in fp32 (``reference``); ``delta`` is the relative difference.

    ``low`` and ``high`` are the 95 % confidence interval of ``delta``, from the variance over single tokens.
    """

    value: float
    reference: float
    delta: float
    low: float
    high: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Greedy:
    """Agreement of continuations without sampling.

    ``prefix`` is the mean share before the first difference, and ``mean_tokens`` the same in tokens, of ``tokens``.
    ``identical`` is the share of prompts with identical continuations.
    """

    prefix: float
    mean_tokens: float
    tokens: int
    identical: float
    prompts: int


@dataclass(frozen=True, slots=True)
class CausalAgreement:
    """Agreement of a variant; ``top_1`` is the share of positions in real text with the same most likely next token."""

    perplexity: Perplexity
    top_1: float
    greedy: Greedy

    def to_json(self) -> dict[str, Mapping[str, Any]]:
        """Return the figures by metric, as stored in ``conch.json``."""
        return {
            "perplexity": asdict(self.perplexity),
            "top_1": {"value": self.top_1},
            "greedy": asdict(self.greedy),
        }


@dataclass(frozen=True, slots=True)
class CausalTolerance:
    """The tolerance of a precision.

    ``delta`` is the maximum relative difference of perplexity, in both directions, because a much lower perplexity is
    an error too. ``top_1`` and ``prefix`` are minimum values.
    """

    delta: float
    top_1: float
    prefix: float


TOLERANCES: Final[Mapping[str, CausalTolerance]] = {
    # The same arithmetic in another order: occasional near-ties, after which a continuation differs.
    "fp32": CausalTolerance(delta=0.001, top_1=0.99, prefix=0.8),
    # Computed in bf16 if the CPU supports it.
    "fp16": CausalTolerance(delta=0.02, top_1=0.97, prefix=0.3),
    "int8": CausalTolerance(delta=0.03, top_1=0.92, prefix=0.3),
    # 16 levels per weight. Small models lose more than large ones; at this tolerance the loss is visible in their
    # responses.
    "int4": CausalTolerance(delta=0.15, top_1=0.75, prefix=0.15),
}


def compare(reference: Predictions, variant: Predictions) -> CausalAgreement:
    """Compare a variant with the reference on the same texts and prompts."""
    before, after = (
        np.concatenate([np.asarray(text, np.float64) for text in predictions.logprobs])
        for predictions in (reference, variant)
    )
    lost = before - after
    mean = float(lost.mean())
    spread = float(lost.std(ddof=1)) if len(lost) > 1 and np.isfinite(mean) else 0.0
    half = Z * spread / float(np.sqrt(len(lost)))
    same = np.concatenate([a == b for a, b in zip(reference.next_tokens, variant.next_tokens, strict=True)])
    with np.errstate(over="ignore"):
        # The exponential of a difference of mean log-probabilities is a ratio of perplexities.
        delta, low, high = (float(np.expm1(value)) for value in (mean, mean - half, mean + half))
        value, expected = (float(np.exp(-logprobs.mean())) for logprobs in (after, before))
    perplexity = Perplexity(value, expected, delta, low, high, len(lost))
    return CausalAgreement(perplexity, float(same.mean()), _greedy(reference.continuations, variant.continuations))


def _greedy(reference: Sequence[Sequence[int]], variant: Sequence[Sequence[int]]) -> Greedy:
    lengths = [len(tokens) for tokens in reference]
    same = [shared_prefix(a, b) for a, b in zip(reference, variant, strict=True)]
    shares = [count / length for count, length in zip(same, lengths, strict=True)]
    identical = float(np.mean([share == 1 for share in shares]))
    return Greedy(float(np.mean(shares)), float(np.mean(same)), max(lengths), identical, len(lengths))


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens before the first difference of two continuations."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def reasons(precision: str, figures: CausalAgreement) -> tuple[str, ...]:
    """Return why a variant is refused, one sentence per missed bound; empty if it passes."""
    tolerance = TOLERANCES.get(precision.partition("-")[0], TOLERANCES["int4"])
    missed = []
    perplexity = figures.perplexity
    if not np.isfinite(perplexity.delta):
        missed.append("its log-probabilities are not finite")
    elif abs(perplexity.delta) > tolerance.delta:
        way = "higher" if perplexity.delta > 0 else "lower"
        missed.append(
            f"perplexity {perplexity.value:.2f} is {abs(perplexity.delta):.2%} {way} than the reference's "
            f"{perplexity.reference:.2f}, more than {tolerance.delta:.2%}"
        )
    if not figures.top_1 >= tolerance.top_1:
        missed.append(
            f"the most likely next token is the same at {figures.top_1:.1%} of positions, below {tolerance.top_1:.0%}"
        )
    if not figures.greedy.prefix >= tolerance.prefix:
        missed.append(
            f"{figures.greedy.prefix:.1%} of the greedy continuations is the same, below {tolerance.prefix:.0%}"
        )
    return tuple(missed)


# A served graph runs on the decoder of the server's engine, created with the same settings.


#: The engine's dtype by precision; for other precisions the engine chooses.
DTYPES: Final[Mapping[str, str]] = {"fp32": "float32"}


def spec_of(
    graph: Path, precision: str, config: Mapping[str, Any], threads: int, *, cache_tokens: int = 0
) -> EngineSpec:
    """Return the server engine's specification of a variant."""
    dtype = DTYPES.get(precision, "auto")
    return EngineSpec(graph.parent, config, (), threads=threads, dtype=dtype, cache_tokens=cache_tokens)


class ServedGraph:
    """An exported graph, which is in its own folder, as the server runs it.

    ``cache_tokens`` is the maximum number of tokens of all concurrent texts.
    """

    def __init__(
        self, graph: Path, precision: str, config: Mapping[str, Any], *, cache_tokens: int, threads: int = 0
    ) -> None:
        from conch.backends.engines.openvino.decoder import OpenVinoDecoder

        # Whole blocks, so that the last tokens have room.
        cache_tokens += OpenVinoDecoder.block_tokens
        with silence_libraries():
            self.decoder = OpenVinoDecoder(spec_of(graph, precision, config, threads, cache_tokens=cache_tokens))

    def logits(self, ids: Array) -> Array:
        """Return FP32 ``[rows, tokens, vocabulary]`` for INT64 ids ``[rows, tokens]``."""
        rows, tokens = ids.shape
        return self._run([(0, row) for row in ids.tolist()], wanted=tokens).reshape(rows, tokens, -1)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the most likely next ``count`` tokens of each prompt, in one batch; no token ends a continuation."""
        tokens, _ = self._continue(prompts, count)
        return tokens

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the time from a prompt to its first token (s)."""
        _, [seconds] = self._continue([prompt], 1)
        return seconds

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> list[float]:
        """Return the time of each of ``count`` decoding steps (s) for prompts of equal length in one batch."""
        _, seconds = self._continue(prompts, count + 1)
        return seconds[1:]

    def _continue(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[list[list[int]], list[float]]:
        """Return the most likely next ``count`` tokens of each prompt, and the time of each step (s)."""
        read, new = [0] * len(prompts), [list(prompt) for prompt in prompts]
        # The blocks of a sequence do not change.
        room = max(len(prompt) + count for prompt in prompts)
        tokens: list[list[int]] = [[] for _ in prompts]
        seconds = []
        for _ in range(count):
            before = time.perf_counter()
            chosen = self._run(list(zip(read, new, strict=True)), room=room).argmax(-1).tolist()
            seconds.append(time.perf_counter() - before)
            read = [start + len(ids) for start, ids in zip(read, new, strict=True)]
            new = [[token] for token in chosen]
            for made, token in zip(tokens, chosen, strict=True):
                made.append(token)
        return tokens, seconds

    def _run(self, sequences: Sequence[tuple[int, list[int]]], *, wanted: int = 1, room: int = 0) -> Array:
        """Return the logits after the last ``wanted`` tokens of each sequence.

        A sequence has a number of tokens that the cache holds, and new tokens; each may have ``room`` tokens in all.
        """
        size = self.decoder.block_tokens
        each = -(-max(room, *(start + len(ids) for start, ids in sequences)) // size)
        chunks = []
        for slot, (start, ids) in enumerate(sequences):
            used = -(-(start + len(ids)) // size)
            chunks.append(Chunk(slot, start, ids, wanted, range(slot * each, slot * each + used)))
        return self.decoder.run(chunks)
