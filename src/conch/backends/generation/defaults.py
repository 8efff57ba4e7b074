"""Defaults of sampling parameters, from the checkpoint or from vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from conch.backends.generation.overrides import SamplingOverrides
from conch.core.sampling.parameters import SamplingParams

#: Default of ``max_tokens`` if neither the request nor the model sets it.
MAX_TOKENS: Final = 256
#: Lower temperatures count as zero, because engines divide by the temperature.
GREEDY: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling parameters for requests that do not set them.

    Without ``sample``, decoding is greedy, unless a request sets a parameter that only matters for sampling.
    ``chosen``: the configuration or the checkpoint sets ``max_tokens``. If it is false, a chat completion may use the
    whole context, because chat models end their completions themselves.
    """

    max_tokens: int = MAX_TOKENS
    chosen: bool = False
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_checkpoint(cls, generation: Mapping[str, Any], max_tokens: int = 0) -> Defaults:
        """Read generation_config.json; a ``max_tokens`` above 0 takes precedence over its ``max_new_tokens``."""

        def number(name: str, default: float) -> float:
            value = generation.get(name)
            return value if isinstance(value, int | float) and not isinstance(value, bool) else default

        chosen = max_tokens or int(number("max_new_tokens", 0))
        return cls(
            max_tokens=chosen or MAX_TOKENS,
            chosen=chosen > 0,
            sample=generation.get("do_sample") is True,
            temperature=float(number("temperature", 1.0)),
            top_k=int(number("top_k", 0)),
            top_p=float(number("top_p", 1.0)),
            min_p=float(number("min_p", 0.0)),
            repetition_penalty=float(number("repetition_penalty", 1.0)),
        )

    @classmethod
    def of_vllm(cls) -> Defaults:
        """Return the defaults of vLLM's ``SamplingParams``: 16 tokens, sampled; independent of the checkpoint."""
        return cls(max_tokens=16, sample=True)

    def sampling(self, overrides: SamplingOverrides, remaining: int, *, chat: bool = False) -> SamplingParams:
        """Complete the sampling parameters of a request; ``remaining`` tokens fit after its prompt.

        The completion of a ``chat`` may use all of them if ``chosen`` is false.
        """
        limit = remaining if chat and not self.chosen else min(self.max_tokens, remaining)
        sampling = SamplingParams(
            **{"max_tokens": max(limit, 1), "repetition_penalty": self.repetition_penalty, **overrides.values}
        )
        beams = sampling.beam_width > 1
        if overrides.get("temperature") is None:
            sampled = not beams and (self.sample or _asks_to_sample(overrides))
            sampling.temperature = self.temperature if sampled else 0.0
        if sampling.temperature < GREEDY:
            sampling.make_greedy()
        elif self.sample:
            for name in ("top_k", "top_p", "min_p"):
                if name not in overrides.values:
                    setattr(sampling, name, getattr(self, name))
        return sampling


def _asks_to_sample(overrides: SamplingOverrides) -> bool:
    """Whether a request without a temperature sets a parameter that only matters for sampling."""
    return bool(
        overrides.get("top_k", 1) != 1
        or overrides.get("top_p", 1) < 1
        or overrides.get("min_p", 0)
        or overrides.get("n", 1) > 1
    )
