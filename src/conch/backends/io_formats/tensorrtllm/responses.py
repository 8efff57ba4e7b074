"""Builds the output tensors of backend ``tensorrtllm`` from tokens. Used by the service's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array, Result
from conch.backends.generation.engine import Progress
from conch.backends.generation.request_state import ResponseBuilder
from conch.core.sampling.parameters import SamplingParams

#: Number of dims of the outputs that every response had before releases with ``batch_index``; zeros if not requested.
ALWAYS: Final = {"cum_log_probs": 1, "output_log_probs": 2, "context_logits": 2, "generation_logits": 3}


class StopWords:
    """Token sequences that end a completion and remain part of it."""

    def __init__(self, words: Sequence[Sequence[int]] = ()) -> None:
        self._by_last: dict[int, list[list[int]]] = {}
        for word in words:
            self._by_last.setdefault(word[-1], []).append(list(word))

    def end(self, tokens: list[int]) -> bool:
        """Whether the non-empty ``tokens`` end with one of the words."""
        return any(tokens[-len(word) :] == word for word in self._by_last.get(tokens[-1], ()))


@dataclass(frozen=True, slots=True)
class TokenOutputOptions:
    """Options for the responses of a request.

    ``stream``: send a response at every step. ``together``: send one response for all rows and sequences, as models
    that are not decoupled do. ``batched``: tensors have a batch dimension. ``prompt``: ``output_ids`` begin with the
    prompt. ``log_probs``: return log-probabilities. ``normalize``: divide the score of a beam by its length.
    ``padded``: the outputs of ``ALWAYS`` that every response has.
    """

    stream: bool = False
    together: bool = False
    batched: bool = True
    prompt: bool = False
    log_probs: bool = False
    normalize: bool = True
    padded: frozenset[str] = frozenset()


@dataclass(slots=True)
class RequestRow:
    """A row of a request: its prompt, sampling parameters and number of samples; ``pad`` is the padding token id."""

    prompt: list[int]
    sampling: SamplingParams
    samples: int = 1
    stop_words: StopWords = field(default_factory=StopWords)
    pad: int = 0


@dataclass(slots=True)
class _Sequence:
    """A completion of a row; ``sent`` is the number of tokens already sent, ``finish`` the finish reason."""

    row: RequestRow
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    score: float = 0.0
    finish: str = ""
    sent: int = 0


@dataclass(slots=True)
class _Item:
    """A sample of a row, or all of its beams: the unit that has its own responses."""

    row: int
    index: int
    sequences: list[_Sequence]
    done: bool = False

    @property
    def ended(self) -> bool:
        return all(sequence.finish for sequence in self.sequences)

    @property
    def fresh(self) -> bool:
        return any(len(sequence.tokens) > sequence.sent for sequence in self.sequences)


class TokenResponseBuilder(ResponseBuilder):
    """Builds the responses of a request in the I/O format ``tensorrtllm``."""

    def __init__(self, rows: Sequence[RequestRow], options: TokenOutputOptions) -> None:
        self.prompts = []
        self._options = options
        self._items: list[_Item] = []
        for number, row in enumerate(rows):
            for index in range(row.samples):
                sampling = row.sampling.for_sample(index) if row.samples > 1 else row.sampling
                self.prompts.append((row.prompt, sampling))
                self._items.append(_Item(number, index, [_Sequence(row) for _ in range(sampling.n)]))
        self._sequences = [sequence for item in self._items for sequence in item.sequences]

    def add(self, index: int, progress: Progress) -> str:
        sequence = self._sequences[index]
        # The stop token is not part of the output.
        tokens = progress.tokens[:-1] if progress.finish == "stop" else progress.tokens
        if progress.cumulative_logprob is not None:
            sequence.score = progress.cumulative_logprob
        for position, token in enumerate(tokens):
            sequence.tokens.append(token)
            if progress.logprobs is not None:
                sequence.logprobs.append(progress.logprobs[position].logprob)
                if progress.cumulative_logprob is None:
                    sequence.score += sequence.logprobs[-1]
            if sequence.row.stop_words.end(sequence.tokens):
                sequence.finish = "stop"
                return sequence.finish
        sequence.finish = progress.finish
        return sequence.finish

    def responses(self, final: bool) -> list[Result]:
        """Return the due responses; with ``final``, the last ones, also for sequences that have not finished."""
        if self._options.together:
            return [self._result(self._items)] if final else []
        results = []
        for item in self._items:
            ended = final or item.ended
            if not item.done and (ended or (self._options.stream and item.fresh)):
                item.done = ended
                results.append(self._result([item]))
        return results

    def _result(self, items: Sequence[_Item]) -> Result:
        rows: dict[int, list[_Sequence]] = {}
        for item in items:
            rows.setdefault(item.row, []).extend(item.sequences)
        grid = list(rows.values())
        outputs = self._tensors(grid)
        outputs["batch_index"] = np.array([[row] for row in rows], np.int32)
        outputs["sequence_index"] = np.full((len(rows), 1), items[0].index, np.int32)
        for line in grid:
            for sequence in line:
                sequence.sent = len(sequence.tokens) if self._options.stream else 0
        return Result({name: array if self._options.batched else array[0] for name, array in outputs.items()})

    def _tensors(self, grid: list[list[_Sequence]]) -> dict[str, Array]:
        """Return the outputs for a grid of sequences ``[rows, sequences]``."""
        options = self._options
        prompts = options.prompt and not options.stream
        tokens = [
            [(sequence.row.prompt if prompts else []) + sequence.tokens[sequence.sent :] for sequence in line]
            for line in grid
        ]
        outputs: dict[str, Array] = {
            "output_ids": _filled(tokens, [line[0].row.pad for line in grid], np.int32),
            "sequence_length": np.array([list(map(len, line)) for line in tokens], np.int32),
        }
        if options.log_probs or options.padded:
            outputs["cum_log_probs"] = np.array([list(map(self._score, line)) for line in grid], np.float32)
            outputs |= self._log_probs(grid)
        for name in options.padded:
            outputs.setdefault(name, np.zeros((len(grid), *[1] * ALWAYS[name]), np.float32))
        return outputs

    def _log_probs(self, grid: list[list[_Sequence]]) -> dict[str, Array]:
        """Return the log-probabilities of the tokens to send, under both output names; empty if some are unknown."""
        if self._options.log_probs and any(
            sequence.tokens and not sequence.logprobs for line in grid for sequence in line
        ):
            return {}
        known = [
            [sequence.logprobs[sequence.sent :] or [0.0] * (len(sequence.tokens) - sequence.sent) for sequence in line]
            for line in grid
        ]
        log_probs = _filled(known, [0.0] * len(grid), np.float32)
        return {"output_log_probs": log_probs, "log_probs": log_probs}

    def _score(self, sequence: _Sequence) -> float:
        sampling = sequence.row.sampling
        if sampling.beam_width == 1 or not self._options.normalize:
            return sequence.score
        return float(sequence.score / max(len(sequence.tokens), 1) ** sampling.length_penalty)


class StopResponseBuilder(ResponseBuilder):
    """Builds the empty response of a request with ``stop``, which ends all other requests with its id."""

    prompts = ()

    def __init__(self, id: str) -> None:
        self.ends_id = id

    def add(self, index: int, progress: Progress) -> str:
        raise NotImplementedError

    def responses(self, final: bool) -> list[Result]:
        return [Result({})]


def _filled(grid: Sequence[Sequence[Sequence[float]]], pads: Sequence[float], dtype: type) -> Array:
    """Convert lists of different lengths to an array ``[rows, sequences, longest]``, with one pad value per row."""
    width = max(len(values) for line in grid for values in line)
    filled = [
        [[*values, *[pad] * (width - len(values))] for values in line] for line, pad in zip(grid, pads, strict=True)
    ]
    return np.array(filled, dtype).reshape(len(grid), len(grid[0]), width)
