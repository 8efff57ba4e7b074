"""Sequences of the soak: those of :mod:`benchmarks.sequences`, in a thread, while more than workers breaks."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from typing import Final

import grpc

from benchmarks.sequences import Clients
from benchmarks.soak.outcomes import EXPLAINED

_CAUSES: Final = {**EXPLAINED, "connection refused": r"failed to connect|Socket closed|recvmsg|Connection reset"}


class Sequences:
    """Keeps ``count`` sequences under way at ``address`` for so many ``seconds``."""

    def __init__(self, address: str, count: int, seconds: float, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest = 0.0
        self._address, self._count, self._seconds, self._seed = address, count, seconds, seed
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait until the last sequence is over; False if it is not after so long."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    async def _run(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            clients = Clients(channel, self._seed, _CAUSES)
            clients.killed = math.inf  # a worker may have died at any time
            await clients.run(self._count, self._seconds)
        self.outcomes, self.wrong, self.longest = clients.outcomes, clients.wrong, clients.longest
