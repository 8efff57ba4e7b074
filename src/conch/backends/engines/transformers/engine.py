"""In-flight batching for models of transformers: requests join and leave the batch at every step.

A step decodes one token for every running row, then prefills at most one chunk of prompts, which ``step_budget.py``
limits. ``cache_tokens`` limits the tokens of rows, excluding the padding of batches (``batch.py``). Before each step,
cached prefixes are reduced to the rest of that limit.

The same code runs on the CPU and on a GPU. transformers' own continuous batching has paged attention, but no beam
search, per-request seeds and penalties, or structured output, and its results are not exact for every architecture.
"""

from __future__ import annotations

import gc
import logging
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

import torch
import transformers

from conch.backends.base.verification import SLOW_STEP, VERIFIED_TOKENS, require_greedy_likeness
from conch.backends.batching.sampler import BeamSearch, accept, sample, sample_beams
from conch.backends.batching.sampling_engine import SamplingEngine
from conch.backends.batching.step_budget import StepBudget
from conch.backends.engines.transformers.batch import BatchRow, Reading, RunningBatch
from conch.backends.engines.transformers.cache import BLOCK, Prefixes
from conch.backends.engines.transformers.media import network_inputs
from conch.backends.engines.transformers.network import DecoderNetwork, context, load
from conch.backends.engines.transformers.probe import probe_batch_support
from conch.backends.generation.agreement import greedy_completions
from conch.backends.generation.engine import (
    EngineRequest,
    EngineSpec,
    EngineUsage,
    GenerationEngine,
    Progress,
    kv_token_bytes,
)
from conch.backends.generation.features import ENGINE_FEATURES
from conch.backends.generation.lora import LoraWeights
from conch.backends.generation.media import MediaSpec
from conch.core.errors import error_text, invalid, one_line
from conch.core.sampling.parameters import Feature, SamplingParams
from conch.machine.facts import usable_cores

Tensor = Any


def sample_rows(rows: list[BatchRow], logits: Tensor) -> list[Progress]:
    """Choose a token for each row by the logits ``[rows, vocabulary]``, which leave a GPU only if needed."""
    if logits.device.type == "cpu":
        return sample(rows, logits.numpy())
    progress: list[Progress] = []
    if greedy := [index for index, row in enumerate(rows) if row.is_greedy]:
        progress += accept([rows[index] for index in greedy], logits[greedy].argmax(dim=-1).tolist())
    if others := [index for index in range(len(rows)) if index not in greedy]:
        progress += sample([rows[index] for index in others], logits[others].numpy(force=True))
    return progress


_logger = logging.getLogger(__name__)


def verify(engine: GenerationEngine, network: DecoderNetwork, prompts: Sequence[list[int]]) -> None:
    """Compare the engine's greedy tokens for a batch of ``prompts`` (token ids) with ``generate`` for each prompt.

    Raises INVALID_ARG if tokens differ or ``generate`` fails. Skips the comparison if a step takes longer than
    ``SLOW_STEP``.
    """
    completions = greedy_completions(engine, prompts, VERIFIED_TOKENS, SLOW_STEP * torch.get_num_threads())
    if not completions:
        _logger.info("not compared with transformers: a step takes more than %s s on each core", SLOW_STEP)
        return
    network.use("")
    with _plain(network.model):
        require_greedy_likeness(
            network.model,
            [completion.prompt for completion in completions],
            [[*completion.prompt, *completion.tokens] for completion in completions],
            lambda prompt: f"after a prompt of {len(prompt)} tokens in a batch of {len(prompts)}",
        )


@contextmanager
def _plain(model: Any) -> Iterator[None]:
    """Replace generation_config.json temporarily, because its penalties, beams and stop tokens affect the output."""
    kept = model.generation_config
    model.generation_config = transformers.GenerationConfig(use_cache=kept.use_cache)
    try:
        yield
    finally:
        model.generation_config = kept


#: The maximum size of cached prefixes in bytes.
_PREFIXES: Final = 1 << 30


class TransformersEngine(SamplingEngine):
    """Batches of rows over a network; a request is one row, or one row per beam with beam search."""

    name = "transformers"
    loads_adapters = True

    def __init__(self, spec: EngineSpec, *, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._threads = 0
        self._use_threads(spec.threads or usable_cores())
        self._network = load(spec)
        self.precision = str(self._network.model.dtype).removeprefix("torch.")
        config = self._network.model.config.get_text_config(decoder=True)
        self.context = context(spec, config)
        self.vocabulary = int(config.vocab_size)
        self.cache_tokens = spec.cache_tokens
        self.token_bytes = kv_token_bytes(config.to_dict(), self._network.model.dtype.itemsize)
        self.max_sequences = spec.max_sequences or (32 if spec.device == "cpu" else 64)
        self.adapters = tuple(spec.adapters)
        self.features = ENGINE_FEATURES[self.name]
        self.open_grammars(spec)
        self._budget = StepBudget(spec.max_batched_tokens or (256 if spec.device == "cpu" else 2048))
        support = probe_batch_support(self._network, self.context)
        #: Whether rows of different lengths share a batch; otherwise each row has its own cache.
        self.padded = support.padding
        if not support.several_rows:
            # The model itself holds the state of a single sequence.
            self.max_sequences = 1
        if not support.beam_search or not support.several_rows:
            self.features -= {Feature.BEAMS}
        self._prefixes = Prefixes(_PREFIXES) if spec.prefix_caching and self.padded else None
        self._rows: dict[int, BatchRow] = {}
        self._waiting: list[BatchRow] = []
        self._batches: list[RunningBatch] = []
        self._reading: Reading | None = None
        self._preemptions = 0
        if spec.media is not None:
            self._open_media(spec.media)

    def _open_media(self, spec: MediaSpec) -> None:
        """Accept images and recordings, if the completion of the example equals that of ``generate``."""
        prompt, items = spec.example
        self.add(EngineRequest(0, list(prompt), SamplingParams(max_tokens=VERIFIED_TOKENS, temperature=0), media=items))
        tokens: list[int] = []
        try:
            while self.busy:
                for progress in self.step():
                    if progress.error is not None:
                        raise progress.error
                    tokens += progress.tokens
            inputs = network_inputs(self._network.model, spec.arrays)
            with _plain(self._network.model):
                require_greedy_likeness(
                    self._network.model,
                    [prompt],
                    [[*prompt, *tokens]],
                    lambda prompt: f"after a prompt of {len(prompt)} tokens with {len(items)} items",
                    **{name: array for name, array in inputs.items() if name not in ("input_ids", "attention_mask")},
                )
        except Exception as error:  # depends on the network
            reason = error_text(error, short=True)
            self.warnings = [f"the model reads only text, not {' or '.join(sorted(spec.placeholders))}: {reason}"]
            _logger.debug("the example fails", exc_info=True)
            self._rows, self._waiting, self._batches, self._reading = {}, [], [], None
            if self._network.media is not None:
                self._network.media.close()
                self._network.media = None
        else:
            self.media = frozenset(spec.placeholders)
        self.forget()

    def add(self, request: EngineRequest) -> None:
        row = self.new_sequence(BatchRow, request)
        if self._network.media is not None:
            row.media = self._network.media.open(request.prompt, request.media)
        self._rows[row.id] = row
        self._wait(row)

    def attach_adapter(self, key: str, adapter: LoraWeights) -> None:
        self._network.attach(key, adapter)

    def detach_adapter(self, key: str) -> None:
        self._network.detach(key)

    def step(self) -> list[Progress]:
        self._use_threads(self._threads)
        with torch.inference_mode():
            self._make_room()
            progress: list[Progress] = []
            before = self._clock()
            rows = sum(row.width for batch in self._batches for row in batch.members)
            for batch in list(self._batches):
                progress += self._advance(batch, batch.step())
            tokens = self._read(self._budget.tokens(rows), progress)
            if self._reading is not None:
                self._network.synchronize()
            if rows or tokens:
                self._budget.measure(rows, tokens, self._clock() - before)
            self._join()
        return progress

    def cancel(self, id: int) -> None:
        row = self._rows.pop(id, None)
        if row is not None:
            with torch.inference_mode():
                self._leave(row)

    def usage(self) -> EngineUsage:
        kept = self._prefixes
        return EngineUsage(
            running=len(self._rows) - len(self._waiting),
            waiting=len(self._waiting),
            used_tokens=self._used(),
            prefix_queries=kept.queries if kept is not None else 0,
            prefix_hits=kept.hits if kept is not None else 0,
            preemptions=self._preemptions,
        )

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    def verify(self, prompts: Sequence[list[int]]) -> str:
        verify(self, self._network, prompts)
        return ""

    def forget(self) -> None:
        self._prefixes = Prefixes(_PREFIXES) if self._prefixes is not None else None
        self._preemptions = 0

    def close(self) -> None:
        self._rows.clear()
        self._waiting.clear()
        self._batches.clear()
        self._reading = self._prefixes = self._grammars = None
        on_gpu = self._network.device.type == "cuda"
        del self._network
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()

    def _use_threads(self, threads: int) -> None:
        # PyTorch keeps the size of its pool per calling thread.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        self._threads = threads

    def _used(self) -> int:
        return sum(row.size for row in self._rows.values() if row.batch is not None)

    def _wait(self, row: BatchRow) -> None:
        row.batch = row.search = None
        insort(self._waiting, row, key=lambda other: other.rank)

    def _make_room(self) -> None:
        """Preempt the rows of lowest priority until every running row can grow by a token."""
        if not self.cache_tokens:
            return
        running = [row for row in self._rows.values() if row.batch is not None]
        need = sum(row.size + row.width for row in running)
        while need > self.cache_tokens and len(running) > 1:
            victim = max(running, key=lambda row: row.rank)
            running.remove(victim)
            need -= victim.size + victim.width
            self._leave(victim)
            self._wait(victim)
            self._preemptions += 1
        if self._prefixes is not None:
            self._prefixes.shrink(max(0, self.cache_tokens - need))

    def _leave(self, row: BatchRow) -> None:
        """Remove a row from the queue or its batch."""
        if row.batch is None:
            self._waiting.remove(row)
            return
        batch = row.batch
        if self._reading is not None and self._reading.batch is batch:
            # Only a single row is read in several chunks.
            row.batch = self._reading = None
            return
        batch.remove(row)
        if not batch.members:
            self._batches.remove(batch)

    def _read(self, limit: int, progress: list[Progress]) -> int:
        """Prefill at most one chunk of waiting prompts, of ``limit`` columns; returns the number of columns."""
        left = limit
        while left > 0:
            self._compute_media(progress)
            reading = self._reading or self._start(left, limit)
            if reading is None:
                break
            spent = reading.columns * len(reading.batch.members)
            logits = reading.advance(left)
            if logits is None:
                self._reading = reading
                return limit
            left -= spent
            self._reading = None
            self._batches.append(reading.batch)
            for row in reading.batch.members:
                self._keep(reading.batch, row)
            progress += self._advance(reading.batch, logits)
        return limit - left

    def _compute_media(self, progress: list[Progress]) -> None:
        """Compute the features of the next prompt to read; fail prompts for which that is not possible."""
        while self._reading is None and self._waiting:
            row = self._waiting[0]
            if row.media is None or row.media.ready:
                return
            assert self._network.media is not None
            adapter = row.sampling.lora_name
            self._network.use(adapter)
            try:
                self._network.media.compute(row.media, adapter)
            except Exception as error:  # depends on the network, and on the size of the item
                del self._waiting[0], self._rows[row.id]
                refusal = invalid(f"the model cannot read the images or the sound of the prompt: {one_line(error)}")
                progress.append(Progress(row.id, error=refusal))

    def _start(self, columns: int, limit: int) -> Reading | None:
        """Move the first waiting row into a new batch, with further rows as long as their prompts fit ``columns``.

        ``limit`` are the columns of this step.
        """
        started: list[BatchRow] = []
        known: list[Any] = []
        width = sum(row.width for row in self._rows.values() if row.batch is not None)
        used = self._used()
        longest = 0
        while self._waiting:
            row = self._waiting[0]
            width += row.width
            used += row.width * (len(row.tokens) + 1)
            if width > self.max_sequences or (self.cache_tokens and used > self.cache_tokens):
                break
            alone = row.width > 1 or not self.padded or row.media is not None
            longest = max(longest, len(row.tokens))
            if started:
                if alone or row.sampling.lora_name != started[0].sampling.lora_name:
                    break
                if longest * (len(started) + 1) > columns:
                    break
            elif columns < min(longest, limit // 2):
                # The rest of this step's chunk is too small for a separate run.
                break
            if self._prefixes is not None and not (row.media is not None and row.media.whole):
                known = self._prefixes.find(row.sampling.prefix_key, row.keyed_tokens)
                if started and known:
                    known = []
                    break
                row.cached = BLOCK * len(known)
                self._prefixes.count(len(row.tokens), row.cached)
            started.append(self._waiting.pop(0))
            if alone or known or longest > columns:
                break
        return self._start_reading(started, known) if started else None

    def _start_reading(self, rows: list[BatchRow], known: list[Any]) -> Reading:
        for row in rows:
            if row.width > 1:
                row.search = BeamSearch(row.tokens, row.sampling, row.end_ids, row.max_length - row.prompt_length)
        batch = RunningBatch(self._network, rows, padded=self.padded)
        if batch.padded is None or not known:
            return Reading(batch)
        batch.padded.cache.restore(known, BLOCK * len(known))
        return Reading(batch, BLOCK * len(known))

    def _advance(self, batch: RunningBatch, logits: Tensor) -> list[Progress]:
        """Choose the next tokens and remove finished rows from the batch."""
        [first, *_] = batch.members
        if first.search is not None:
            going, progress = sample_beams(first, logits.numpy(force=True))
            if going:
                batch.select(going)
        else:
            progress = sample_rows(batch.members, logits)
        for step in progress:
            if (step.finish or step.error is not None) and (row := self._rows.pop(step.id, None)) is not None:
                self._keep(batch, row)
                self._leave(row)
        return progress

    def _keep(self, batch: RunningBatch, row: BatchRow) -> None:
        """Store the cached tokens of a row for later prompts with the same prefix."""
        if row.media is not None and row.media.whole:
            return  # the tokens depend on later ones
        if self._prefixes is not None and batch.padded is not None and row.search is None:
            cache, index = batch.padded.cache, batch.members.index(row)
            self._prefixes.keep(row.sampling.prefix_key, row.keyed_tokens[: cache.lengths()[index]], cache, index)

    def _join(self) -> None:
        """Merge compatible batches."""
        for batch in self._batches[1:]:
            for other in self._batches:
                if other is batch:
                    break
                if other.takes(batch):
                    other.adopt(batch)
                    self._batches.remove(batch)
                    break
