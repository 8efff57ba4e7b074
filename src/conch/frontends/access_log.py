"""The line that verbose logging has for each call of a client: what was asked, the status, sizes and time.

A front end makes an ``AccessRecord`` only while the verbose level is 1 or more, so that nothing is done otherwise.
"""

from __future__ import annotations

from time import monotonic_ns

from conch import logs


class AccessRecord:
    """One call; ``received`` and ``sent`` count the bytes of bodies, as they travel."""

    __slots__ = ("_began", "_protocol", "_what", "received", "sent", "status")

    def __init__(self, protocol: str, what: str, received: int = 0) -> None:
        self._began = monotonic_ns()
        self._protocol = protocol
        self._what = what
        self.received = received
        self.sent = 0
        self.status: object = ""

    def log(self) -> None:
        """Log the call, which has ended with ``status``."""
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
