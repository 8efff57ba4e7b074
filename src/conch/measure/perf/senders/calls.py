"""A timed request, and the interface of the channels that carry it.

A load (:mod:`conch.measure.perf.senders.load`) reuses one ``TimedCall`` per concurrent request. A channel
(:mod:`conch.measure.perf.senders.channels`) sends the request and sets the timestamps. Runs on the event loop of a
sending process.
"""

from __future__ import annotations

from typing import Protocol

from conch.measure.perf.requests.payload import Payload
from conch.measure.perf.senders.records import Outcome


class TimedCall:
    """A request with the columns of its record; calls ``on_end`` when it ends."""

    __slots__ = (
        "channel", "code", "due", "end", "error", "events", "first", "number", "on_end", "outcome", "payload",
        "received", "responses", "sent", "slot", "tokens", "written",
    )  # fmt: skip

    def __init__(self, slot: int, on_end: TimedCallOwner) -> None:
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


class TimedCallOwner(Protocol):
    """The object that started a call."""

    def __call__(self, call: TimedCall) -> None:
        """Handle the end of a call; its channel then accepts another one."""


class Judge(Protocol):
    """A validator with the expected responses."""

    def __call__(self, payload: int, response: bytes, json_size: int = 0) -> str:
        """Return the difference of a response (body or message) from the expected one of this payload; empty if none.

        ``json_size`` is the size of the JSON part of a body, which precedes its tensors; 0 if all of it is JSON.
        """


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
