"""Streams over HTTP: the generate extension, whose JSON carries neither datatypes nor shapes of tensors.

Used by ``HttpTransport``.  Requests that the server would read in another shape are refused.
"""

from __future__ import annotations

import contextlib
import json
from http.client import HTTPException, HTTPResponse
from math import prod
from typing import Any, Final

import numpy as np

from conch.errors import Code, ConchError, internal, unavailable, unsupported
from conch.inference import TensorSpec
from conch.library.http_connection import DeadlineConnection
from conch.library.requests import OutgoingRequest
from conch.library.results import InferResult
from conch.library.service import ResultStream
from conch.library.values import decode, from_values
from conch.wire.json.generate import deduced_shape

_OVER_GRPC: Final = "connect with grpc:// for this request"
_EVENT: Final = b"data:"
#: Members of an event that are no outputs.
_OF_RESPONSE: Final = frozenset(("model_name", "model_version", "id"))


def generate_body(request: OutgoingRequest) -> dict[str, Any]:
    """The members of a request to ``generate_stream``.  Raises UNSUPPORTED for what they cannot say."""
    signature = request.signature
    if request.priority or request.sequence_id or request.flags:
        raise unsupported(f"streams over HTTP have neither priorities nor sequences: {_OVER_GRPC}")
    body: dict[str, Any] = dict(request.parameters)
    if request.id:
        body["id"] = request.id
    for name, tensor in request.inputs.items():
        spec = signature.inputs[name]
        dims = (-1, *spec.dims) if signature.max_batch_size > 0 else spec.dims
        if tensor.datatype in ("FP16", "BF16") or deduced_shape(name, dims, prod(tensor.shape)) != tensor.shape:
            raise unsupported(
                f"a stream over HTTP cannot carry input '{name}' as {tensor.datatype} of shape {list(tensor.shape)}: "
                f"{_OVER_GRPC}"
            )
        values = decode(tensor).reshape(-1)
        try:
            body[name] = [value.decode() for value in values] if tensor.datatype == "BYTES" else values.tolist()
        except UnicodeDecodeError:
            raise unsupported(f"input '{name}' is not UTF-8, and a stream over HTTP is text: {_OVER_GRPC}") from None
    return body


class SingleResult(ResultStream):
    """The only response of a model that is not decoupled."""

    def __init__(self, result: InferResult) -> None:
        self._results = iter((result,))

    def __next__(self) -> InferResult:
        return next(self._results)

    def close(self) -> None:
        self._results = iter(())


class EventStream(ResultStream):
    """The events of a response; ``code`` is that of the error that the HTTP status says, None for success."""

    def __init__(
        self,
        request: OutgoingRequest,
        connection: DeadlineConnection,
        response: HTTPResponse,
        code: Code | None,
    ) -> None:
        self._request = request
        self._connection = connection
        self._response = response
        self._code = code
        self._closed = False

    def __next__(self) -> InferResult:
        while not self._closed:
            try:
                line = self._response.readline()
            except TimeoutError:
                self.close()
                raise self._request.not_in_time() from None
            except (OSError, HTTPException, ValueError, AttributeError) as error:  # the last two: closed meanwhile
                if self._closed:
                    break
                self.close()
                raise unavailable(f"the stream of model '{self._request.model}' broke off: {error}") from None
            if not line:
                break
            text = line.removeprefix(_EVENT).strip()
            if text:
                try:
                    return self._result(json.loads(text))
                except BaseException:
                    self.close()
                    raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Hang up, at which the server cancels the request if it still runs."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._connection.shutdown()  # wakes the thread that reads; closing would wait for it
            self._response.close()
            self._connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()

    def _result(self, event: dict[str, Any]) -> InferResult:
        if "error" in event and "model_name" not in event:
            raise ConchError(str(event["error"]), self._code or Code.UNKNOWN)  # after the first, there is no code
        specs = self._request.signature.outputs
        wanted = self._request.outputs
        return InferResult(
            event["model_name"],
            str(event["model_version"]),
            {
                name: from_values(name, specs[name].datatype, self._shape(specs[name], value), value)
                for name, value in event.items()
                if name in specs and (not wanted or name in wanted)
            },
            event.get("id", ""),
            {name: value for name, value in event.items() if name not in specs and name not in _OF_RESPONSE},
        )

    def _shape(self, spec: TensorSpec, value: Any) -> tuple[int, ...]:
        """The shape of an output that came flat.  Raises INTERNAL where its declaration leaves several."""
        signature = self._request.signature
        count = int(np.size(np.array(value, np.object_)))
        rows = next((tensor.shape[0] for tensor in self._request.inputs.values()), 1)
        dims = (rows, *spec.dims) if signature.max_batch_size > 0 else spec.dims
        if dims.count(-1) > 1:
            raise internal(f"output '{spec.name}' came without its shape, which varies: {_OVER_GRPC}")
        return deduced_shape(spec.name, dims, count)
