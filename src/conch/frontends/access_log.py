"""Access log: one line per client call with its name, status, body sizes and duration.

A front end creates an ``AccessRecord`` only while the verbose level is 1 or higher.
"""

from __future__ import annotations

from time import monotonic_ns

from conch.machine import logs


class AccessRecord:
    """A call; ``received`` and ``sent`` are the sizes of its bodies on the wire (bytes)."""

    __slots__ = ("_began", "_protocol", "_what", "received", "sent", "status")

    def __init__(self, protocol: str, what: str, received: int = 0) -> None:
        self._began = monotonic_ns()
        self._protocol = protocol
        self._what = what
        self.received = received
        self.sent = 0
        self.status: object = ""

    def log(self) -> None:
        """Log the completed call with its ``status``."""
        logs.verbose(
            1,
            "%s %s: %s, %d bytes in, %d out, %.3f ms",
            self._protocol,
            self._what,
            self.status,
            self.received,
            self.sent,
            (monotonic_ns() - self._began) / 1e6,
        )
