"""The shared state of a Python model's worker: its channel, open requests, log settings and calls.

The backend creates one ``Runtime`` per worker; module-level functions of ``pb_utils`` access it with ``current``.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakValueDictionary

from conch.backends.python.calls import BlsClient
from conch.backends.python.errors import TritonModelException
from conch.backends.python.response import NO_LOANS, InferenceResponse
from conch.workers.child.channel import Channel, Header
from conch.workers.child.packing import OutputWatch, Packer


class Runtime:
    """The state that all threads of a worker share."""

    def __init__(self, channel: Channel, model: dict[str, Any], log: dict[str, Any]) -> None:
        self.channel = channel
        self.bls = BlsClient(channel)
        self.model = model
        self.log = log
        #: Requests without a final response, by serial number, while the model holds a reference to them.
        self.replies: WeakValueDictionary[int, ResponseChannel] = WeakValueDictionary()
        #: Serial numbers of requests to reschedule when ``execute`` returns.
        self.rescheduled: set[int] = set()
        #: The name of the model's instance.
        self.instance = f"{model['name']}_0"
        #: ``starting``; ``serving`` after ``initialize``; ``stopping`` from ``finalize`` on.
        self.phase = "starting"
        self.outputs = OutputWatch(model["name"], self._warn_once)
        #: Unsent changes of custom metrics (``metrics.MetricChanges``); None until the first change.
        self.metric_changes: Any = None
        channel.early = self._control_early

    def reply_of_rescheduled(self, serial: int) -> ResponseChannel | None:
        """Return the channel of a rescheduled request, if the model still holds its response sender."""
        return self.replies.get(serial)

    def control(self, header: Header) -> bool:
        """Handle a cancellation or new log settings; return False for any other frame."""
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

    def failure(self, what: str, message: str) -> TritonModelException:
        """Return the exception for a call of ``pb_utils`` that the server refuses, worded as in Triton."""
        about = f"Failed to process the request for model '{self.instance}', message"
        return TritonModelException(f"{what}: {about}: {message}")

    def ask(self, what: str, header: Header, packer: Packer | None = None) -> InferenceResponse:
        """Send a call to the server and wait for its response. Raises ``failure`` of ``what`` if it is an error."""
        response = self.bls.start(header, packer).next()[0]
        error = response.error()
        if error is not None:
            raise self.failure(what, error.message())
        return response

    def close(self) -> None:
        """End the threads that were started for the model."""
        if self.metric_changes is not None:
            self.metric_changes.close()

    def poll(self) -> None:
        """Handle received cancellations, log settings and responses of calls without blocking; thread-safe."""
        self.channel.poll()

    def _warn_once(self, message: str) -> None:
        """Send a warning to the server's log, which shows it once for all instances of the model."""
        if self.log.get("warning", False):
            file = os.path.basename(self.model.get("filename") or "model.py")
            frame = {"op": "log", "level": "WARNING", "file": file, "line": 0, "message": message, "once": True}
            self.channel.send(frame)

    def write_log(self, level: str, file: str, line: int, message: str) -> None:
        """Send a message to the server's log, if its settings enable ``level``."""
        if self.log.get(level.lower(), False):
            self.channel.send({"op": "log", "level": level, "file": file, "line": line, "message": message})

    def _control_early(self, header: Header, payload: bytearray) -> bool:
        if header["op"] == "answer":
            self.bls.answer(header, payload)
            return True
        # If the request is still in the queue, its cancellation must remain behind it.
        if header["op"] == "cancel" and header["serial"] not in self.replies:
            return False
        return self.control(header)


class ResponseChannel:
    """Sends the responses of one request, and tracks whether it has been cancelled or has ended."""

    __slots__ = (
        "__weakref__",
        "cancelled",
        "closed",
        "decoupled",
        "held",
        "loans",
        "outputs",
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
        #: Loans of shared memory by output name; these outputs are written there instead of being sent to the server.
        self.loans = NO_LOANS
        #: The number of rows that each output must have; None for any number.
        self.rows = rows
        self.cancelled = False
        self.sent = False
        self.closed = True
        #: Whether the request has been rescheduled, so that it does not end when the model drops it.
        self.waiting = False
        self.held: tuple[Header, Packer] | None = None

    def __del__(self) -> None:
        """End the request: the model has dropped it and its sender, so it can send no more responses."""
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
        """Register the request, so that it can be cancelled; called before it is passed to the model."""
        self.closed = self.waiting = False
        self.runtime.replies[self.serial] = self

    def close(self) -> None:
        """Unregister the request; called when its final response is sent."""
        self.closed = True
        self.runtime.replies.pop(self.serial, None)

    def reschedule(self, again: bool) -> None:
        """Set whether the request is rescheduled."""
        if again:
            self.runtime.rescheduled.add(self.serial)
        else:
            self.runtime.rescheduled.discard(self.serial)

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Send a response, or only the end of the request.

        The response of a model that is not decoupled is held until the end, because the client receives both as one.
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
        """Return the description of a response for a frame, with only the requested outputs."""
        if not response.has_error():
            outputs = [(tensor._name, tensor._datatype, tensor._shape, tensor) for tensor in response._tensors]
            self.runtime.outputs.check(outputs, self.outputs, not self.decoupled, self.rows)
        return response.encode(self.outputs, packer, copy, self.loans)

    def fail(self, code: str, message: str) -> None:
        """End the request with an error, unless it has ended."""
        if not self.closed:
            self.close()
            self.runtime.channel.send({**self._empty(), "error": [code, message]})

    def _empty(self) -> Header:
        return {"op": "response", "serial": self.serial, "outputs": [], "parameters": {}, "final": True}


_current: Runtime | None = None


def install(runtime: Runtime | None) -> Runtime | None:
    """Set the runtime that ``current`` returns; return the previous one."""
    global _current
    before, _current = _current, runtime
    return before


def current() -> Runtime:
    """Return the worker's runtime. Raises RuntimeError outside of a worker."""
    if _current is None:
        raise RuntimeError("this works only in a model that is being served, or run by conch.testing")
    return _current
