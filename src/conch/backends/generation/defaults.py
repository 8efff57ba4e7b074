"""The sampling parameters of requests that leave them open: what the checkpoint says, or vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from conch.backends.generation.overrides import SamplingOverrides
from conch.sampling.parameters import SamplingParams

#: Tokens after a text where neither the request nor the model says how many.
MAX_TOKENS: Final = 256
#: Temperatures below are zero: engines would divide by them.
GREEDY: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values for requests that do not give them.

    Without ``sample`` decoding is greedy, unless a request asks for something that only sampling has.  ``chosen``
    tells whether the configuration or the checkpoint says ``max_tokens``; where neither does, an answer in a
    conversation, which ends by itself, may take the whole context.
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
        """The values of generation_config.json; a ``max_tokens`` above 0 takes precedence over its own."""

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
        """The values of vLLM's ``SamplingParams``: 16 tokens, sampled, whatever the checkpoint says."""
        return cls(max_tokens=16, sample=True)

    def sampling(self, overrides: SamplingOverrides, remaining: int, *, chat: bool = False) -> SamplingParams:
        """The parameters of a request, completed; ``remaining`` tokens fit after its prompt.

        In a ``chat`` for which nothing is ``chosen`` the answer may take all of it.
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
    """Whether a request without a temperature has a value that only matters when tokens are sampled."""
    return bool(
        overrides.get("top_k", 1) != 1
        or overrides.get("top_p", 1) < 1
        or overrides.get("min_p", 0)
        or overrides.get("n", 1) > 1
    )
