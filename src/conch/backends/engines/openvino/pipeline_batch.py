"""One pipeline of the engine ``openvino`` and the sequences that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from conch.backends.engines.openvino.config import generation_config
from conch.backends.engines.openvino.precision import BLOCK
from conch.backends.generation.engine import EngineRequest, Progress, TokenLogprobs
from conch.errors import unavailable

#: GenAI's reasons for an end, in ours.
_ENDS = {"STOP": "stop", "LENGTH": "length", "TOOL_CALL": "stop"}


@dataclass(slots=True)
class PipelineRequest:
    """A sequence, the tokens it has got, and its place among those that wait."""

    sequence: EngineRequest
    order: int
    tokens: list[int] = field(default_factory=list)
    handle: Any = None

    def __lt__(self, other: PipelineRequest) -> bool:
        return (self.sequence.priority, self.order) < (other.sequence.priority, other.order)

    @property
    def blocks(self) -> int:
        """The most it takes of the cache, with its next token."""
        width, prompt = self.sequence.sampling.beam_width, len(self.sequence.prompt)
        if width == 1:
            return -(-(prompt + len(self.tokens) + 1) // BLOCK)
        # How far beams have come is not told; what they share is their prompt's whole blocks.
        return prompt // BLOCK + width * -(-(prompt % BLOCK + self.sequence.sampling.max_tokens) // BLOCK)


class PipelineBatch:
    """``blocks`` are those of its cache.  The pipeline frees those of a cancelled sequence in the step after."""

    def __init__(self, pipeline: Any, blocks: int, eos_ids: Sequence[int]) -> None:
        self._pipeline, self._blocks, self._eos_ids = pipeline, blocks, eos_ids
        self._numbers = count()
        self.entries: dict[int, PipelineRequest] = {}
        self._cancelled = 0
        #: What the last step used, and what has come since.
        self._measured = self._come = 0

    @property
    def used(self) -> int:
        """Blocks in use, at most: prefixes that sequences share are counted once where the pipeline says so."""
        held = sum(entry.blocks for entry in self.entries.values()) + self._cancelled
        return min(held, self._measured + self._come, self._blocks)

    def fits(self, entry: PipelineRequest) -> bool:
        """Whether there is room for the prompt; alone it always is."""
        return not self.entries or self.used + entry.blocks <= self._blocks

    def admit(self, entry: PipelineRequest) -> None:
        import openvino

        sequence = entry.sequence
        config = generation_config(sequence.sampling, self._eos_ids, len(entry.tokens))
        ids: Any = openvino.Tensor(np.array([[*sequence.prompt, *entry.tokens]], np.int64))
        entry.handle = self._pipeline.add_request(next(self._numbers), ids, config)
        self.entries[sequence.id] = entry
        self._come += entry.blocks

    def cancel(self, id: int) -> bool:
        entry = self.entries.pop(id, None)
        if entry is None:
            return False
        entry.handle.cancel()
        self._cancelled += entry.blocks
        if not self.entries:
            # Nothing is computed: what was cancelled is freed.
            self._advance()
            self._measured = 0
        return True

    def step(self) -> tuple[list[Progress], list[PipelineRequest]]:
        """What a step did, and the sequences that must be admitted again, for want of cache."""
        self._advance()
        progress: list[Progress] = []
        again: list[PipelineRequest] = []
        for entry in list(self.entries.values()):
            found = _read(entry)
            progress += found
            if found and found[-1].finish:
                del self.entries[entry.sequence.id]
            elif entry.handle.get_status().name == "IGNORED":
                del self.entries[entry.sequence.id]
                again.append(entry)
        if again and (len(again) > 1 or self.entries or again[0].sequence.sampling.structured_outputs is None):
            return progress, again
        return progress + [_exhausted(entry) for entry in again], []

    def _advance(self) -> None:
        self._pipeline.step()
        self._cancelled = self._come = 0
        self._measured = round(self._pipeline.get_metrics().cache_usage / 100 * self._blocks)


def _read(entry: PipelineRequest) -> list[Progress]:
    """What came of a sequence since the last time, in at most one object, or one for each beam."""
    handle, sampling = entry.handle, entry.sequence.sampling
    if not handle.can_read():
        return []
    if sampling.beam_width > 1:
        return _beams(entry, list(handle.read().values()))
    tokens: list[int] = []
    logprobs: list[float] = []
    finish = ""
    while handle.can_read():
        for output in handle.read().values():
            tokens += output.generated_ids
            logprobs += output.generated_log_probs
            finish = _ENDS.get(output.finish_reason.name, "")
    if not tokens and not finish:
        return []
    entry.tokens += tokens
    return [Progress(entry.sequence.id, tokens, finish, logprobs=_logprobs(entry, logprobs))]


def _beams(entry: PipelineRequest, outputs: list[Any]) -> list[Progress]:
    if not outputs or any(output.finish_reason.name == "NONE" for output in outputs):
        return []
    outputs.sort(key=lambda output: output.score, reverse=True)
    return [
        Progress(
            entry.sequence.id,
            list(output.generated_ids),
            _ENDS[output.finish_reason.name],
            logprobs=_logprobs(entry, output.generated_log_probs),
            beam=beam,
            cumulative_logprob=float(sum(output.generated_log_probs)),
        )
        for beam, output in enumerate(outputs[: entry.sequence.sampling.n])
    ]


def _logprobs(entry: PipelineRequest, logprobs: list[float]) -> list[TokenLogprobs] | None:
    """GenAI tells of the chosen tokens only."""
    return None if entry.sequence.sampling.logprobs is None else [TokenLogprobs(logprob) for logprob in logprobs]


def _exhausted(entry: PipelineRequest) -> Progress:
    return Progress(entry.sequence.id, error=unavailable("the KV cache is too small for the sequence"))
