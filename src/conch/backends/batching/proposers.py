"""Speculative decoding: proposers guess the next tokens of sequences, and a step of the batcher checks several at once.

The batcher chooses a token at each position as without proposals, and a proposed token is accepted if it is the chosen
one. The tokens of a request are therefore distributed as without proposals, and greedy tokens and those of a seed are
the same, except for the rounding of a network that reads several tokens at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from conch.backends.batching.decoder import Chunk, Decoder
from conch.backends.batching.sequence_cache import SequenceCache
from conch.backends.generation.engine import EngineSpec
from conch.core.errors import invalid

#: The default number of tokens that are proposed at a time.
PROPOSED: Final = 5
#: The maximum length of the end of a text that ``PromptLookup`` searches for, in tokens; the minimum is 2.
_LONGEST: Final = 4
#: The number of prompt tokens that a draft model reads in a step, in addition to the last tokens of all sequences.
_READ: Final = 128
#: The maximum number of steps without proposals after tokens were refused.
_PAUSE: Final = 15


@dataclass(slots=True)
class Lookahead:
    """The number of tokens to propose for a sequence, up to ``limit``; depends on the number of accepted ones."""

    limit: int
    length: int = 1
    _pause: int = 0
    _rest: int = 0

    def next(self) -> int:
        """Return the number of tokens to propose in this step."""
        if self._rest:
            self._rest -= 1
            return 0
        return min(self.length, self.limit)

    def learn(self, proposed: int, accepted: int) -> None:
        """Continue with one token more than were accepted, twice as many if all were; pause if none was."""
        if accepted == proposed:
            self.length = max(self.length, min(2 * proposed, self.limit))
        else:
            self.length = accepted + 1
        self._pause = self._rest = 0 if accepted else min(2 * self._pause + 1, _PAUSE)


class Proposer(ABC):
    """Guesses the next tokens of sequences."""

    @abstractmethod
    def propose(self, wanted: Sequence[tuple[int, Sequence[int], int]]) -> list[Sequence[int]]:
        """Return at most ``count`` next tokens for each ``(id, tokens, count)``, possibly none.

        ``tokens`` is a sequence with its prompt. Between two calls with the same id, tokens are only appended to it.
        """

    @abstractmethod
    def forget(self, id: int) -> None:
        """Free the state of a sequence; unknown ids have no effect."""

    def close(self) -> None:  # noqa: B027 (most proposers hold nothing but memory)
        """Free all resources."""


class PromptLookup(Proposer):
    """Proposes the tokens that followed the last tokens of a sequence at their previous occurrence in it.

    Searches the whole sequence at each call. An index would take far more memory than the tokens, and reading a long
    prompt into it would delay the other sequences.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, array[int]] = {}

    def propose(self, wanted: Sequence[tuple[int, Sequence[int], int]]) -> list[Sequence[int]]:
        return [self._continuation(id, tokens, count) for id, tokens, count in wanted]

    def forget(self, id: int) -> None:
        self._sequences.pop(id, None)

    def _continuation(self, id: int, tokens: Sequence[int], count: int) -> Sequence[int]:
        sequence = self._sequences.setdefault(id, array("i"))
        sequence.extend(tokens[len(sequence) :])
        known = np.frombuffer(sequence, np.intc)
        # The earlier positions of the last token, then those that also have the tokens before it.
        matches = np.flatnonzero(known[:-1] == known[-1])
        start = 0  # of the proposed tokens
        for size in range(2, min(_LONGEST, len(known)) + 1):
            matches = matches[matches >= size - 1]
            matches = matches[known[matches - size + 1] == known[-size]]
            if not len(matches):
                break
            start = int(matches[-1]) + 1
        # An occurrence that overlaps the end repeats itself.
        period = len(tokens) - start
        return [tokens[start + index % period] for index in range(count)] if start else ()


@dataclass(slots=True)
class _DraftSequence:
    """A sequence in the cache of a draft model: its slot, and the tokens in it."""

    slot: int
    tokens: list[int] = field(default_factory=list)


class DraftModel(Proposer):
    """Proposes the greedy tokens of a smaller network; ``vocabulary`` is the number of tokens of the larger one."""

    def __init__(self, decoder: Decoder, vocabulary: int) -> None:
        self._decoder, self._vocabulary = decoder, vocabulary
        self._cache = SequenceCache(decoder, decoder.block_tokens, retains=False)
        self._sequences: dict[int, _DraftSequence] = {}

    def propose(self, wanted: Sequence[tuple[int, Sequence[int], int]]) -> list[Sequence[int]]:
        proposals: list[list[int]] = [[] for _ in wanted]
        left = min(_READ + len(wanted), self._decoder.batched_tokens)
        reading: list[tuple[int, _DraftSequence, list[int], bool]] = []
        for index, (id, tokens, _) in enumerate(wanted):
            sequence = self._rewound(id, tokens)
            if sequence is None or left <= 0:
                continue
            read = len(sequence.tokens)
            chunk = list(tokens[read : read + left])
            left -= len(chunk)
            reading.append((index, sequence, chunk, read + len(chunk) == len(tokens)))
        while reading:
            chunks, going = [], []
            for index, sequence, tokens, wants in reading:
                end = len(sequence.tokens) + len(tokens)
                if end <= self._decoder.context and self._cache.grow(sequence.slot, end):
                    blocks = self._cache.blocks(sequence.slot)[: self._cache.blocks_for(end)]
                    chunks.append(Chunk(sequence.slot, len(sequence.tokens), tokens, int(wants), blocks))
                    going.append((index, sequence, tokens, wants))
            if not chunks:
                break
            best = iter(self._decoder.run(chunks).argmax(axis=1).tolist())
            reading = []
            for index, sequence, tokens, wants in going:
                sequence.tokens += tokens
                token = next(best) if wants else self._vocabulary
                if token < self._vocabulary:
                    proposals[index].append(token)
                    if len(proposals[index]) < wanted[index][2]:
                        reading.append((index, sequence, [token], True))
        return list(proposals)

    def forget(self, id: int) -> None:
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self._cache.free(sequence.slot)

    def close(self) -> None:
        for id in list(self._sequences):
            self.forget(id)
        self._decoder.close()

    def _rewound(self, id: int, tokens: Sequence[int]) -> _DraftSequence | None:
        """Return a sequence without tokens that were refused; None if the cache has no room for it."""
        sequence = self._sequences.get(id)
        if sequence is None:
            started = self._cache.start("", [], 0, 1)
            if started is None:
                return None
            sequence = self._sequences[id] = _DraftSequence(started[0])
        # At least the last token is read, for the logits after it.
        kept = min(len(sequence.tokens), len(tokens) - 1)
        first = max(kept - _MAX_PROPOSED, 0)
        while first < kept and sequence.tokens[first] == tokens[first]:
            first += 1
        if first < len(sequence.tokens):
            self._cache.shorten(sequence.slot, first)
            del sequence.tokens[first:]
        return sequence


#: The maximum number of tokens that may be proposed at a time.
_MAX_PROPOSED: Final = 32


def lookahead_limit(spec: EngineSpec) -> int:
    """Return the number of tokens to propose in a step. Raises INVALID_ARG for too many."""
    if spec.draft_tokens > _MAX_PROPOSED:
        raise invalid(f"parameter 'num_speculative_tokens' is {spec.draft_tokens}; it must be at most {_MAX_PROPOSED}")
    return spec.draft_tokens or PROPOSED
