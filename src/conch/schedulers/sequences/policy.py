"""What a configuration says of sequences, as the scheduler needs it."""

from __future__ import annotations

from dataclasses import dataclass

from conch.config.schema import ModelConfig
from conch.schedulers.queue import NS_PER_US


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """How the sequences of a model are batched.

    ``slots`` is how many sequences an instance has at a time.  Without ``oldest`` each has a row of the batch to
    itself; with it the heads of all sequences are batched dynamically.  Times are in nanoseconds; ``max_idle`` is how
    long a sequence may be without requests.  ``hold`` and ``hold_backlog`` are how many requests must have come before
    anything runs: to sequences with a slot, and to those without one.
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
    """The policy of an effective configuration; ``limit`` bounds the requests that wait, 0 for any number."""
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
