"""What the requests, senders, loggers and calls of a worker share: its channel, its open requests, its log settings.

The backend makes one ``Runtime`` per worker; functions of ``pb_utils`` that take no object find it by ``current``.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakValueDictionary

from conch.backends.python.calls import BlsClient
from conch.backends.python.response import NO_PLACES, InferenceResponse
from conch.workers.child.channel import Channel, Header
from conch.workers.child.outputs import OutputWatch
from conch.workers.child.packing import Packer


class Runtime:
    """Shared by all threads of a worker."""

    def __init__(self, channel: Channel, model: dict[str, Any], log: dict[str, Any]) -> None:
        self.channel = channel
        self.bls = BlsClient(channel)
        self.model = model
        self.log = log
        #: Requests that have not had their last response, by serial number, as long as the model keeps them.
        self.replies: WeakValueDictionary[int, ResponseChannel] = WeakValueDictionary()
        #: Those that the model wants to have again, when ``execute`` returns.
        self.rescheduled: set[int] = set()
        #: The name of the model's instance.
        self.instance = f"{model['name']}_0"
        #: ``starting``, ``serving`` once the model's object is initialised, ``stopping`` when it is to finalise.
        self.phase = "starting"
        self.outputs = OutputWatch(model["name"], self._warn_once)
        #: What its metrics have changed by (``metrics.MetricChanges``); None as long as none has.
        self.metric_changes: Any = None
        channel.early = self._control_early

    def reply_of_rescheduled(self, serial: int) -> ResponseChannel | None:
        """What answers a request that is back, if the model has kept its sender."""
        return self.replies.get(serial)

    def control(self, header: Header) -> bool:
        """Handle a cancellation or new log settings; False for any other frame."""
        op = header["op"]
        if op == "cancel":
            reply = self.replies.get(header["serial"])
            if reply is not None:
                reply.cancelled = True
        elif op == "log":
            self.log = header["log"]
        else:
            return False
        return True

    def close(self) -> None:
        """End the threads that were started on the model's behalf."""
        if self.metric_changes is not None:
            self.metric_changes.close()

    def poll(self) -> None:
        """Handle cancellations, log settings and answers that have arrived, without waiting; in any thread."""
        self.channel.poll()

    def _warn_once(self, message: str) -> None:
        """Have the server log a warning, once for all instances of the model."""
        if self.log.get("warning", False):
            file = os.path.basename(self.model.get("filename") or "model.py")
            frame = {"op": "log", "level": "WARNING", "file": file, "line": 0, "message": message, "once": True}
            self.channel.send(frame)

    def write_log(self, level: str, file: str, line: int, message: str) -> None:
        """Have the server log a message, if its settings ask for this level."""
        if self.log.get(level.lower(), False):
            self.channel.send({"op": "log", "level": level, "file": file, "line": line, "message": message})

    def _control_early(self, header: Header, payload: bytearray) -> bool:
        if header["op"] == "answer":
            self.bls.answer(header, payload)
            return True
        # The request to cancel may still be in the queue: then its cancellation must stay behind it.
        if header["op"] == "cancel" and header["serial"] not in self.replies:
            return False
        return self.control(header)


class ResponseChannel:
    """Sends the responses of one request, and knows whether it has been cancelled or has had its last one."""

    __slots__ = (
        "__weakref__",
        "cancelled",
        "closed",
        "decoupled",
        "held",
        "outputs",
        "places",
        "rows",
        "runtime",
        "sent",
        "serial",
        "waiting",
    )

    def __init__(
        self, runtime: Runtime, serial: int, outputs: set[str], decoupled: bool, rows: int | None = None
    ) -> None:
        self.runtime = runtime
        self.serial = serial
        self.outputs = outputs
        self.decoupled = decoupled
        #: Where outputs go that are not sent to the server, by name.
        self.places = NO_PLACES
        #: How many rows each output must have; None for any number.
        self.rows = rows
        self.cancelled = False
        self.sent = False
        self.closed = True
        #: Whether the request has been rescheduled, and nothing ends when the model drops it.
        self.waiting = False
        self.held: tuple[Header, Packer] | None = None

    def __del__(self) -> None:
        """The model has dropped the request and its sender: no further response can come, so this is the end."""
        if self.closed or self.waiting:
            return
        header, packer = self.held or (self._empty(), None)
        if not self.sent:
            header["error"] = ["INTERNAL", "The model dropped the request without sending a response."]
        self.runtime.channel.post(header, packer)

    def is_cancelled(self) -> bool:
        if not self.cancelled:
            self.runtime.poll()
        return self.cancelled

    def open(self) -> None:
        """Register the request, which the model is about to be given, so that it can be cancelled."""
        self.closed = self.waiting = False
        self.runtime.replies[self.serial] = self

    def close(self) -> None:
        """Forget the request, whose last response is being sent."""
        self.closed = True
        self.runtime.replies.pop(self.serial, None)

    def reschedule(self, again: bool) -> None:
        """Note whether the model wants the request again."""
        if again:
            self.runtime.rescheduled.add(self.serial)
        else:
            self.runtime.rescheduled.discard(self.serial)

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Send a response, or only the end.

        What a model that is not decoupled sends is kept until its end comes, since its client gets
        them as one.
        """
        if self.held is not None:
            header, packer = self.held
            self.held = None
        else:
            packer = Packer()
            header = self._empty()
        if response is not None:
            self.sent = True
            header.update(self.encode(response, packer, copy=not final and not self.decoupled))
        if final:
            self.close()
        elif not self.decoupled:
            self.held = header, packer
            return
        else:
            header["final"] = False
        self.runtime.channel.send(header, packer)

    def encode(self, response: InferenceResponse, packer: Packer, copy: bool = False) -> dict[str, Any]:
        """The part of a frame that describes a response, with the outputs that the request wants."""
        if not response.has_error():
            outputs = [(tensor._name, tensor._datatype, tensor._shape, tensor) for tensor in response._tensors]
            self.runtime.outputs.look(outputs, self.outputs, not self.decoupled, self.rows)
        return response.encode(self.outputs, packer, copy, self.places)

    def fail(self, code: str, message: str) -> None:
        """End the request with an error, unless it has ended."""
        if not self.closed:
            self.close()
            self.runtime.channel.send({**self._empty(), "error": [code, message]})

    def _empty(self) -> Header:
        return {"op": "response", "serial": self.serial, "outputs": [], "parameters": {}, "final": True}


_current: Runtime | None = None


def install(runtime: Runtime | None) -> Runtime | None:
    """Make ``runtime`` the one that ``current`` returns; returns the one that it was before."""
    global _current
    before, _current = _current, runtime
    return before


def current() -> Runtime:
    """The worker's runtime; RuntimeError outside of a worker."""
    if _current is None:
        raise RuntimeError("this works only in a model that is being served, or run by conch.testing")
    return _current
