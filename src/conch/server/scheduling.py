"""Chooses the scheduler of a model from its configuration: the one place where that is decided."""

from __future__ import annotations

from typing import Any

from conch.backends.table import backend_of
from conch.config.schema import InstanceGroup, ModelConfig, scheduler
from conch.config.signature import parameters
from conch.errors import invalid, unsupported
from conch.inference import ModelSignature
from conch.lengths import CPU_TOKENS, GPU_TOKENS
from conch.schedulers.batching import DirectScheduler, DynamicBatcher, Scheduler
from conch.schedulers.queue import QueuePolicy, RequestQueue
from conch.schedulers.tokens import TokenBatcher


def make_scheduler(config: ModelConfig, signature: ModelSignature, limit: int) -> Scheduler:
    """The scheduler for one version; ``limit`` bounds its queue where the configuration does not.

    Raises UNSUPPORTED for a kind of scheduling that this server does not have.
    """
    kind = scheduler(config)
    backend = backend_of(config.backend, parameters(config))
    if kind == "sequence_batching":
        raise unsupported(f"model '{config.name}' asks for sequence batching, which this server does not have yet")
    if kind != "dynamic_batching" or (config.max_batch_size < 1 and not backend.generates):
        return DirectScheduler(RequestQueue(limit=limit))
    batching = config.dynamic_batching
    queue = RequestQueue(
        _policy(batching.default_queue_policy),
        levels=batching.priority_levels,
        default_level=batching.default_priority_level,
        level_policies={level: _policy(policy) for level, policy in batching.priority_queue_policy.items()},
        limit=limit,
    )
    if backend.generates:
        return DirectScheduler(queue)
    if backend.prepares:
        return TokenBatcher(
            queue,
            max_batch_size=config.max_batch_size,
            max_batch_tokens=_token_budget(config),
            enough=max(batching.preferred_batch_size, default=config.max_batch_size),
            max_delay_us=batching.max_queue_delay_microseconds,
        )
    return DynamicBatcher(
        queue,
        signature,
        preferred=tuple(batching.preferred_batch_size),
        max_delay_us=batching.max_queue_delay_microseconds,
    )


def preserves_ordering(config: ModelConfig) -> bool:
    return scheduler(config) == "dynamic_batching" and bool(config.dynamic_batching.preserve_ordering)


def _token_budget(config: ModelConfig) -> int:
    """Tokens of a batch: the parameter ``max_batch_tokens``, or what keeps the kind of device busy."""
    text = parameters(config).get("max_batch_tokens", "0")
    if not (text.isascii() and text.isdigit()):
        raise invalid(f"parameter 'max_batch_tokens' is '{text}'; it must be a whole number that is not negative")
    on_gpu = any(group.kind == InstanceGroup.KIND_GPU for group in config.instance_group)
    return int(text) or (GPU_TOKENS if on_gpu else CPU_TOKENS)


def _policy(policy: Any) -> QueuePolicy:
    return QueuePolicy(
        max_queue_size=policy.max_queue_size,
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        delay_when_late=policy.timeout_action == policy.DELAY,
    )
