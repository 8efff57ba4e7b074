"""Beam search over the rows of a request, with the algorithm of ``transformers.generate(num_beams=…)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from conch.backends.engines.transformers.sampling import adjust
from conch.core.sampling.parameters import SamplingParams

Tensor = Any

#: The score of beams that must not be chosen; finite, so that their order is preserved.
_NEVER: Final = -1e9


@dataclass(slots=True)
class Beam:
    """A hypothesis: its tokens after the prompt, their total log-probability, and whether an end token stopped it."""

    tokens: list[int]
    total: float
    stopped: bool = False
    #: ``total`` with the length penalty, for a finished beam.
    score: float = _NEVER


@dataclass(slots=True)
class _History:
    sampling: SamplingParams
    tokens: list[int]
    prompt_length: int
    end_ids: frozenset[int]


class BeamSearch:
    """The state of a beam search; ``max_tokens`` limits the length of beams and ``end_ids`` end a beam."""

    def __init__(self, prompt: list[int], sampling: SamplingParams, end_ids: frozenset[int], max_tokens: int) -> None:
        self._prompt, self._sampling, self._end_ids, self._max_tokens = prompt, sampling, end_ids, max_tokens
        self.width = sampling.beam_width
        # All beams are equal at first, so the first step continues only one of them.
        self.running = [Beam([], 0.0 if index == 0 else _NEVER) for index in range(self.width)]
        self._finished: list[Beam] = []
        self.done = False

    @property
    def length(self) -> int:
        """The number of tokens in each running beam."""
        return len(self.running[0].tokens)

    def advance(self, logits: Tensor) -> list[int]:
        """Advance by the logits ``[width, vocabulary]`` of the running beams.

        Returns the index of the beam that each new beam continues; empty if the search ended.
        """
        values = logits.log_softmax(dim=-1)
        adjust(
            values,
            [
                _History(self._sampling, [*self._prompt, *beam.tokens], len(self._prompt), self._end_ids)
                for beam in self.running
            ],
        )
        totals = values + torch.tensor([beam.total for beam in self.running], device=values.device)[:, None]
        kept = min(max(2, 1 + len(self._end_ids)) * self.width, totals.numel())
        best, indices = (tensor.tolist() for tensor in totals.flatten().topk(kept))
        vocabulary = values.shape[1]
        candidates: list[tuple[Beam, int]] = []
        for total, index in zip(best, indices, strict=True):
            parent, token = divmod(index, vocabulary)
            tokens = [*self.running[parent].tokens, token]
            candidates.append((Beam(tokens, total, stopped=token in self._end_ids), parent))
        last = self.length + 1 >= self._max_tokens
        ended = [beam.stopped or last for beam, _ in candidates]
        self._finish([beam for (beam, _), end in zip(candidates[: self.width], ended, strict=False) if end])
        going = [candidate for candidate, end in zip(candidates, ended, strict=True) if not end][: self.width]
        if len(going) < self.width:
            self.done = True
            return []
        self.running = [beam for beam, _ in going]
        self.done = not self._improvable()
        return [parent for _, parent in going]

    def results(self) -> list[Beam]:
        """Return the ``n`` best beams; valid when ``done``."""
        return self._finished[: self._sampling.n]

    def _finish(self, ended: list[Beam]) -> None:
        if len(self._finished) == self.width and self._sampling.early_stopping:
            return
        for beam in ended:
            beam.score = beam.total / len(beam.tokens) ** self._sampling.length_penalty
        self._finished = sorted([*self._finished, *ended], key=lambda beam: -beam.score)[: self.width]

    def _improvable(self) -> bool:
        if len(self._finished) < self.width:
            return True
        if self._sampling.early_stopping:
            return False
        possible: float = self.running[0].total / self.length**self._sampling.length_penalty
        return possible > self._finished[-1].score
