"""Chooses tokens from logits for all rows of a batch at once, with vLLM's semantics, or with beam search.

The order is: structure, ``logit_bias``, bad words, ``min_tokens``, penalties; then temperature, ``min_p``, ``top_k``,
``top_p``. Log-probabilities are computed from the raw logits. The algorithm of beam search is that of
``transformers.generate(num_beams=…)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from conch.backends.generation.engine import TokenLogprobs
from conch.core.sampling.parameters import SamplingParams

Tensor = Any

#: The largest ``top_k`` whose candidates are found without sorting the vocabulary.
_NARROW: Final = 1024


class History(Protocol):
    """The data of a row that ``adjust`` reads."""

    sampling: SamplingParams
    #: The prompt and the generated tokens, and the length of the prompt in tokens.
    tokens: list[int]
    prompt_length: int
    #: Ids that end the row.
    end_ids: frozenset[int]


class Drawn(History, Protocol):
    """The data of a row that ``choose`` reads, with the row's random number generator (None: the shared one)."""

    generator: Any


def generator(seed: int | None, device: Any) -> Any:
    """Return a random number generator for a seed; None without a seed, which selects the shared generator."""
    if seed is None:
        return None
    # PyTorch's seeds are unsigned 64-bit integers.
    return torch.Generator(device=device).manual_seed(seed & 0xFFFF_FFFF_FFFF_FFFF)


def adjust(logits: Tensor, rows: Sequence[History]) -> None:
    """Apply biases, bans, ``min_tokens`` and penalties to ``logits`` ``[rows, vocabulary]`` in place."""
    for index, row in enumerate(rows):
        sampling, scores = row.sampling, logits[index]
        if sampling.logit_bias:
            biased = [token for token in sampling.logit_bias if 0 <= token < scores.shape[0]]
            scores[biased] += scores.new_tensor([sampling.logit_bias[token] for token in biased])
        generated = row.tokens[row.prompt_length :]
        if words := sampling.bad_words_token_ids:
            end = tuple(generated[-max(map(len, words)) :])
            banned = [word[-1] for word in words if word[:-1] == end[len(end) - len(word) + 1 :]]
            scores[[token for token in banned if token < scores.shape[0]]] = -torch.inf
        if row.end_ids and len(generated) < sampling.min_tokens:
            longer = scores.clone()
            longer[list(row.end_ids)] = -torch.inf
            # A structure may be complete before ``min_tokens``; then only an end token is allowed.
            if not bool(longer.isneginf().all()):
                scores.copy_(longer)
        if (penalty := sampling.repetition_penalty) != 1:
            seen = torch.tensor(sorted(set(row.tokens)), device=logits.device)
            values = scores[seen]
            scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if generated and (sampling.presence_penalty or sampling.frequency_penalty):
            tokens, counts = torch.tensor(generated, device=logits.device).unique(return_counts=True)
            scores[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def choose(logits: Tensor, rows: Sequence[Drawn]) -> list[int]:
    """Choose a token for each row of adjusted ``logits`` ``[rows, vocabulary]``."""
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    random = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    narrow = [index for index in random if 0 < rows[index].sampling.top_k <= _NARROW]
    wide = [index for index in random if not 0 < rows[index].sampling.top_k <= _NARROW]
    sized = [index for index in wide if rows[index].sampling.top_k > 0 or rows[index].sampling.top_p < 1]
    plain = [index for index in wide if rows[index].sampling.top_k <= 0 and rows[index].sampling.top_p >= 1]
    for indices in (narrow, sized, plain):
        if indices:
            drawn = _draw(logits[indices], [rows[index] for index in indices], ordered=indices is not plain)
            for index, token in zip(indices, drawn, strict=True):
                chosen[index] = token
    return chosen


def _draw(logits: Tensor, rows: Sequence[Drawn], *, ordered: bool) -> list[int]:
    vocabulary = logits.shape[1]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=torch.float32)[:, None]

    logits = logits / column([max(row.sampling.temperature, 1e-5) for row in rows])
    # min_p is relative to the probability of the best token, so differences of logits suffice.
    if any(row.sampling.min_p > 0 for row in rows):
        threshold = column([row.sampling.min_p for row in rows]).log()
        logits = logits.masked_fill(logits - logits.amax(dim=-1, keepdim=True) < threshold, -torch.inf)
    ids = None
    sizes = [min(row.sampling.top_k, vocabulary) if row.sampling.top_k > 0 else vocabulary for row in rows]
    if ordered:
        logits, ids = logits.topk(max(sizes), dim=-1)
        ranks = torch.arange(logits.shape[1], device=logits.device)[None]
        logits = logits.masked_fill(ranks >= column(sizes), -torch.inf)
        probabilities = logits.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        cut = (before >= column([row.sampling.top_p for row in rows])) & (ranks > 0)
        logits = logits.masked_fill(cut, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    # With exponential e, the argmax of p / e is a sample from p.
    noise = torch.empty_like(probabilities).exponential_()
    for index, row in enumerate(rows):
        if row.generator is not None:
            # Draw as many numbers as the row alone would, so that its tokens do not depend on the rest of the batch.
            size = sizes[index] if ordered else vocabulary
            noise[index, :size] = torch.empty(size, device=logits.device).exponential_(generator=row.generator)
    best = (probabilities / noise.clamp(min=1e-30)).argmax(dim=-1, keepdim=True)
    drawn: list[int] = (best if ids is None else ids.gather(1, best))[:, 0].tolist()
    return drawn


def logprobs(logits: Tensor, chosen: Sequence[int], counts: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """Return the log-probabilities, from raw ``logits``, of each row's chosen token and of its ``wanted`` best tokens.

    None for rows whose ``wanted`` is None.
    """
    results: list[TokenLogprobs | None] = [None] * len(chosen)
    indices = [index for index, count in enumerate(counts) if count is not None]
    if not indices:
        return results
    values = logits[indices].log_softmax(dim=-1)
    of_chosen = values.gather(1, torch.tensor([[chosen[index]] for index in indices], device=logits.device))
    ranks = (values > of_chosen).sum(dim=-1) + 1
    max_count = min(max(counts[index] or 0 for index in indices), values.shape[1])
    top, ids = (values.tolist() for values in values.topk(max_count, dim=-1))
    for position, index in enumerate(indices):
        count = counts[index] or 0
        results[index] = TokenLogprobs(
            float(of_chosen[position, 0]),
            int(ranks[position]),
            list(zip(ids[position][:count], top[position][:count], strict=True)),
        )
    return results


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
