"""The sequence batching settings of a model configuration, as used by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from conch.config.schema import ModelConfig
from conch.server.schedulers.queue import NS_PER_US


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """The sequence batching settings of a model; times in nanoseconds.

    ``slots`` is the number of sequences that an instance has at a time. With the direct strategy, each sequence has its
    own row of the batch; with the ``oldest`` strategy, the first requests of all sequences are batched dynamically.
    ``max_idle`` is the maximum time that a sequence may be without requests. No request runs before ``hold`` requests
    have arrived for sequences with a slot and ``hold_backlog`` requests for sequences without.
    """

    model: str
    max_batch_size: int
    slots: int
    max_idle: int
    max_delay: int = 0
    minimum_utilization: float = 0.0
    oldest: bool = False
    preferred: tuple[int, ...] = ()
    preserve_ordering: bool = False
    iterative: bool = False
    limit: int = 0
    hold: int = 0
    hold_backlog: int = 0


def sequence_policy(config: ModelConfig, *, limit: int = 0, hold: int = 0, hold_backlog: int = 0) -> SequencePolicy:
    """Return the policy of an effective configuration; ``limit`` bounds the waiting requests, 0 for no limit."""
    batching = config.sequence_batching
    oldest = batching.HasField("oldest")
    strategy = batching.oldest if oldest else batching.direct
    rows = max(config.max_batch_size, 1)
    return SequencePolicy(
        model=config.name,
        max_batch_size=config.max_batch_size,
        slots=(batching.oldest.max_candidate_sequences or rows) if oldest else rows,
        max_idle=batching.max_sequence_idle_microseconds * NS_PER_US,
        max_delay=strategy.max_queue_delay_microseconds * NS_PER_US,
        minimum_utilization=batching.direct.minimum_slot_utilization,
        oldest=oldest,
        preferred=tuple(batching.oldest.preferred_batch_size),
        preserve_ordering=batching.oldest.preserve_ordering,
        iterative=batching.iterative_sequence,
        limit=limit,
        hold=hold,
        hold_backlog=hold_backlog,
    )
