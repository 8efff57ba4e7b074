"""In-flight batching over a decoder: sequences join and leave the batch at every step.

A step decodes a token for each running sequence and reads chunks of prompts, in the same run of the decoder. Sequences
that use an adapter have a separate run. Prompts are read in the order of rank (priority, then arrival);
``step_budget.py`` limits their tokens. With speculative decoding (``proposers.py``), a step may decode several tokens.

If the KV cache is full, retained prefixes are freed first (``sequence_cache.py``). Then the running sequence of the
lowest rank is preempted: it waits again and later continues after its tokens. The sequence of the highest rank is never
preempted, so that all sequences end.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby
from math import lcm
from operator import attrgetter
from time import perf_counter
from typing import Final

import numpy as np

from conch.backends.batching.decoder import Chunk, Decoder, Logits, MediaSpan
from conch.backends.batching.prefixes import common_length
from conch.backends.batching.proposers import DraftModel, Lookahead, PromptLookup, Proposer, lookahead_limit
from conch.backends.batching.sampler import BeamSearch, SequenceState, logprobs, sample, sample_beams
from conch.backends.batching.sampling_engine import SamplingEngine
from conch.backends.batching.sequence_cache import SequenceCache
from conch.backends.batching.step_budget import FLOOR, StepBudget
from conch.backends.generation.engine import (
    EngineRequest,
    EngineSpec,
    EngineUsage,
    Progress,
    TokenLogprobs,
)
from conch.backends.generation.features import BATCHER_FEATURES
from conch.backends.generation.lora import LoraWeights
from conch.core.errors import invalid, unavailable
from conch.core.sampling.parameters import Feature

#: The default number of sequences in the batch.
SEQUENCES: Final = 48
#: The size of the chunks of a prompt if results must not depend on the batch (tokens).
INVARIANT_CHUNK: Final = 128
#: The maximum number of prompt tokens in a step whose log-probabilities are requested.
SCORED_CHUNK: Final = 128
#: The maximum number of proposed tokens in a step, which limits the memory of their logits.
CHECKED_TOKENS: Final = 256


@dataclass(slots=True, eq=False)
class BatchSequence(SequenceState):
    """A request in the batch, or waiting for it.

    ``slots`` are its slots in the decoder, one per beam with beam search; it has none while it waits. Each slot holds
    ``read`` tokens. A preempted sequence waits until ``blocks`` blocks are available, because it needed more. A
    sequence may also wait until ``reader`` has read ``awaited`` tokens, which both begin with.
    """

    slots: list[int] = field(default_factory=list)
    read: int = 0
    blocks: int = 0
    reader: BatchSequence | None = None
    awaited: int = 0
    #: The log-probabilities of the prompt's tokens after the first that have been computed; None: not requested.
    prompt_logprobs: list[TokenLogprobs] | None = None
    lookahead: Lookahead = field(default_factory=lambda: Lookahead(0))
    #: The images and recordings of the prompt.
    media: Sequence[MediaSpan] = ()

    @property
    def adapter(self) -> str:
        return self.sampling.lora_name

    @property
    def prefix_key(self) -> str:
        return self.sampling.prefix_key

    @property
    def reading(self) -> bool:
        """Whether tokens remain to be read other than the one that was chosen last."""
        return self.search is None and len(self.tokens) - self.read > 1

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are left to compute."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1

    def score_prompt(self, start: int, logits: Logits) -> None:
        """Add the log-probabilities of prompt tokens by the logits after token ``start`` and those that follow."""
        assert self.prompt_logprobs is not None and len(self.prompt_logprobs) == start
        self.prompt_logprobs += [
            logprobs(scores, self.tokens[position], self.sampling.prompt_logprobs or 0)
            for scores, position in zip(logits, range(start + 1, self.prompt_length), strict=False)
        ]

    @property
    def last_tokens(self) -> list[int]:
        """The last token of the sequence, or of each beam."""
        return [self.tokens[-1]] if self.search is None else [beam.tokens[-1] for beam in self.search.running]

    @property
    def waits_for_reader(self) -> bool:
        """Whether the tokens that ``reader`` reads for both are not in the cache yet."""
        return self.reader is not None and bool(self.reader.slots) and self.reader.read < self.awaited


@dataclass(slots=True)
class ScheduledSequence:
    """The chunks of a sequence in a step, one for each of its slots; the only chunk may end with proposed tokens."""

    sequence: BatchSequence
    chunks: list[Chunk]
    proposed: Sequence[int] = ()


_rank = attrgetter("rank")


class InFlightBatcher(SamplingEngine):
    """An engine over a ``decoder``. Subclasses set ``name`` and ``library``.

    With ``spec.batch_invariant``, each chunk has a separate run, and its boundaries do not depend on other sequences.
    ``draft`` is the decoder of the draft model of ``spec``. Raises INVALID_ARG if it cannot be used.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: EngineSpec,
        *,
        draft: Decoder | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._decoder, self._clock = decoder, clock
        self.block_tokens = decoder.block_tokens
        self.cache_tokens = decoder.blocks * decoder.block_tokens
        self.context = min(decoder.context, self.cache_tokens)
        self.vocabulary = decoder.vocabulary
        self.token_bytes = decoder.token_bytes
        self.precision = decoder.precision
        self.adapters = tuple(decoder.adapters)
        self.warnings = decoder.warnings
        self.preparer = decoder.preparer
        self.media = frozenset(decoder.preparer.marks) if decoder.preparer is not None else frozenset()
        self.batch_invariant = spec.batch_invariant
        self.max_sequences = max(1, min(spec.max_sequences or SEQUENCES, decoder.slots, decoder.batched_tokens - 1))
        self._proposer: Proposer | None = None
        if spec.speculative:
            self._proposer = self._open_proposer(decoder, spec, draft)
            self.max_sequences = min(self.max_sequences, draft.slots if draft is not None else self.max_sequences)
        self._lookahead = lookahead_limit(spec)
        self.features = BATCHER_FEATURES
        if not decoder.rewinds:
            self.features -= {Feature.BEAMS}
        self.loads_adapters = decoder.loads_adapters
        self.open_grammars(spec)
        limit = min(spec.max_batched_tokens or decoder.batched_tokens, decoder.batched_tokens)
        self._budget = StepBudget(limit)
        #: The size of chunks that start at multiples of it; 0 if the size follows from the budget.
        self._chunk = min(INVARIANT_CHUNK, limit) if spec.batch_invariant else 0
        self._unit = lcm(self._chunk or decoder.block_tokens, decoder.block_tokens)
        self._cache = SequenceCache(decoder, self._unit, retains=spec.prefix_caching and decoder.rewinds)
        self._sequences: dict[int, BatchSequence] = {}
        # Both by rank.
        self._waiting: list[BatchSequence] = []
        self._running: list[BatchSequence] = []
        self._prefix_queries = self._prefix_hits = self._preemptions = 0

    def add(self, request: EngineRequest) -> None:
        sequence = self.new_sequence(BatchSequence, request)
        if self._decoder.preparer is not None:
            sequence.media = self._decoder.media_spans(request.prompt, request.media)
        if request.sampling.prompt_logprobs is not None:
            if sequence.media:
                raise invalid("prompt_logprobs are not supported for prompts with images or recordings")
            sequence.prompt_logprobs = []
        # Proposed tokens would come from the placeholders, too.
        sequence.lookahead = Lookahead(0 if sequence.media else self._lookahead)
        self._sequences[sequence.id] = sequence
        insort(self._waiting, sequence, key=_rank)

    def attach_adapter(self, key: str, adapter: LoraWeights) -> None:
        self._decoder.attach_adapter(key, adapter)

    def detach_adapter(self, key: str) -> None:
        self._decoder.detach_adapter(key)

    def step(self) -> list[Progress]:
        progress: list[Progress] = []
        scheduled = self._schedule_decoding(progress)
        if self._proposer is not None:
            self._add_proposals(scheduled, self._proposer)
        rows = sum(len(chunk.tokens) for entry in scheduled for chunk in entry.chunks)
        scheduled += self._schedule_prompts(rows, progress)
        unusual = any(entry.sequence.scores_prompt or any(chunk.media for chunk in entry.chunks) for entry in scheduled)
        seconds = 0.0
        for adapter, group in _by_adapter(scheduled) if Feature.LORA in self.features else [("", scheduled)]:
            # A beam search of an earlier group may have preempted sequences of this one.
            group = [entry for entry in group if entry.sequence.slots]
            if group:
                before = self._clock()
                logits = self._compute([chunk for entry in group for chunk in entry.chunks], adapter)
                seconds += self._clock() - before
                progress += self._advance(group, logits)
        # Logits of all tokens of a prompt, and images, take longer than the last logits, which the budget is about.
        if scheduled and not unusual:
            self._budget.measure(
                rows, sum(len(chunk.tokens) for entry in scheduled for chunk in entry.chunks) - rows, seconds
            )
        return progress

    def cancel(self, id: int) -> None:
        sequence = self._sequences.get(id)
        if sequence is not None:
            self._end(sequence)

    def usage(self) -> EngineUsage:
        return EngineUsage(
            running=len(self._running),
            waiting=len(self._waiting),
            used_tokens=self._cache.running_tokens,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
        )

    def forget(self) -> None:
        self._cache.clear()
        self._prefix_queries = self._prefix_hits = self._preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self._sequences)

    def close(self) -> None:
        for sequence in list(self._sequences.values()):
            self._end(sequence)
        self._cache.clear()
        self._decoder.close()
        if self._proposer is not None:
            self._proposer.close()
        self._grammars = None

    def _open_proposer(self, decoder: Decoder, spec: EngineSpec, draft: Decoder | None) -> Proposer:
        if spec.batch_invariant:
            raise invalid("speculative decoding depends on the batch: remove parameter 'batch_invariant'")
        if not decoder.rewinds or (draft is not None and not draft.rewinds):
            raise invalid("speculative decoding is not supported for models with a recurrent state")
        return DraftModel(draft, decoder.vocabulary) if draft is not None else PromptLookup()

    def _schedule_decoding(self, progress: list[Progress]) -> list[ScheduledSequence]:
        """Return the next chunk of each sequence that decodes, and make room for it; may preempt or fail sequences."""
        return [
            ScheduledSequence(sequence, self._decode_chunks(sequence))
            for sequence in list(self._running)
            if sequence.slots and not sequence.reading and self._grow(sequence, progress)
        ]

    def _decode_chunks(self, sequence: BatchSequence) -> list[Chunk]:
        return [
            self._chunk_of(sequence, slot, [token])
            for slot, token in zip(sequence.slots, sequence.last_tokens, strict=True)
        ]

    def _add_proposals(self, scheduled: Sequence[ScheduledSequence], proposer: Proposer) -> None:
        """Extend the chunks of decoding sequences by proposed tokens, as far as there is room without preemption."""
        # Half of the rest is for prompts.
        rest = self._decoder.batched_tokens - sum(len(entry.chunks) for entry in scheduled)
        left = min(rest // 2, CHECKED_TOKENS)
        entries: list[ScheduledSequence] = []
        wanted: list[tuple[int, list[int], int]] = []
        for entry in scheduled:
            sequence = entry.sequence
            # The token after the last proposed one must fit, too.
            most = min(sequence.max_length - len(sequence.tokens) - 1, left)
            if most > 0 and sequence.width == 1 and sequence.slots and (length := sequence.lookahead.next()):
                entries.append(entry)
                wanted.append((sequence.id, sequence.tokens, min(length, most)))
                left -= min(length, most)
        if not entries:
            return
        for entry, proposed in zip(entries, proposer.propose(wanted), strict=True):
            sequence = entry.sequence
            [slot] = sequence.slots
            if proposed and self._cache.grow(slot, sequence.read + 1 + len(proposed)):
                chunk = self._chunk_of(sequence, slot, [sequence.tokens[-1], *proposed])
                chunk.wanted = len(chunk.tokens)
                entry.chunks, entry.proposed = [chunk], proposed

    def _schedule_prompts(self, rows: int, progress: list[Progress]) -> list[ScheduledSequence]:
        """Return the next chunks of prompts beside ``rows`` decoding rows, by rank; starts waiting sequences."""
        scheduled: list[ScheduledSequence] = []
        reading = [sequence for sequence in self._running if sequence.reading]
        if not reading and not self._waiting:
            return scheduled
        left = min(self._budget.tokens(rows), self._decoder.batched_tokens - rows)
        full = scored = False
        for sequence in merge(reading, self._waiting[: self.max_sequences], key=_rank):
            if left <= 0:
                break
            if sequence.scores_prompt and scored:
                continue
            if not sequence.slots:
                if full or self._is_being_read(sequence):
                    continue
                if not self._start(sequence):
                    # Sequences of lower rank must not overtake this one.
                    full = True
                    if not self._running:
                        progress.append(self._fail(sequence))
                    continue
            size = self._chunk_size(sequence, left)
            if sequence.scores_prompt:
                # Limits the memory of the logits, and the delay of the sequences that decode, which is not measured.
                scored, size = True, min(size, FLOOR if rows and not self._chunk else SCORED_CHUNK)
            left -= size
            end = sequence.read + size
            end = next((span.end for span in sequence.media if span.start < end < span.end), end)
            chunk = self._chunk_of(sequence, sequence.slots[0], sequence.tokens[sequence.read : end])
            chunk.wanted = size if sequence.scores_prompt else int(end == len(sequence.tokens))
            scheduled.append(ScheduledSequence(sequence, [chunk]))
        return scheduled

    def _chunk_size(self, sequence: BatchSequence, left: int) -> int:
        """Return how many of the sequence's tokens to read in this step if ``left`` tokens may be read."""
        remaining = len(sequence.tokens) - sequence.read
        if not self._chunk:
            return min(remaining, left)
        if sequence.read >= sequence.prompt_length:
            # A preempted sequence reads the tokens that it had generated, one at a time, as at first.
            return 1
        return min(self._chunk - sequence.read % self._chunk, sequence.prompt_length - sequence.read)

    def _chunk_of(self, sequence: BatchSequence, slot: int, tokens: list[int]) -> Chunk:
        start, end = sequence.read, sequence.read + len(tokens)
        blocks, needed = self._cache.blocks(slot), self._cache.blocks_for(end)
        media = [span for span in sequence.media if span.end > start and span.start < end]
        return Chunk(slot, start, tokens, 1, blocks if len(blocks) == needed else blocks[:needed], media)

    def _is_being_read(self, sequence: BatchSequence) -> bool:
        """Whether a sequence of higher rank reads a longer common beginning than the cache has.

        The sequence then waits, so that both do not compute it.
        """
        if not self._cache.retains or sequence.scores_prompt:
            return False
        if sequence.waits_for_reader:
            return True
        sequence.reader, known = None, -1
        shareable, key = self._shareable_tokens(sequence), sequence.prefix_key
        for other in self._running:
            if other.rank < sequence.rank and other.read < other.prompt_length and other.prefix_key == key:
                if known < 0:
                    known = self._cache.known(key, shareable)
                length = common_length(shareable, self._shareable_tokens(other), self._unit)
                if length > known:
                    sequence.reader, sequence.awaited = other, length
                    return True
        return False

    def _start(self, sequence: BatchSequence) -> bool:
        """Move a waiting sequence into the batch; returns False if there is no room."""
        if sum(running.width for running in self._running) + sequence.width > self.max_sequences:
            return False
        # Each beam needs a block for its tokens.
        blocks = self._cache.blocks_for(len(sequence.tokens) + 1) + sequence.width - 1
        # A cached prefix has no logits.
        shareable = [] if sequence.scores_prompt else self._shareable_tokens(sequence)
        started = self._cache.start(sequence.prefix_key, shareable, len(sequence.tokens), max(blocks, sequence.blocks))
        if started is None:
            return False
        slot, sequence.read = started
        sequence.reader = None
        if sequence.scores_prompt:
            sequence.prompt_logprobs = []  # a preempted sequence reads its prompt again
        sequence.slots = [slot]
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_rank)
        if self._cache.retains and len(sequence.tokens) == sequence.prompt_length:
            self._prefix_queries += sequence.prompt_length
            self._prefix_hits += sequence.read
            sequence.cached = sequence.read if sequence.cached is None else sequence.cached
        return True

    def _grow(self, sequence: BatchSequence, progress: list[Progress]) -> bool:
        """Make room for a token in each slot; returns False if the sequence left the batch for lack of room."""
        for slot in sequence.slots:
            while not self._cache.grow(slot, sequence.read + 1):
                if not self._make_room(sequence, progress):
                    return False
        return True

    def _make_room(self, sequence: BatchSequence, progress: list[Progress]) -> bool:
        """Preempt the running sequence of the lowest rank; returns False if ``sequence`` itself left the batch."""
        victim = self._running[-1]
        if len(self._running) == 1:
            progress.append(self._fail(sequence))
            return False
        held = {block for slot in victim.slots for block in self._cache.blocks(slot)}
        self._leave(victim)
        # Beam search starts again, because its state can be computed from the prompt.
        victim.search, victim.blocks = None, len(held) + 1
        insort(self._waiting, victim, key=_rank)
        self._preemptions += 1
        return victim is not sequence

    def _fail(self, sequence: BatchSequence) -> Progress:
        self._end(sequence)
        return Progress(sequence.id, error=unavailable("the KV cache is too small for the sequence"))

    def _compute(self, chunks: list[Chunk], adapter: str) -> Logits:
        if not self._chunk or len(chunks) == 1:
            return self._decoder.run(chunks, adapter)
        return np.concatenate([self._decoder.run([chunk], adapter).copy() for chunk in chunks])

    def _advance(self, scheduled: Sequence[ScheduledSequence], logits: Logits) -> list[Progress]:
        """Choose the next tokens after the chunks of a run; ended sequences leave the batch."""
        rows: list[BatchSequence] = []
        indices: list[int] = []
        beams: list[tuple[BatchSequence, Logits]] = []
        checked: dict[int, tuple[ScheduledSequence, int]] = {}
        index = 0
        for entry in scheduled:
            sequence = entry.sequence
            # Proposed tokens follow when they have been accepted.
            sequence.read += len(entry.chunks[0].tokens) - len(entry.proposed)
            if sequence.search is None:
                self._record(sequence)
            wanted = sum(chunk.wanted for chunk in entry.chunks)
            if sequence.scores_prompt:
                sequence.score_prompt(entry.chunks[0].start, logits[index : index + wanted])
                if sequence.read == len(sequence.tokens):
                    rows.append(sequence)
                    indices.append(index + wanted - 1)
            elif wanted and sequence.width > 1:
                beams.append((sequence, logits[index : index + wanted]))
            elif wanted:
                rows.append(sequence)
                indices.append(index)
            if entry.proposed:
                checked[sequence.id] = entry, index
            index += wanted
        progress = sample(rows, logits if len(rows) == index else logits[indices]) if rows else []
        if checked:
            self._check_proposals(checked, progress, logits)
        for step, sequence in zip(progress, rows, strict=True):
            if len(sequence.tokens) - len(step.tokens) == sequence.prompt_length:
                step.prompt_logprobs = sequence.prompt_logprobs
            if step.finish or step.error is not None:
                self._end(self._sequences[step.id])
        for sequence, values in beams:
            if sequence.slots:  # an earlier beam search may have preempted it
                self._advance_beams(sequence, values, progress)
        return progress

    def _check_proposals(
        self, checked: Mapping[int, tuple[ScheduledSequence, int]], progress: Sequence[Progress], logits: Logits
    ) -> None:
        """Choose further tokens after proposed ones, as long as those are the chosen ones; adds them to ``progress``.

        ``checked`` has the scheduled sequences with proposals by id, each with the index of the first row of its
        ``logits``.
        """
        going = [step for step in progress if step.id in checked]
        accepted = 0
        while going := [
            step
            for step in going
            if not step.finish
            and step.error is None
            and accepted < len(checked[step.id][0].proposed)
            and step.tokens[-1] == checked[step.id][0].proposed[accepted]
        ]:
            accepted += 1
            rows = [checked[step.id] for step in going]
            further = sample([entry.sequence for entry, _ in rows], logits[[index + accepted for _, index in rows]])
            for step, more in zip(going, further, strict=True):
                step.tokens = [*step.tokens, *more.tokens]
                step.finish, step.error = more.finish, more.error
                if step.logprobs is not None:
                    step.logprobs += more.logprobs or []
        for entry, _ in checked.values():
            sequence, proposed = entry.sequence, len(entry.proposed)
            taken = len(sequence.tokens) - 1 - sequence.read
            sequence.lookahead.learn(proposed, taken)
            sequence.read += taken
            self._record(sequence)
            if taken < proposed:
                self._cache.shorten(sequence.slots[0], sequence.read)

    def _advance_beams(self, sequence: BatchSequence, logits: Logits, progress: list[Progress]) -> None:
        if sequence.search is None:
            sequence.search = BeamSearch(
                sequence.tokens, sequence.sampling, sequence.end_ids, sequence.max_length - sequence.prompt_length
            )
            logits = np.repeat(logits, sequence.width, axis=0)
        parents, results = sample_beams(sequence, logits)
        progress += results
        if results:
            self._end(sequence)
            return
        before = sequence.slots if len(sequence.slots) > 1 else sequence.slots * sequence.width
        sources = [before[parent] for parent in parents]
        for slot in set(before).difference(sources):
            self._cache.free(slot)
        # The first beam that continues a slot keeps it, the others get copies.
        sequence.slots = list(dict.fromkeys(sources))
        free = set(sequence.slots)
        slots: list[int] = []
        for source in sources:
            copy = source if source in free else self._fork(sequence, source, progress)
            if copy is None:
                return
            free.discard(source)
            slots.append(copy)
        sequence.slots = slots

    def _fork(self, sequence: BatchSequence, source: int, progress: list[Progress]) -> int | None:
        """Give a beam search a copy of one of its slots; returns None if it left the batch for lack of room."""
        while (slot := self._cache.fork(source, sequence.read)) is None:
            if not self._make_room(sequence, progress):
                return None
        sequence.slots.append(slot)
        return slot

    def _record(self, sequence: BatchSequence) -> None:
        self._cache.record(
            sequence.slots[0], sequence.prefix_key, sequence.tokens, self._shareable(sequence, sequence.read)
        )

    def _shareable(self, sequence: BatchSequence, count: int) -> int:
        """Return how many of the first ``count`` tokens a sequence may share with others.

        Beams differ after the prompt, and tokens that were read singly must not replace those of a chunk.
        """
        if sequence.media and (self._chunk or not self._decoder.shares_media):
            count = min(count, sequence.media[0].start)
        return min(count, sequence.prompt_length) if self._chunk or sequence.width > 1 else count

    def _shareable_tokens(self, sequence: BatchSequence) -> list[int]:
        return sequence.tokens[: self._shareable(sequence, len(sequence.tokens))]

    def _leave(self, sequence: BatchSequence) -> None:
        """Remove a sequence from the batch; its tokens stay in the cache as long as there is room."""
        self._running.remove(sequence)
        if self._proposer is not None:
            self._proposer.forget(sequence.id)
        self._record(sequence)
        first, *others = sequence.slots
        for slot in others:
            self._cache.free(slot)
        self._cache.release(first)
        sequence.slots, sequence.read = [], 0

    def _end(self, sequence: BatchSequence) -> None:
        del self._sequences[sequence.id]
        if sequence.slots:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)


def _by_adapter(scheduled: list[ScheduledSequence]) -> Iterator[tuple[str, list[ScheduledSequence]]]:
    adapter = attrgetter("sequence.adapter")
    for name, group in groupby(sorted(scheduled, key=adapter), key=adapter):
        yield name, list(group)
