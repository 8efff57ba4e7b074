"""The engine over OpenVINO GenAI's continuous batching: queues and admits requests, and reports their progress.

Runs in the worker, on the engine's thread. GenAI schedules, batches, pages the KV cache and preempts. Admission is
decided here, because GenAI has no priorities and rejects requests that do not fit at the moment.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import numpy as np

from conch.backends.engines.openvino.generation_config import generation_config
from conch.backends.engines.openvino.grammars import GrammarValidator, check_structure
from conch.backends.engines.openvino.pipelines import pipeline, tokenizer
from conch.backends.engines.openvino.precision import BLOCK, Precision, cache_blocks, capabilities
from conch.backends.generation.engine import (
    EngineRequest,
    EngineSpec,
    EngineUsage,
    GenerationEngine,
    Progress,
    TokenLogprobs,
    kv_token_bytes,
)
from conch.core.errors import unavailable, unsupported
from conch.core.sampling.parameters import STRUCTURED_OUTPUTS, Feature
from conch.core.sampling.structures import Structure

#: Finish reasons by GenAI's names.
_FINISH_REASONS = {"STOP": "stop", "LENGTH": "length", "TOOL_CALL": "stop"}


@dataclass(slots=True)
class PipelineRequest:
    """A request with its generated tokens, its arrival number (``order``) and, while it runs, GenAI's ``handle``."""

    request: EngineRequest
    order: int
    tokens: list[int] = field(default_factory=list)
    handle: Any = None

    def __lt__(self, other: PipelineRequest) -> bool:
        return (self.request.priority, self.order) < (other.request.priority, other.order)

    @property
    def blocks(self) -> int:
        """The maximum number of cache blocks that the request uses with its next token."""
        width, prompt = self.request.sampling.beam_width, len(self.request.prompt)
        if width == 1:
            return -(-(prompt + len(self.tokens) + 1) // BLOCK)
        # GenAI does not report the length of beams. Beams share the full blocks of their prompt.
        return prompt // BLOCK + width * -(-(prompt % BLOCK + self.request.sampling.max_tokens) // BLOCK)


class PipelineBatch:
    """A pipeline with a cache of ``blocks`` blocks, and its running requests by id.

    The pipeline frees the blocks of a cancelled request in the next step.
    """

    def __init__(self, pipeline: Any, blocks: int, eos_ids: Sequence[int]) -> None:
        self._pipeline, self._blocks, self._eos_ids = pipeline, blocks, eos_ids
        self._numbers = count()
        self.entries: dict[int, PipelineRequest] = {}
        self._cancelled = 0
        #: Blocks in use after the last step, and blocks of requests admitted since then.
        self._measured = self._admitted = 0

    @property
    def used(self) -> int:
        """An upper bound of the blocks in use: the sum over requests, or the pipeline's own figure if it is lower.

        The pipeline's figure counts shared prefixes once.
        """
        maximum = sum(entry.blocks for entry in self.entries.values()) + self._cancelled
        return min(maximum, self._measured + self._admitted, self._blocks)

    def fits(self, entry: PipelineRequest) -> bool:
        """Whether the cache has room for the request; an empty batch accepts any request."""
        return not self.entries or self.used + entry.blocks <= self._blocks

    def admit(self, entry: PipelineRequest) -> None:
        """Start a request, or resume a preempted request after its generated tokens."""
        import openvino

        request = entry.request
        config = generation_config(request.sampling, self._eos_ids, len(entry.tokens))
        ids: Any = openvino.Tensor(np.array([[*request.prompt, *entry.tokens]], np.int64))
        entry.handle = self._pipeline.add_request(next(self._numbers), ids, config)
        self.entries[request.id] = entry
        self._admitted += entry.blocks

    def cancel(self, id: int) -> bool:
        """Cancel a request; returns False if the batch does not have it."""
        entry = self.entries.pop(id, None)
        if entry is None:
            return False
        entry.handle.cancel()
        self._cancelled += entry.blocks
        if not self.entries:
            # A step without requests computes nothing; it frees the blocks of the cancelled requests.
            self._advance()
            self._measured = 0
        return True

    def step(self) -> tuple[list[Progress], list[PipelineRequest]]:
        """Compute a step. Returns its progress and the requests that were preempted because the cache is full."""
        self._advance()
        progress: list[Progress] = []
        preempted: list[PipelineRequest] = []
        for entry in list(self.entries.values()):
            steps = _read(entry)
            progress += steps
            if steps and steps[-1].finish:
                del self.entries[entry.request.id]
            elif entry.handle.get_status().name == "IGNORED":
                del self.entries[entry.request.id]
                preempted.append(entry)
        if preempted and (
            len(preempted) > 1 or self.entries or preempted[0].request.sampling.structured_outputs is None
        ):
            return progress, preempted
        return progress + [_exhausted(entry) for entry in preempted], []

    def _advance(self) -> None:
        self._pipeline.step()
        self._cancelled = self._admitted = 0
        self._measured = round(self._pipeline.get_metrics().cache_usage / 100 * self._blocks)


def _read(entry: PipelineRequest) -> list[Progress]:
    """Return the progress of a request since the last call: at most one object, or one per beam."""
    handle, sampling = entry.handle, entry.request.sampling
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
            finish = _FINISH_REASONS.get(output.finish_reason.name, "")
    if not tokens and not finish:
        return []
    entry.tokens += tokens
    return [Progress(entry.request.id, tokens, finish, logprobs=_logprobs(entry, logprobs))]


def _beams(entry: PipelineRequest, outputs: list[Any]) -> list[Progress]:
    if not outputs or any(output.finish_reason.name == "NONE" for output in outputs):
        return []
    outputs.sort(key=lambda output: output.score, reverse=True)
    return [
        Progress(
            entry.request.id,
            list(output.generated_ids),
            _FINISH_REASONS[output.finish_reason.name],
            logprobs=_logprobs(entry, output.generated_log_probs),
            beam=beam,
            cumulative_logprob=float(sum(output.generated_log_probs)),
        )
        for beam, output in enumerate(outputs[: entry.request.sampling.n])
    ]


def _logprobs(entry: PipelineRequest, logprobs: list[float]) -> list[TokenLogprobs] | None:
    """Return the log-probabilities of the chosen tokens, the only ones that GenAI reports; None if not requested."""
    return None if entry.request.sampling.logprobs is None else [TokenLogprobs(logprob) for logprob in logprobs]


def _exhausted(entry: PipelineRequest) -> Progress:
    return Progress(entry.request.id, error=unavailable("the KV cache is too small for the sequence"))


#: The default number of sequences in the batch and of tokens in a step. A longer prompt chunk would delay the other
#: sequences.
SEQUENCES: Final = 48
BATCHED: Final = 48
#: Without presence and frequency penalties, which are wrong in GenAI 2026.4: they raise negative logits.
_FEATURES: Final = frozenset(
    {Feature.BEAMS, Feature.LOGPROBS, Feature.MIN_P, Feature.SEED, Feature.REPETITION, Feature.MIN_TOKENS}
)


class OpenVinoGenAIEngine(GenerationEngine):
    """Pipelines of OpenVINO GenAI: one for the model, and one per LoRA adapter, merged into the pipeline's weights.

    The pipelines divide the KV cache equally and step in turn. The usage lacks prefix hits and preemptions because
    GenAI does not report them.
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
        self.token_bytes = kv_token_bytes(spec.config, 4 if precision.exact else 2)
        self.adapters = tuple(spec.adapters)
        blocks = max(1, cache_blocks(spec, self.token_bytes, self.max_sequences, context) // (1 + len(spec.adapters)))
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
        self._waiting: list[PipelineRequest] = []
        self._orders = count()

    def add(self, request: EngineRequest) -> None:
        sampling = request.sampling
        generation_config(sampling, self._eos_ids)
        if sampling.structured_outputs is not None and self._grammars is not None:
            if sampling.beam_width > 1:
                raise unsupported("engine 'openvino' does not support beam search with structured output")
            if request.compiled is None:
                self.compile(sampling.structured_outputs)
        insort(self._waiting, PipelineRequest(request, next(self._orders)))

    def compile(self, structure: Structure) -> bool:
        """Validate and compile a structure.

        The compiled grammar stays in the tokenizer that the pipelines share, so there is no object to return.
        """
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
                    insort(self._waiting, entry)
        return progress

    def cancel(self, id: int) -> None:
        if not any(batch.cancel(id) for batch in self._batches.values()):
            self._waiting = [entry for entry in self._waiting if entry.request.id != id]

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

    def _admit(self) -> None:
        """Admit waiting requests to the pipelines, in order, until one does not fit."""
        while self._waiting and self._running < self.max_sequences:
            entry = self._waiting[0]
            batch = self._batches[entry.request.sampling.lora_name]
            if not batch.fits(entry):
                return
            batch.admit(entry)
            del self._waiting[0]
