"""The engine over OpenVINO GenAI's continuous batching: who waits, who runs, and what each step did.

Runs in the worker, on the engine's thread.  GenAI schedules, batches, pages the KV cache and preempts; which sequences
it has at all is decided here, since it knows no priorities and refuses what does not fit for the moment.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Final

from conch.backends.engines.openvino.config import generation_config
from conch.backends.engines.openvino.grammar import GrammarValidator
from conch.backends.engines.openvino.load import capabilities, pipeline, tokenizer
from conch.backends.engines.openvino.pipeline_batch import PipelineBatch, PipelineRequest
from conch.backends.engines.openvino.precision import BLOCK, Precision, cache_blocks
from conch.backends.engines.openvino.structures import check_structure
from conch.backends.generation.engine import EngineRequest, EngineUsage, GenerationEngine, Progress
from conch.backends.generation.engine_table import EngineSpec
from conch.errors import unsupported
from conch.sampling.parameters import STRUCTURED_OUTPUTS, Feature

#: Sequences in the batch, and tokens in a step, where nothing else is wanted: reading prompts delays the others.
SEQUENCES: Final = 48
BATCHED: Final = 48
#: Not those penalties that GenAI adds to logits: below zero they raise what they should lower, as of 2026.4.
_FEATURES: Final = frozenset(
    {Feature.BEAMS, Feature.LOGPROBS, Feature.MIN_P, Feature.SEED, Feature.REPETITION, Feature.MIN_TOKENS}
)


class OpenVinoGenAIEngine(GenerationEngine):
    """Each LoRA adapter has a pipeline of its own, with the adapter in its weights; they share the cache evenly and
    are stepped in turn.  ``EngineUsage`` has no prefix hits and preemptions: GenAI does not tell."""

    name = "openvino"
    block_tokens = BLOCK

    def __init__(self, spec: EngineSpec) -> None:
        self._eos_ids = spec.eos_ids
        self.max_sequences = spec.max_sequences or SEQUENCES
        self.vocabulary = int(spec.config["vocab_size"])
        context = spec.context or int(spec.config["max_position_embeddings"])
        precision = Precision.of(spec, capabilities())
        self.adapters = tuple(spec.adapters)
        blocks = max(1, cache_blocks(spec, precision, self.max_sequences, context) // (1 + len(spec.adapters)))
        self.cache_tokens = blocks * BLOCK * (1 + len(spec.adapters))
        self.context = min(context, blocks * BLOCK)
        batched = max(spec.max_batched_tokens or BATCHED, self.max_sequences)
        made, full = tokenizer(spec)
        self._lanes = {
            name: PipelineBatch(pipeline(spec, made, precision, blocks, batched, adapter), blocks, spec.eos_ids)
            for name, adapter in {"": None, **spec.adapters}.items()
        }
        self._grammars = GrammarValidator(made, self.vocabulary) if full else None
        self.features = (
            _FEATURES | (STRUCTURED_OUTPUTS if full else set()) | ({Feature.LORA} if spec.adapters else set())
        )
        self._waiting: dict[int, PipelineRequest] = {}
        self._queue: list[PipelineRequest] = []
        self._orders = count()

    def add(self, sequence: EngineRequest) -> None:
        sampling = sequence.sampling
        generation_config(sampling, self._eos_ids)
        if sampling.structured_outputs is not None and self._grammars is not None:
            if sampling.beam_width > 1:
                raise unsupported("engine 'openvino' does not have beam search with structured output")
            check_structure(sampling.structured_outputs)
            self._grammars.check(sampling.structured_outputs)
        self._wait(PipelineRequest(sequence, next(self._orders)))

    def step(self) -> list[Progress]:
        self._admit()
        progress: list[Progress] = []
        for lane in self._lanes.values():
            if lane.entries:
                found, again = lane.step()
                progress += found
                for entry in again:
                    self._wait(entry)
        return progress

    def cancel(self, id: int) -> None:
        if self._waiting.pop(id, None) is None:
            any(lane.cancel(id) for lane in self._lanes.values())

    def load(self) -> EngineUsage:
        return EngineUsage(
            running=self._running,
            waiting=len(self._waiting),
            used_tokens=sum(lane.used for lane in self._lanes.values()) * BLOCK,
        )

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._running > 0

    def close(self) -> None:
        self._lanes.clear()
        self._grammars = None

    @property
    def _running(self) -> int:
        return sum(len(lane.entries) for lane in self._lanes.values())

    def _wait(self, entry: PipelineRequest) -> None:
        self._waiting[entry.sequence.id] = entry
        heapq.heappush(self._queue, entry)

    def _admit(self) -> None:
        """Give pipelines what waits, in its order, as far as there is room."""
        room = self.max_sequences - self._running
        while self._queue and room > 0:
            entry = self._queue[0]
            if self._waiting.get(entry.sequence.id) is entry:
                lane = self._lanes[entry.sequence.sampling.lora_name]
                if not lane.fits(entry):
                    return
                lane.admit(entry)
                del self._waiting[entry.sequence.id]
                room -= 1
            heapq.heappop(self._queue)
