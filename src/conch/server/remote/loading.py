"""Loads a model that other servers run: completes its configuration from theirs, and makes its executor."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

from conch.config import render
from conch.config.complete import normalise
from conch.config.remote import read_remote, take_over
from conch.config.schema import ModelConfig, copied, scheduler
from conch.errors import ConchError, unavailable
from conch.server.remote.connecting import connecting
from conch.server.remote.executor import RemoteExecutor, RemoteSequences
from conch.telemetry.statistics import ModelStatistics
from conch.workers.child.outputs import OutputWatch

LOG = logging.getLogger("conch")

#: How long a sequence is kept at its server of which nothing is heard, where the configuration does not say (s).
_IDLE_SECONDS: Final = 600.0


async def complete_remote(config: ModelConfig, directory: Path) -> ModelConfig:
    """``config`` with what it leaves out taken from the server that has the model.

    Raises UNAVAILABLE where none of the servers can be asked.  One with inputs or outputs stays as it is.
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
    read_remote(completed)  # whether a decoupled model has an address that can serve it shows only now
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
    """The executor of a version with a completed configuration, whose servers have been asked once if they are ready.

    ``limit`` is the number of requests that may be in flight; ``key`` and ``sequences`` are those of
    :class:`RemoteExecutor`.
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
