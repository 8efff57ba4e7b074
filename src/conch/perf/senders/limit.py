"""How many requests a second the senders can do, whatever the server: against one that answers at once.

Measured in the minute of the measurement, on this machine, with the same payloads and as many callers.  It is a lower
bound where senders and that server have to share the cores.
"""

from __future__ import annotations

from dataclasses import replace
from time import monotonic, sleep
from typing import Final

from conch.perf.senders.channels.connecting import Address
from conch.perf.senders.generator import Generators, Traffic
from conch.perf.senders.null_server import NullServer
from conch.perf.senders.records import Outcome

_WARM_UP: Final = 0.1
_SECONDS: Final = 0.3


class SenderLimit:
    """Measures once for each number of callers; starts its processes when it is first asked."""

    def __init__(self, traffic: Traffic, processes: int) -> None:
        self._traffic = traffic
        self._count = processes
        self._found: dict[int, float] = {}
        self._server: NullServer | None = None
        self._senders: Generators | None = None

    def at(self, concurrency: int) -> float | None:
        """Requests a second with so many callers; None where that cannot be told: over TLS, and for streams."""
        if self._traffic.address.encrypted or self._traffic.read is not None or self._traffic.streams:
            return None
        if concurrency not in self._found:
            self._found[concurrency] = self._measure(concurrency)
        return self._found[concurrency]

    def close(self) -> None:
        """End the processes."""
        for one in (self._senders, self._server):
            if one is not None:
                one.close()

    def _measure(self, concurrency: int) -> float:
        senders = self._started()
        senders.run_closed(concurrency)
        sleep(_WARM_UP)
        senders.collect()
        begun = monotonic()
        sleep(_SECONDS)
        records = senders.collect().records
        # An empty answer may be refused for what it says: that is no less work.
        rate = int((records["outcome"] != Outcome.CONNECTION_LOST).sum()) / (monotonic() - begun)
        senders.pause()
        return rate

    def _started(self) -> Generators:
        if self._senders is None:
            self._server = NullServer(self._count, grpc=self._traffic.method is not None)
            address = Address("127.0.0.1", self._server.port)
            self._senders = Generators(replace(self._traffic, address=address, judge=None), self._count)
        return self._senders
