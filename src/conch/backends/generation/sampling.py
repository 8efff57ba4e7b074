"""What a request asks of decoding: the vocabulary between interfaces and engines.

Pure: no library of an engine is imported here.  Names are those of vLLM's ``SamplingParams`` where it has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final


class Feature(StrEnum):
    """What not every engine can do; the value is how a refusal names it."""

    BEAMS = "beam search"
    LOGPROBS = "log-probabilities"
    TOP_LOGPROBS = "log-probabilities of other tokens than the chosen one"
    MIN_P = "min_p"
    SEED = "a random seed"
    REPETITION = "a repetition penalty"
    PENALTIES = "presence and frequency penalties"
    MIN_TOKENS = "a least number of tokens"
    BAD_WORDS = "bad words"
    LOGIT_BIAS = "logit_bias"
    JSON = "structured output by JSON schema"
    REGEX = "structured output by regular expression"
    GRAMMAR = "structured output by grammar"
    CHOICE = "structured output by choice"
    LORA = "LoRA adapters"


#: The feature that a kind of structured output needs; the keys are all kinds there are.
STRUCTURES: Final[Mapping[str, Feature]] = {
    "json": Feature.JSON,
    "regex": Feature.REGEX,
    "grammar": Feature.GRAMMAR,
    "choice": Feature.CHOICE,
}


@dataclass(frozen=True, slots=True)
class Structure:
    """Output that must fit: ``kind`` is a key of ``STRUCTURES``.

    ``text`` is the JSON schema (as JSON), the regular expression, the EBNF grammar, or a JSON list of texts.
    """

    kind: str
    text: str


@dataclass(slots=True)
class Sampling:
    """How the tokens of one sequence are chosen and when it ends.

    ``temperature`` 0 is greedy decoding.  ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and penalties of 1, 0, 0 have no
    effect.  ``stop_token_ids`` end a sequence in addition to the model's end-of-sequence ids, which ``end_id``
    replaces and ``ignore_eos`` switches off.  Stop *strings* are none of an engine's business.  ``bad_words`` are
    token ids, a sequence for each form of a word.  ``logprobs`` is how many alternatives are wanted for each token
    besides the chosen one; None for no log-probabilities at all.  ``beam_width`` above 1 is beam search, and
    ``returned`` then the number of beams that are wanted.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    end_id: int | None = None
    ignore_eos: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    beam_width: int = 1
    returned: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    structure: Structure | None = None
    adapter: str = ""

    def again(self, index: int) -> Sampling:
        """The same for another sample of the same prompt, with a seed of its own."""
        return replace(self, seed=None if self.seed is None else (self.seed + index) % 2**64)

    def needs(self) -> Iterator[Feature]:
        """The features that an engine must have for this."""
        if self.beam_width > 1:
            yield Feature.BEAMS
        if self.logprobs is not None:
            yield Feature.LOGPROBS
            if self.logprobs > 0:
                yield Feature.TOP_LOGPROBS
        if self.min_p > 0:
            yield Feature.MIN_P
        if self.seed is not None and self.temperature > 0:
            yield Feature.SEED
        if self.repetition_penalty != 1:
            yield Feature.REPETITION
        if self.presence_penalty or self.frequency_penalty:
            yield Feature.PENALTIES
        if self.min_tokens > 0:
            yield Feature.MIN_TOKENS
        if self.bad_words:
            yield Feature.BAD_WORDS
        if self.logit_bias:
            yield Feature.LOGIT_BIAS
        if self.structure is not None:
            yield STRUCTURES[self.structure.kind]
        if self.adapter:
            yield Feature.LORA
