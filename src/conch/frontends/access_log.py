"""Access log: one line per client call with its name, status, body sizes, duration and identifiers.

A front end creates an ``AccessRecord`` only with ``--log-access``, or while the verbose level is 1 or higher.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from time import monotonic_ns

from conch.core.inference import InferRequest
from conch.machine import logs
from conch.telemetry.tracing.trace import caller_of

LOG = logging.getLogger("conch")


class AccessRecord:
    """A call of ``method`` (HTTP) on ``path``; ``received`` and ``sent`` are the sizes of its bodies (bytes, encoded).

    ``client`` is the name of its API key. ``request_id`` is the client's identifier, or the one in the response.
    ``trace_id`` is that of the caller's ``traceparent`` header, or of the trace of the request if it is sampled.
    """

    __slots__ = (
        "_began", "_method", "_path", "_protocol", "client", "received", "request_id", "sent", "status", "trace_id",
    )  # fmt: skip

    def __init__(
        self,
        protocol: str,
        method: str,
        path: str,
        *,
        client: str,
        request_id: str,
        traceparent: str,
        received: int = 0,
    ) -> None:
        self._began = monotonic_ns()
        self._protocol = protocol
        self._method = method
        self._path = logs.shortened(path)
        self.client = client
        self.request_id = request_id
        self.trace_id = _trace_id({"traceparent": traceparent})
        self.received = received
        self.sent = 0
        self.status: object = ""
        logs.verbose(1, "%s request: %s", protocol, self._call)

    @property
    def _call(self) -> str:
        words = [self._method, self._path, f"of {self.client}" if self.client else ""]
        return " ".join(filter(None, words))

    def identify(self, request: InferRequest) -> None:
        """Take the identifiers of a request of the call, whose trace has begun."""
        self.request_id = request.id or self.request_id
        context = request.trace.context if request.trace is not None else None
        self.trace_id = _trace_id(json.loads(context)) if context else self.trace_id

    def log(self) -> None:
        """Log the completed call with its ``status``."""
        milliseconds = (monotonic_ns() - self._began) / 1e6
        text = f"{self._protocol} {self._call}: {self.status}, {self.received} bytes in, {self.sent} out"
        text += f", {milliseconds:.3f} ms"
        text += f", request {logs.shortened(self.request_id)}" if self.request_id else ""
        text += f", trace {self.trace_id}" if self.trace_id else ""
        level = logging.INFO if logs.current().log_access else logging.DEBUG
        LOG.log(level, "%s", text, extra={"fields": self._fields(milliseconds)})

    def _fields(self, milliseconds: float) -> Mapping[str, object]:
        """Return the fields of the line in JSON; empty ones are omitted."""
        fields = {
            "protocol": self._protocol,
            "method": self._method,
            "path": self._path,
            "status": self.status if isinstance(self.status, int) else str(self.status),
            "received_bytes": self.received,
            "sent_bytes": self.sent,
            "duration_ms": round(milliseconds, 3),
            "key": self.client,
            "request_id": logs.shortened(self.request_id),
            "trace_id": self.trace_id,
        }
        return {name: value for name, value in fields.items() if value != ""}


def _trace_id(headers: Mapping[str, str]) -> str:
    caller = caller_of(headers)
    return f"{caller.trace_id:032x}" if caller is not None else ""
