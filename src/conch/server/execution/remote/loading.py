"""Loads a remote model: completes its configuration from its servers and creates its executor."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

from conch.config import render
from conch.config.complete import normalise
from conch.config.remote import read_remote, take_over
from conch.config.schema import ModelConfig, copied, scheduler
from conch.core.errors import ConchError, unavailable
from conch.server.execution.remote.connecting import connecting
from conch.server.execution.remote.executor import RemoteExecutor, RemoteSequences
from conch.telemetry.statistics import ModelStatistics
from conch.workers.child.packing import OutputWatch

LOG = logging.getLogger("conch")

#: Default idle time after which a sequence is no longer pinned to its server (s).
_IDLE_SECONDS: Final = 600.0


async def complete_remote(config: ModelConfig, directory: Path) -> ModelConfig:
    """Complete ``config`` with the configuration on a server of the model; unchanged if it has inputs or outputs.

    Raises UNAVAILABLE if no server returns its configuration.
    """
    settings = read_remote(config).of_version(-1)
    if config.input or config.output:
        return config
    asker = RemoteExecutor(
        config.name,
        settings,
        await connecting(settings, directory, decoupled=False),
        ModelStatistics(config.name, 0),
        decoupled=False,
        limit=0,
        idle_seconds=_IDLE_SECONDS,
    )
    try:
        await asker.start()
        theirs = await asker.config()
    except ConchError as error:
        raise unavailable(
            f"the configuration of remote model '{config.name}' cannot be completed: {error.message}. With input and "
            "output written in its configuration it loads while its server is away"
        ) from None
    finally:
        await asker.stop(0)
    return _merged(config, theirs)


def _merged(config: ModelConfig, theirs: ModelConfig) -> ModelConfig:
    completed = copied(config)
    take_over(completed, theirs)
    normalise(completed)
    read_remote(completed)  # the decoupled property is known only now: check that the addresses support it
    return completed


async def make_executor(
    config: ModelConfig,
    version: int,
    directory: Path,
    statistics: ModelStatistics,
    limit: int,
    key: str,
    sequences: RemoteSequences,
) -> RemoteExecutor:
    """Create and start the executor of a model version with a completed configuration.

    ``limit`` is the maximum number of in-flight requests; for ``key`` and ``sequences`` see :class:`RemoteExecutor`.
    """
    settings = read_remote(config).of_version(version)
    decoupled = config.model_transaction_policy.decoupled
    idle = _IDLE_SECONDS
    if scheduler(config) == "sequence_batching":
        idle = config.sequence_batching.max_sequence_idle_microseconds / 1e6
    watch = OutputWatch(config.name, lambda message: LOG.warning("%s", message))
    watch.declare(json.loads(render.to_json(config)))
    executor = RemoteExecutor(
        config.name,
        settings,
        await connecting(settings, directory, decoupled=decoupled),
        statistics,
        decoupled=decoupled,
        limit=limit,
        idle_seconds=idle,
        key=key,
        sequences=sequences,
        watch=watch,
    )
    try:
        await executor.start()
    except BaseException:
        await executor.stop(0)
        raise
    return executor
