"""A timed request, and the interface of the channels that carry it.

A load (:mod:`conch.measure.perf.senders.load`) reuses one ``TimedCall`` per concurrent request. A channel
(:mod:`conch.measure.perf.senders.channels`) sends the request and sets the timestamps. Runs on the event loop of a
sending process.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from conch.measure.perf.requests.payload import Payload
from conch.measure.perf.senders.records import Outcome


class TimedCall:
    """A request with the columns of its record; calls ``on_end`` when it ends."""

    __slots__ = (
        "channel", "code", "due", "end", "error", "events", "first", "number", "on_end", "outcome", "payload",
        "received", "responses", "sent", "slot", "tokens", "written",
    )  # fmt: skip

    def __init__(self, slot: int, on_end: Callable[[TimedCall], None]) -> None:
        self.slot = slot
        self.on_end = on_end
        self.channel: CallChannel | None = None
        self.payload = Payload(b"")
        self.number = 0
        #: Timestamps of the messages (ns), if there are several.
        self.events: list[int] = []
        self.begin(0)

    def begin(self, due: int) -> None:
        """Reset the call for a new request that is due at ``due`` (ns, monotonic)."""
        self.due = due
        self.sent = self.written = self.first = self.end = 0
        self.outcome: Outcome = Outcome.NONE
        self.code = self.responses = self.tokens = self.received = 0
        self.error = ""
        if self.events:
            self.events = []

    def finish(self, outcome: Outcome, error: str = "", code: int = 0, end: int = 0) -> None:
        """Set the result and the end time (ns, 0 for now), and call ``on_end``; the channel is then free."""
        self.end = end or monotonic_ns()
        self.outcome = outcome
        self.code = code
        self.error = error
        self.on_end(self)


#: Returns the difference of a response from the expected one; empty if there is none. Takes the number of the payload,
#: the response (an HTTP body or a gRPC message), and the size of the JSON part of a body, which precedes its tensors (0
#: if all of it is JSON).
Judge = Callable[[int, bytes, int], str]


class CallChannel(Protocol):
    """A connection that is established at its first use, and again after it was lost."""

    @property
    def room(self) -> int:
        """The number of further calls that the channel can carry at the same time."""

    def send(self, call: TimedCall) -> None:
        """Send ``call.payload``; ``call.on_end`` is called exactly once, never from within this method."""

    def cancel(self, call: TimedCall) -> None:
        """Cancel a call without a call of ``on_end``."""

    def close(self) -> None:
        """Close the connection; calls in flight are abandoned."""
