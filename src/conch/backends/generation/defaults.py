"""What generation does where a request says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from conch.backends.generation.parameters import RequestedSampling
from conch.backends.generation.sampling import Sampling

_T = TypeVar("_T")

#: Tokens after a text where neither the request nor the model says how many.
MAX_TOKENS: Final = 256
#: Temperatures below are zero: engines would divide by them.
GREEDY: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values for requests that do not give them.

    Without ``sample`` decoding is greedy, unless a request asks for something that only sampling has.  An answer in a
    conversation ends by itself: where nothing is ``chosen`` it gets the whole context.
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
        """Those of generation_config.json; ``max_tokens`` goes before what it says."""

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
        """Those of vLLM's ``SamplingParams``: 16 tokens, sampled, whatever the checkpoint says."""
        return cls(max_tokens=16, sample=True)

    def sampling(self, asked: RequestedSampling, room: int, *, chat: bool = False) -> Sampling:
        """What a request gets, with ``room`` tokens after its prompt, which may be a conversation."""
        most = room if chat and not self.chosen else min(self.max_tokens, room)
        beams = asked.beam_width or 1
        sampled = (self.sample and beams == 1) or self._asks_to_sample(asked)
        temperature = asked.temperature if asked.temperature is not None else self.temperature if sampled else 0.0
        if temperature < GREEDY:
            temperature = 0.0
        sampled = temperature > 0
        return Sampling(
            max_tokens=asked.max_tokens if asked.max_tokens is not None else max(most, 1),
            min_tokens=asked.min_tokens or 0,
            temperature=temperature,
            top_k=_either(asked.top_k, self.top_k if self.sample else 0) if sampled else 0,
            top_p=_either(asked.top_p, self.top_p if self.sample else 1.0) if sampled else 1.0,
            min_p=_either(asked.min_p, self.min_p if self.sample else 0.0) if sampled else 0.0,
            repetition_penalty=_either(asked.repetition_penalty, self.repetition_penalty),
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            seed=asked.seed if sampled else None,
            stop_token_ids=asked.stop_token_ids or (),
            end_id=asked.end_id,
            ignore_eos=bool(asked.ignore_eos),
            logit_bias=asked.logit_bias or {},
            logprobs=asked.logprobs,
            beam_width=beams,
            returned=(asked.n or 1) if beams > 1 else 1,
            length_penalty=_either(asked.length_penalty, 1.0),
            early_stopping=bool(asked.early_stopping),
            structure=asked.structure,
            adapter=asked.lora_name or "",
        )

    @staticmethod
    def _asks_to_sample(asked: RequestedSampling) -> bool:
        """Whether a value says something about sampling other than that the likeliest token is wanted."""
        if (asked.beam_width or 1) > 1:
            return False
        return bool(
            (asked.top_k is not None and asked.top_k != 1)
            or (asked.top_p is not None and asked.top_p < 1)
            or asked.min_p
            or (asked.n or 1) > 1
        )


def _either(value: _T | None, default: _T) -> _T:
    return default if value is None else value
