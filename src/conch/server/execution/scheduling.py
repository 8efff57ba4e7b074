"""Creates the scheduler of a model from its configuration, and reads the initial states of its sequences."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any, Final

from conch.backends.table import Backend, backend_of, sequences_unsupported
from conch.config.reading import read_small
from conch.config.schema import InstanceGroup, ModelConfig, datatype, implementation, scheduler
from conch.config.signature import parameters
from conch.core.errors import internal, invalid, unsupported
from conch.core.inference import ModelSignature
from conch.core.lengths import CPU_TOKENS, GPU_TOKENS
from conch.core.tensors import ELEMENT_SIZE
from conch.server.schedulers.batching import DirectScheduler, DynamicBatcher, HeldScheduler, Scheduler
from conch.server.schedulers.queue import QueuePolicy, RequestQueue
from conch.server.schedulers.sequences.inputs import ControlInputs, StateKeeper, StateTensor, state_tensors
from conch.server.schedulers.sequences.scheduler import SequenceScheduler, sequence_policy
from conch.server.schedulers.tokens import TokenBatcher

#: Number of waiting requests at which a model's batcher starts; for tests, as in Triton.
DELAY_SCHEDULER: Final = "TRITONSERVER_DELAY_SCHEDULER"
#: Folder of the files with initial states in a model's directory.
_STATE_FOLDER: Final = "initial_state"
#: Maximum size of a file (bytes).
_MOST_STATE_BYTES: Final = 1 << 30


def make_scheduler(
    config: ModelConfig, signature: ModelSignature, limit: int, states: tuple[StateTensor, ...] = ()
) -> Scheduler:
    """Create the scheduler of a model version; ``limit`` bounds its queue if the configuration does not.

    ``states`` are the implicit states of a sequence model. Raises UNSUPPORTED if the backend has no sequence batching.
    """
    kind = scheduler(config)
    backend = backend_of(implementation(config), parameters(config))
    if kind == "sequence_batching":
        if not backend.takes_sequences:
            raise unsupported(sequences_unsupported(config.name, config.backend))
        return SequenceScheduler(
            sequence_policy(
                config,
                limit=limit,
                hold=_held(DELAY_SCHEDULER),
                hold_backlog=_held("TRITONSERVER_BACKLOG_DELAY_SCHEDULER"),
            ),
            signature,
            ControlInputs(config.sequence_batching, batched=config.max_batch_size > 0),
            StateKeeper(states),
        )
    if kind != "dynamic_batching" or (config.max_batch_size < 1 and not backend.generates):
        return DirectScheduler(RequestQueue(limit=limit))
    batcher = _make_batcher(config, signature, limit, backend)
    held = _held(DELAY_SCHEDULER)
    return HeldScheduler(batcher, held) if held else batcher


def _make_batcher(config: ModelConfig, signature: ModelSignature, limit: int, backend: Backend) -> Scheduler:
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
            minimum_rows=max(batching.preferred_batch_size, default=config.max_batch_size),
            max_delay_us=batching.max_queue_delay_microseconds,
        )
    return DynamicBatcher(
        queue,
        signature,
        preferred=tuple(batching.preferred_batch_size),
        max_delay_us=batching.max_queue_delay_microseconds,
    )


def _held(variable: str) -> int:
    """The number of waiting requests before a scheduler runs any, from one of Triton's environment variables."""
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def preserves_ordering(config: ModelConfig) -> bool:
    return scheduler(config) == "dynamic_batching" and bool(config.dynamic_batching.preserve_ordering)


def _token_budget(config: ModelConfig) -> int:
    """Tokens per batch: the parameter ``max_batch_tokens``, or a default that keeps the device busy."""
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


def read_states(config: ModelConfig, directory: Path) -> tuple[StateTensor, ...]:
    """Return the states of sequences, with initial values, of the model in ``directory``; blocking.

    Raises INVALID_ARG if a file is too small, INTERNAL if a file cannot be read.
    """
    files = {
        state.input_name: _read_state(initial, directory)
        for state in config.sequence_batching.state
        for initial in state.initial_state
        if initial.WhichOneof("state_data") == "data_file"
    }
    return state_tensors(config, files)


def _read_state(initial: object, directory: Path) -> bytes:
    file: str = initial.data_file  # type: ignore[attr-defined]
    folder = (directory / _STATE_FOLDER).resolve()
    path = (folder / file).resolve()
    if not path.is_relative_to(folder):
        raise internal(f"initial state file '{file}' must be inside the folder '{_STATE_FOLDER}' of the model")
    try:
        data = read_small(path, _MOST_STATE_BYTES)
    except OSError as error:
        raise internal(f"failed to read initial state file '{file}': {error.strerror}") from error
    kind = datatype(initial.data_type)  # type: ignore[attr-defined]
    if kind == "BYTES":
        return data
    expected = ELEMENT_SIZE[kind] * prod(initial.dims)  # type: ignore[attr-defined]
    if len(data) < expected:
        raise invalid(
            f"initial_state setting expects {expected} bytes, but the data provided from {file}only has {len(data)} "
            "bytes."
        )
    return data[:expected]
