"""Compares a language model's variant with the reference by perplexity, next tokens and continuations, and judges it.

Predictions come from the checkpoint's network or from :class:`ServedGraph`, an exported model as the server runs it:
OpenVINO GenAI's pipeline with a paged KV cache.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.generation.engine import EngineSpec
from conch.convert.evidence import Z
from conch.convert.libraries import silence_libraries
from conch.core.sampling.parameters import SamplingParams


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of one network.

    ``logprobs`` are, by text, the natural log-probabilities of all tokens after the first, and ``next_tokens`` the most
    likely tokens at these positions.  ``continuations`` are greedy continuations by prompt.
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
    an error too.  ``top_1`` and ``prefix`` are minimum values.
    """

    delta: float
    top_1: float
    prefix: float


TOLERANCES: Final[Mapping[str, CausalTolerance]] = {
    # The same arithmetic in another order: occasional near-ties, after which a continuation differs.  The pipeline's
    # own log-probabilities differ by 0.014 % for SmolLM2, although its graph matches torch's to 1e-8.
    "fp32": CausalTolerance(delta=0.001, top_1=0.99, prefix=0.8),
    # Computed in bf16 if the CPU supports it.
    "fp16": CausalTolerance(delta=0.02, top_1=0.97, prefix=0.3),
    "int8": CausalTolerance(delta=0.03, top_1=0.92, prefix=0.3),
    # 16 levels per weight.  Small models lose more than large ones; at this tolerance the loss is visible in their
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
            f"the likeliest next token being the same in {figures.top_1:.1%} of places is below {tolerance.top_1:.0%}"
        )
    if not figures.greedy.prefix >= tolerance.prefix:
        missed.append(
            f"{figures.greedy.prefix:.1%} of the greedy continuations being the same is below {tolerance.prefix:.0%}"
        )
    return tuple(missed)


# The pipeline of a served graph is that of the server's engine, created with the same settings.


#: The engine's dtype by precision; for other precisions the engine chooses.
DTYPES: Final[Mapping[str, str]] = {"fp32": "float32"}


def spec_of(graph: Path, precision: str, config: Mapping[str, Any], threads: int) -> EngineSpec:
    """Return the server engine's specification of a variant, without the size of its cache."""
    dtype = DTYPES.get(precision, "auto")
    return EngineSpec(graph.parent, config, (), threads=threads, dtype=dtype, prefix_caching=False)


class ServedGraph:
    """The pipeline of one exported graph, which is in its own folder.

    ``max_text_tokens`` is the maximum length of a text; ``cache_tokens`` is the maximum number of tokens of all
    concurrent texts.
    """

    def __init__(
        self,
        graph: Path,
        precision: str,
        config: Mapping[str, Any],
        *,
        max_text_tokens: int,
        cache_tokens: int,
        threads: int = 0,
    ) -> None:
        import openvino_genai

        from conch.backends.engines.openvino import pipelines
        from conch.backends.engines.openvino.pipelines import BLOCK, Precision

        spec = spec_of(graph, precision, config, threads)
        with silence_libraries(), tempfile.TemporaryDirectory() as empty:
            precision_of_cpu = Precision.of(spec, pipelines.capabilities())
            # Inputs and outputs are token ids, so no tokenizer is needed.
            no_tokenizer: Any = openvino_genai.Tokenizer(empty)
            self.pipeline = pipelines.pipeline(
                spec, no_tokenizer, precision_of_cpu, cache_tokens // BLOCK + 64, max(256, max_text_tokens)
            )
        self.number = 0

    def logprobs(self, ids: Sequence[int]) -> Array:
        """Return the natural log-probability of each token after the first."""
        handle = self._add(ids, 1, echo=True)
        self._run()
        [response] = handle.read_all()
        # The first token has no predecessor, and the last is the generated one.
        return np.array(response.generated_log_probs[1 : len(ids)], np.float64)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the most likely next ``count`` tokens of each prompt, in one batch; no token ends a continuation."""
        handles = [self._add(prompt, count) for prompt in prompts]
        self._run()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the time from a prompt to its first token (s)."""
        handle = self._add(prompt, 1)
        before = time.perf_counter()
        self._run()
        seconds = time.perf_counter() - before
        handle.read_all()
        return seconds

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> list[float]:
        """Return the time of each of ``count`` decoding steps (s) for prompts of equal length in one batch."""
        handles = [self._add(prompt, count + 1) for prompt in prompts]
        self.pipeline.step()
        seconds = []
        while self.pipeline.has_non_finished_requests():
            before = time.perf_counter()
            self.pipeline.step()
            seconds.append(time.perf_counter() - before)
        for handle in handles:
            handle.read_all()
        return seconds

    def _add(self, ids: Sequence[int], count: int, *, echo: bool = False) -> Any:
        import openvino

        from conch.backends.engines.openvino.generation_config import generation_config

        logprobs = 0 if echo else None
        config = generation_config(
            SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=logprobs), eos_ids=()
        )
        config.echo = echo
        self.number += 1
        return self.pipeline.add_request(self.number, openvino.Tensor(np.array([ids], np.int64)), config)

    def _run(self) -> None:
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
