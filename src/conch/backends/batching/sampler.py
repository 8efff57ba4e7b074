"""Chooses tokens from logits with vLLM's semantics, or with beam search, for all engines that return logits.

The order is: structure, ``logit_bias``, bad words, ``min_tokens``, penalties; then temperature, ``min_p``, ``top_k``,
``top_p``. Log-probabilities are computed from the raw logits. The algorithm of beam search is that of
``transformers.generate(num_beams=…)``.

Rows are computed one by one: the logits of a row stay in the processor's cache between the operations, and its tokens
cannot depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.backends.batching.decoder import Logits
from conch.backends.batching.grammars import Matcher, restrict
from conch.backends.generation.engine import Progress, TokenLogprobs
from conch.core.sampling.parameters import SamplingParams

Indices = npt.NDArray[np.intp]

#: The number of values that are reduced to a maximum, or to a sum, before the vocabulary is searched.
_MAXIMA: Final = 64
_SUMS: Final = 256
#: Lower bounds of weights, relative to the highest, for which a nucleus is searched; 0 includes the whole vocabulary.
_FLOORS: Final = (2.0**-7, 2.0**-14, 2.0**-21, 0.0)


@dataclass(slots=True, eq=False)
class SequenceState:
    """An in-flight request: its parameters, and its ``tokens`` including the prompt.

    ``rank`` orders waiting requests, lowest first: priority, then arrival. ``max_length`` is the length limit including
    the prompt; ``end_ids`` are the tokens that end the request. ``generator`` is its random number generator,
    ``matcher`` the state of its grammar, and ``search`` the state of its beam search. ``cached`` is the length of the
    prompt's prefix whose KV cache was retained; None if prefixes are not retained.
    """

    id: int
    rank: tuple[int, int]
    sampling: SamplingParams
    tokens: list[int]
    prompt_length: int
    end_ids: frozenset[int]
    max_length: int
    generator: np.random.Generator
    matcher: Matcher | None = None
    search: BeamSearch | None = None
    cached: int | None = None

    @property
    def width(self) -> int:
        """The number of rows that the request uses in a batch."""
        return self.sampling.beam_width

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the one with the highest raw logit, so that only its id is needed."""
        sampling = self.sampling
        return (
            sampling.temperature <= 0
            and self.matcher is None
            and self.search is None
            and sampling.logprobs is None
            and not sampling.logit_bias
            and not sampling.bad_words_token_ids
            and sampling.repetition_penalty == 1
            and not sampling.presence_penalty
            and not sampling.frequency_penalty
            and len(self.tokens) - self.prompt_length >= sampling.min_tokens
        )


def sample(rows: Sequence[SequenceState], logits: Logits) -> list[Progress]:
    """Choose a token for each row and append it to its ``tokens``; overwrites ``logits`` ``[rows, vocabulary]``."""
    if all(row.is_greedy for row in rows):
        return accept(rows, logits.argmax(axis=1).tolist())
    counts = [row.sampling.logprobs for row in rows]
    raw = [None if count is None else scores.copy() for count, scores in zip(counts, logits, strict=True)]
    restrict(logits, [row.matcher for row in rows])
    for row, scores in zip(rows, logits, strict=True):
        adjust(scores, row.sampling, row.tokens, row.prompt_length, row.end_ids)
    tokens = [
        _admitted(row, token, scores) for row, token, scores in zip(rows, choose(logits, rows), logits, strict=True)
    ]
    entries = [
        None if scores is None else logprobs(scores, token, count or 0)
        for scores, token, count in zip(raw, tokens, counts, strict=True)
    ]
    return accept(rows, tokens, entries)


def _admitted(row: SequenceState, token: int, scores: Logits) -> int:
    """Return the token, or another one if the row's structure does not admit it; overwrites ``scores``."""
    while row.matcher is not None and not row.matcher.admits(token) and scores[token] > -np.inf:
        scores[token] = -np.inf
        [token] = choose(scores[None], [row])
    return token


def accept(
    rows: Sequence[SequenceState], tokens: Sequence[int], entries: Sequence[TokenLogprobs | None] = ()
) -> list[Progress]:
    """Append the chosen token to each row's ``tokens``; ``entries`` are the log-probabilities to report, if any."""
    progress = []
    for row, token, entry in zip(rows, tokens, entries or [None] * len(rows), strict=True):
        row.tokens.append(token)
        error = row.matcher.accept(token) if row.matcher is not None else None
        finish = "stop" if token in row.end_ids else "length" if len(row.tokens) >= row.max_length else ""
        if error is not None:
            progress.append(Progress(row.id, error=error))
        else:
            logprobs = None if entry is None else [entry]
            progress.append(Progress(row.id, [token], finish, logprobs=logprobs, cached_tokens=row.cached))
    return progress


def sample_beams(row: SequenceState, logits: Logits) -> tuple[list[int], list[Progress]]:
    """Advance a beam search by the logits ``[beams, vocabulary]``.

    Returns the indices of the beams that the new beams continue, or the progress of all beams when the search is done.
    """
    search = row.search
    assert search is not None
    going = search.advance(logits)
    if not search.done:
        return going, []
    return [], [
        Progress(
            row.id,
            beam.tokens,
            "stop" if beam.stopped else "length",
            beam=index,
            cumulative_logprob=beam.total,
            cached_tokens=row.cached,
        )
        for index, beam in enumerate(search.results())
    ]


def adjust(
    scores: Logits, sampling: SamplingParams, tokens: list[int], prompt_length: int, end_ids: frozenset[int]
) -> None:
    """Apply biases, bans, ``min_tokens`` and penalties to the logits ``[vocabulary]`` after ``tokens``, in place."""
    if sampling.logit_bias:
        biased = [token for token in sampling.logit_bias if 0 <= token < len(scores)]
        scores[biased] += np.array([sampling.logit_bias[token] for token in biased], np.float32)
    count = len(tokens) - prompt_length
    if words := sampling.bad_words_token_ids:
        end = tuple(tokens[len(tokens) - min(count, max(map(len, words))) :])
        banned = [word[-1] for word in words if word[:-1] == end[len(end) - len(word) + 1 :]]
        scores[[token for token in banned if token < len(scores)]] = -np.inf
    if end_ids and count < sampling.min_tokens:
        ends = list(end_ids)
        before = scores[ends]
        scores[ends] = -np.inf
        # A structure may be complete before ``min_tokens``; then only an end token is allowed.
        if scores.max() == -np.inf:
            scores[ends] = before
    if (penalty := sampling.repetition_penalty) != 1:
        seen = np.fromiter(set(tokens), np.intp)
        seen = seen[seen >= 0]  # without placeholders of images
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / penalty, values * penalty)
    if count and (sampling.presence_penalty or sampling.frequency_penalty):
        generated, counts = np.unique(np.array(tokens[prompt_length:]), return_counts=True)
        scores[generated] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)


def choose(logits: Logits, rows: Sequence[SequenceState]) -> list[int]:
    """Choose a token for each row of adjusted ``logits`` ``[rows, vocabulary]``."""
    with np.errstate(over="ignore"):  # logits of masked tokens may be the lowest number
        return [
            _draw(scores, row.sampling, row.generator) if row.sampling.temperature > 0 else int(scores.argmax())
            for scores, row in zip(logits, rows, strict=True)
        ]


def _draw(scores: Logits, sampling: SamplingParams, generator: np.random.Generator) -> int:
    best = scores.max()
    if not np.isfinite(best):
        return int(scores.argmax())
    ids: Indices | None = None
    if 0 < sampling.top_k < len(scores):
        ids = _largest(scores, sampling.top_k)
        scores = scores[ids]
    weights = scores - best
    weights *= np.float32(1 / max(sampling.temperature, 1e-5))
    np.exp(weights, out=weights)
    # The weight of the best token is 1, so the weights are relative to its probability, as min_p is.
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    index = _pick(weights, generator.random())
    return index if ids is None else int(ids[index])


def _largest(values: Logits, count: int) -> Indices:
    """Return the indices of the ``count`` largest values, largest first; ties go to the lower index."""
    size = len(values)
    if count >= size:
        return np.argsort(-values, kind="stable")
    groups = size // _MAXIMA
    # As many groups as wanted values have a maximum of at least ``floor``.
    maxima = values[: groups * _MAXIMA].reshape(_MAXIMA, groups).max(axis=0) if 4 * count < groups else values
    floor = np.partition(maxima, len(maxima) - count)[len(maxima) - count]
    indices = _at_least(values, floor, count)
    return indices[np.argsort(-values[indices], kind="stable")[:count]]


def _at_least(values: Logits, floor: np.float32, count: int) -> Indices:
    """Return the indices of values above ``floor``, and of values equal to it if those are fewer than ``count``."""
    above = np.flatnonzero(values > floor)
    if len(above) >= count:
        return above
    return np.concatenate([above, np.flatnonzero(values == floor)[: count - len(above)]])


def _nucleus(weights: Logits, top_p: float) -> Indices:
    """Return the indices of the largest weights that sum up to the fraction ``top_p`` of all weights."""
    least = top_p * float(weights.sum())
    for floor in _FLOORS:
        indices = np.flatnonzero(weights > floor)
        kept = weights[indices]
        if float(kept.sum()) >= least:
            break
    ordered = np.sort(kept)[::-1]
    count = min(int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), least)) + 1, len(ordered))
    return indices[_at_least(kept, ordered[count - 1], count)]


def _pick(weights: Logits, number: float) -> int:
    """Return an index with a probability proportional to its weight, for a uniform ``number`` from 0 to 1."""
    groups = len(weights) // _SUMS
    if groups < 2:
        return _invert(weights, number)[0]
    # A sum for each group of weights, and one for each weight that is left over: ``group``, ``group + groups``, …
    body = weights[: groups * _SUMS].reshape(_SUMS, groups)
    group, rest = _invert(np.concatenate([body.sum(axis=0), weights[groups * _SUMS :]]), number)
    if group >= groups:
        return groups * _SUMS + group - groups
    return _invert(body[:, group], rest)[0] * groups + group


def _invert(weights: Logits, number: float) -> tuple[int, float]:
    """Return the index at which the cumulative weights exceed the fraction ``number`` of their total.

    Also returns the position within that weight, which is again uniform from 0 to 1. Never returns a weight of zero.
    """
    totals = weights.cumsum(dtype=np.float64)
    point = min(number * totals[-1], np.nextafter(totals[-1], 0))
    index = int(totals.searchsorted(point, side="right"))
    return index, max(0.0, 1 - float(totals[index] - point) / float(weights[index]))


def logprobs(scores: Logits, token: int, count: int) -> TokenLogprobs:
    """Return the log-probabilities of ``token`` and of the ``count`` best tokens, from raw logits ``[vocabulary]``."""
    total = _log_total(scores)
    top = _largest(scores, count) if count else ()
    return TokenLogprobs(
        float(scores[token] - total),
        int(np.count_nonzero(scores > scores[token])) + 1,
        [(int(id), float(scores[id] - total)) for id in top],
    )


def _log_total(scores: Logits) -> Any:
    """Return the logarithm of the sum of exponentials."""
    best = scores.max()
    return best + np.log(np.exp(scores - best).sum())


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

    def advance(self, logits: Logits) -> list[int]:
        """Advance by the logits ``[width, vocabulary]`` of the running beams.

        Returns the index of the beam that each new beam continues; empty if the search ended.
        """
        values = logits - np.array([_log_total(scores) for scores in logits], np.float32)[:, None]
        for scores, beam in zip(values, self.running, strict=True):
            adjust(scores, self._sampling, [*self._prompt, *beam.tokens], len(self._prompt), self._end_ids)
        values += np.array([beam.total for beam in self.running], np.float32)[:, None]
        vocabulary = values.shape[1]
        totals = values.ravel()
        best = _largest(totals, min(max(2, 1 + len(self._end_ids)) * self.width, len(totals)))
        candidates = [(*divmod(index, vocabulary), float(totals[index])) for index in best.tolist()]
        last = self.length + 1 >= self._max_tokens
        ended = [last or token in self._end_ids for _, token, _ in candidates]
        self._finish(
            [
                self._continued(*candidate)
                for candidate, end in zip(candidates[: self.width], ended, strict=False)
                if end
            ]
        )
        going = [candidate for candidate, end in zip(candidates, ended, strict=True) if not end][: self.width]
        if len(going) < self.width:
            self.done = True
            return []
        self.running = [self._continued(*candidate) for candidate in going]
        self.done = not self._improvable()
        return [parent for parent, _, _ in going]

    def _continued(self, parent: int, token: int, total: float) -> Beam:
        """Return the beam that continues a running one by a token; ``total`` is its total log-probability."""
        return Beam([*self.running[parent].tokens, token], total, stopped=token in self._end_ids)

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
