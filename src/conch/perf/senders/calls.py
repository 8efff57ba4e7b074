"""A request while it runs, and what carries it.

A load (:mod:`conch.perf.senders.load`) has one ``TimedCall`` for each request at a time and uses it again; a channel
(:mod:`conch.perf.senders.channels`) sends it and fills in the moments.  On the event loop of a process that sends.
"""

from __future__ import annotations

from typing import Protocol

from conch.perf.requests.payload import Payload
from conch.perf.senders.records import Outcome


class TimedCall:
    """One request, with the columns of its record; ``on_end`` is told when it has ended."""

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
        #: Moments of messages (ns), where there is more than one.
        self.events: list[int] = []
        self.begin(0)

    def begin(self, due: int) -> None:
        """Forget the request before; this one should start at ``due`` (ns, monotonic)."""
        self.due = due
        self.sent = self.written = self.first = self.end = 0
        self.outcome: Outcome = Outcome.NONE
        self.code = self.responses = self.tokens = self.received = 0
        self.error = ""
        if self.events:
            self.events = []


class TimedCallOwner(Protocol):
    """Whoever started a call."""

    def __call__(self, call: TimedCall) -> None:
        """The call has ended; its channel takes another one."""


class Judge(Protocol):
    """Knows the right answers."""

    def __call__(self, payload: int, answer: bytes, json_size: int = 0) -> str:
        """What is wrong with the answer (a body or message) to the payload of this number; empty if nothing.

        ``json_size`` is how much of a body is JSON, before tensors; 0 for all of it.
        """


class CallChannel(Protocol):
    """A connection that is made when it is first used, and again after it was lost."""

    @property
    def room(self) -> int:
        """How many more calls it can carry at the same time."""

    def send(self, call: TimedCall) -> None:
        """Send ``call.payload``; ``call.on_end`` is called exactly once, never from within this call."""

    def cancel(self, call: TimedCall) -> None:
        """Give a call up; its owner is not told."""

    def close(self) -> None:
        """Close the connection; calls that run are given up."""
