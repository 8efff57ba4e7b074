"""Chooses the scheduler of a model from its configuration: the one place where that is decided."""

from __future__ import annotations

from typing import Any

from conch.config.schema import ModelConfig, scheduler
from conch.errors import unsupported
from conch.inference import ModelSignature
from conch.schedulers.batching import DirectScheduler, DynamicBatcher, Scheduler
from conch.schedulers.queue import QueuePolicy, RequestQueue


def make_scheduler(config: ModelConfig, signature: ModelSignature, limit: int) -> Scheduler:
    """The scheduler for one version; ``limit`` bounds its queue where the configuration does not.

    Raises UNSUPPORTED for a kind of scheduling that this server does not have.
    """
    kind = scheduler(config)
    if kind == "sequence_batching":
        raise unsupported(f"model '{config.name}' asks for sequence batching, which this server does not have yet")
    if kind != "dynamic_batching" or config.max_batch_size < 1:
        return DirectScheduler(RequestQueue(limit=limit))
    batching = config.dynamic_batching
    queue = RequestQueue(
        _policy(batching.default_queue_policy),
        levels=batching.priority_levels,
        default_level=batching.default_priority_level,
        level_policies={level: _policy(policy) for level, policy in batching.priority_queue_policy.items()},
        limit=limit,
    )
    return DynamicBatcher(
        queue,
        signature,
        preferred=tuple(batching.preferred_batch_size),
        max_delay_us=batching.max_queue_delay_microseconds,
    )


def preserves_ordering(config: ModelConfig) -> bool:
    return scheduler(config) == "dynamic_batching" and bool(config.dynamic_batching.preserve_ordering)


def _policy(policy: Any) -> QueuePolicy:
    return QueuePolicy(
        max_queue_size=policy.max_queue_size,
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        delay_when_late=policy.timeout_action == policy.DELAY,
    )
