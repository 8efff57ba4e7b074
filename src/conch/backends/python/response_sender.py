"""``pb_utils.InferenceResponseSender``: sends the responses of one request, from ``execute`` or later.

Runs in the worker of a Python model, in any of its threads.
"""

from __future__ import annotations

from conch.backends.python import arguments
from conch.backends.python.errors import TritonModelException
from conch.backends.python.response import InferenceResponse
from conch.backends.python.runtime import ResponseChannel

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class InferenceResponseSender:
    """Sends the responses of one request: any number if the model is decoupled, otherwise one."""

    __slots__ = ("__weakref__", "_reply")

    def __init__(self, reply: ResponseChannel) -> None:
        self._reply = reply

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, the final flag (``TRITONSERVER_RESPONSE_COMPLETE_FINAL``), or both."""
        reply = self._reply
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send() takes an InferenceResponse, not {type(response)}")
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            arguments.integer(flags, "send: flags", arguments.UINT32)
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if not reply.decoupled:
            if response is not None and reply.sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if response is None and not reply.sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
        if reply.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        reply.send(response, bool(flags))

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request."""
        return self._reply.is_cancelled()
