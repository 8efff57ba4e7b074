"""The engine over OpenVINO GenAI's continuous batching: which requests wait, which run, and what each step did.

Runs in the worker, on the engine's thread.  GenAI schedules, batches, pages the KV cache and preempts; which requests
it gets is decided here, since it knows no priorities and refuses what does not fit at the moment.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Final

from conch.backends.engines.openvino.config import generation_config
from conch.backends.engines.openvino.grammar import GrammarValidator
from conch.backends.engines.openvino.pipeline_batch import PipelineBatch, PipelineRequest
from conch.backends.engines.openvino.pipelines import capabilities, pipeline, tokenizer
from conch.backends.engines.openvino.precision import BLOCK, Precision, cache_blocks
from conch.backends.engines.openvino.structures import check_structure
from conch.backends.generation.engine import EngineRequest, EngineSpec, EngineUsage, GenerationEngine, Progress
from conch.errors import unsupported
from conch.sampling.parameters import STRUCTURED_OUTPUTS, Feature
from conch.sampling.structures import Structure

#: Sequences in the batch, and tokens in a step, by default: a longer part of a prompt would delay the others.
SEQUENCES: Final = 48
BATCHED: Final = 48
#: Presence and frequency penalties are missing, since they are wrong in GenAI 2026.4: logits below zero rise.
_FEATURES: Final = frozenset(
    {Feature.BEAMS, Feature.LOGPROBS, Feature.MIN_P, Feature.SEED, Feature.REPETITION, Feature.MIN_TOKENS}
)


class OpenVinoGenAIEngine(GenerationEngine):
    """Pipelines of OpenVINO GenAI: one for the model, and one for each LoRA adapter with the adapter in its weights.

    They have equal parts of the KV cache and are stepped in turn.  The usage has no prefix hits and preemptions, which
    GenAI does not report.
    """

    name = "openvino"
    library = "openvino_genai"
    block_tokens = BLOCK

    def __init__(self, spec: EngineSpec) -> None:
        self._eos_ids = spec.eos_ids
        self.max_sequences = spec.max_sequences or SEQUENCES
        self.vocabulary = int(spec.config["vocab_size"])
        context = spec.context or int(spec.config["max_position_embeddings"])
        precision = Precision.of(spec, capabilities())
        self.precision = f"{precision.arithmetic} (KV cache {precision.cache})"
        self.token_bytes = precision.token_bytes(spec.config)
        self.adapters = tuple(spec.adapters)
        blocks = max(1, cache_blocks(spec, precision, self.max_sequences, context) // (1 + len(spec.adapters)))
        self.cache_tokens = blocks * BLOCK * (1 + len(spec.adapters))
        self.context = min(context, blocks * BLOCK)
        batched = max(spec.max_batched_tokens or BATCHED, self.max_sequences)
        genai_tokenizer, knows_vocabulary = tokenizer(spec)
        self._batches = {
            name: PipelineBatch(
                pipeline(spec, genai_tokenizer, precision, blocks, batched, adapter), blocks, spec.eos_ids
            )
            for name, adapter in {"": None, **spec.adapters}.items()
        }
        self._grammars = GrammarValidator(genai_tokenizer, self.vocabulary) if knows_vocabulary else None
        self.features = (
            _FEATURES
            | (STRUCTURED_OUTPUTS if knows_vocabulary else set())
            | ({Feature.LORA} if spec.adapters else set())
        )
        self._waiting: dict[int, PipelineRequest] = {}
        self._queue: list[PipelineRequest] = []
        self._orders = count()

    def add(self, request: EngineRequest) -> None:
        sampling = request.sampling
        generation_config(sampling, self._eos_ids)
        if sampling.structured_outputs is not None and self._grammars is not None:
            if sampling.beam_width > 1:
                raise unsupported("engine 'openvino' does not have beam search with structured output")
            if request.compiled is None:
                self.compile(sampling.structured_outputs)
        self._wait(PipelineRequest(request, next(self._orders)))

    def compile(self, structure: Structure) -> bool:
        """Compile a structure where the pipelines find it; they have nothing of it to be given."""
        if self._grammars is not None:
            check_structure(structure)
            self._grammars.check(structure)
        return True

    def step(self) -> list[Progress]:
        self._admit()
        progress: list[Progress] = []
        for batch in self._batches.values():
            if batch.entries:
                steps, preempted = batch.step()
                progress += steps
                for entry in preempted:
                    self._wait(entry)
        return progress

    def cancel(self, id: int) -> None:
        if self._waiting.pop(id, None) is None:
            any(batch.cancel(id) for batch in self._batches.values())

    def usage(self) -> EngineUsage:
        return EngineUsage(
            running=self._running,
            waiting=len(self._waiting),
            used_tokens=sum(batch.used for batch in self._batches.values()) * BLOCK,
        )

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._running > 0

    def close(self) -> None:
        self._batches.clear()
        self._grammars = None

    @property
    def _running(self) -> int:
        return sum(len(batch.entries) for batch in self._batches.values())

    def _wait(self, entry: PipelineRequest) -> None:
        self._waiting[entry.request.id] = entry
        heapq.heappush(self._queue, entry)

    def _admit(self) -> None:
        """Give the pipelines waiting requests, in order, as long as there is room."""
        free = self.max_sequences - self._running
        while self._queue and free > 0:
            entry = self._queue[0]
            if self._waiting.get(entry.request.id) is entry:
                batch = self._batches[entry.request.sampling.lora_name]
                if not batch.fits(entry):
                    return
                batch.admit(entry)
                del self._waiting[entry.request.id]
                free -= 1
            heapq.heappop(self._queue)
