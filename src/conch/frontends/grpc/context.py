"""Shared state of all calls of the gRPC front end; created by the service, used on the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from conch.frontends.budget import ByteBudget
from conch.frontends.forwarding import HeaderForwarding
from conch.frontends.offloading.offloader import Offloader
from conch.server.core import InferenceServer


@dataclass(frozen=True, slots=True)
class ServingContext:
    """The server and the options for inference: ``forwarding`` and ``compression`` (its level).

    ``budget`` counts the bytes that calls hold, ``max_decompressed`` limits decompressed messages (bytes).
    ``offloader`` decodes slow messages. ``tasks`` keeps the background tasks of calls alive until they are done.
    """

    server: InferenceServer
    loop: asyncio.AbstractEventLoop
    budget: ByteBudget
    forwarding: HeaderForwarding
    compression: str
    max_decompressed: int
    offloader: Offloader
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
