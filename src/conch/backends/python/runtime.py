"""What the requests, senders, loggers and calls of a worker share: its channel, its open requests, its log settings.

The backend makes one ``Runtime`` per worker; functions of ``pb_utils`` that take no object find it by ``current``.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Optional, Set, Tuple
from weakref import WeakValueDictionary

from conch.backends.python.calls import BlsClient
from conch.backends.python.outputs import OutputWatch
from conch.backends.python.response import InferenceResponse
from conch.workers.child.channel import Channel, Header
from conch.workers.child.packing import Packer


class Runtime:
    """Shared by all threads of a worker."""

    def __init__(self, channel: Channel, model: Dict[str, Any], log: Dict[str, Any]) -> None:
        self.channel = channel
        self.bls = BlsClient(channel)
        self.model = model
        self.log = log
        #: Requests that have not had their last response, by serial number, as long as the model keeps them.
        self.replies: WeakValueDictionary[int, ResponseChannel] = WeakValueDictionary()
        #: The name of the model's instance.
        self.instance = f"{model['name']}_0"
        #: ``starting``, ``serving`` once the model's object is initialised, ``stopping`` when it is to finalise.
        self.phase = "starting"
        self.outputs = OutputWatch(model["name"], self._warn_once)
        channel.early = self._control_early

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
        "rows",
        "runtime",
        "sent",
        "serial",
    )

    def __init__(
        self, runtime: Runtime, serial: int, outputs: Set[str], decoupled: bool, rows: Optional[int] = None
    ) -> None:
        self.runtime = runtime
        self.serial = serial
        self.outputs = outputs
        self.decoupled = decoupled
        #: How many rows each output must have; None for any number.
        self.rows = rows
        self.cancelled = False
        self.sent = False
        self.closed = True
        self.held: Optional[Tuple[Header, Packer]] = None

    def __del__(self) -> None:
        """The model has dropped the request and its sender: no further response can come, so this is the end."""
        if self.closed:
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
        self.closed = False
        self.runtime.replies[self.serial] = self

    def close(self) -> None:
        """Forget the request, whose last response is being sent."""
        self.closed = True
        self.runtime.replies.pop(self.serial, None)

    def send(self, response: Optional[InferenceResponse], final: bool) -> None:
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

    def encode(self, response: InferenceResponse, packer: Packer, copy: bool = False) -> Dict[str, Any]:
        """The part of a frame that describes a response, with the outputs that the request wants."""
        if not response.has_error():
            self.runtime.outputs.look(response._tensors, self.outputs, not self.decoupled, self.rows)
        return response.encode(self.outputs, packer, copy)

    def fail(self, code: str, message: str) -> None:
        """End the request with an error, unless it has ended."""
        if not self.closed:
            self.close()
            self.runtime.channel.send({**self._empty(), "error": [code, message]})

    def _empty(self) -> Header:
        return {"op": "response", "serial": self.serial, "outputs": [], "parameters": {}, "final": True}


_current: Optional[Runtime] = None


def install(runtime: Optional[Runtime]) -> Optional[Runtime]:
    """Make ``runtime`` the one that ``current`` returns; returns the one that it was before."""
    global _current
    before, _current = _current, runtime
    return before


def current() -> Runtime:
    """The worker's runtime; RuntimeError outside of a worker."""
    if _current is None:
        raise RuntimeError("this works only in a model that is being served, or run by conch.testing")
    return _current
