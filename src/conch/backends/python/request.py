"""``pb_utils.InferenceRequest``, received or created by a model, and ``InferenceResponseSender``, which responds to it.

Runs in the worker of a Python model; responses may be sent from any of its threads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from conch.backends.python import arguments
from conch.backends.python.calls import BlsCall, ResponseIterator
from conch.backends.python.errors import TritonModelException
from conch.backends.python.response import InferenceResponse, check_parameters
from conch.backends.python.runtime import ResponseChannel, current
from conch.backends.python.tensor import MaybeNone, Tensor
from conch.workers.child.packing import Packer

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


TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class MemoryType(IntEnum):
    """The kinds of memory for the outputs of a called model."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """The memory that a model prefers for the outputs of a model that it calls."""

    __slots__ = ("_device_id", "_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self._type = arguments.instance(preferred_memory_type, "PreferredMemory: preferred_memory_type", MemoryType)
        self._device_id = arguments.integer(
            preferred_device_id, "PreferredMemory: preferred_device_id", arguments.INT64
        )


class InferenceTrace:
    """The trace of a request."""

    __slots__ = ("_context", "_serial")

    def __init__(self, context: str | None = None, serial: int = 0) -> None:
        self._context = context
        #: The serial number of the traced request; 0 if it is not traced.
        self._serial = serial

    def get_context(self) -> str | None:
        """Return the trace context as JSON; None unless the request is traced and its trace is sent to a collector."""
        return self._context


#: Default of required arguments.
_REQUIRED: Any = object()
_NO_TRACE = InferenceTrace()
_ANY_MEMORY = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)


class InferenceRequest:
    """An inference request: its input tensors, requested outputs, parameters and metadata."""

    __slots__ = (
        "__weakref__", "_correlation_id", "_flags", "_id", "_inputs", "_model_name", "_model_version", "_outputs",
        "_parameters", "_preferred_memory", "_reply", "_timeout", "_trace",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = _REQUIRED,
        requested_output_names: Sequence[str] = _REQUIRED,
        model_name: str = _REQUIRED,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _ANY_MEMORY,
        trace: InferenceTrace = _NO_TRACE,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if inputs is _REQUIRED or requested_output_names is _REQUIRED or model_name is _REQUIRED:
            raise TypeError("InferenceRequest needs inputs, requested_output_names and model_name")
        self._id = arguments.text(request_id, "InferenceRequest: request_id")
        self._model_name = arguments.text(model_name, "InferenceRequest: model_name")
        self._correlation_id = _correlation_id(correlation_id)
        tensors = arguments.items(inputs, "InferenceRequest: inputs", (Tensor, type(None)), "Tensor")
        names = arguments.items(requested_output_names, "InferenceRequest: requested_output_names", (str, bytes), "str")
        about = f"request with id '{self._id}' and model name '{self._model_name}' should not be empty."
        if None in tensors:
            raise TritonModelException(f"Input tensor for {about}")
        if not all(names):
            raise TritonModelException(f"Requested output name for {about}")
        self._inputs = tensors
        self._outputs = {arguments.text(name, "InferenceRequest: requested_output_names") for name in names}
        self._model_version = arguments.integer(model_version, "InferenceRequest: model_version", arguments.INT64)
        self._flags = arguments.integer(flags, "InferenceRequest: flags", arguments.UINT32)
        self._timeout = arguments.integer(timeout, "InferenceRequest: timeout", arguments.UINT64)
        self._preferred_memory = arguments.instance(
            preferred_memory, "InferenceRequest: preferred_memory", PreferredMemory
        )
        self._trace = arguments.instance(trace, "InferenceRequest: trace", InferenceTrace)
        self._parameters: Mapping[str, Any] = check_parameters(parameters)
        self._reply: ResponseChannel | None = None

    @staticmethod
    def received(fields: dict[str, Any], inputs: list[Tensor], reply: ResponseChannel) -> InferenceRequest:
        """Create the request that ``fields`` of an ``execute`` frame describe."""
        request = InferenceRequest.__new__(InferenceRequest)
        request._id = fields["id"]
        request._correlation_id = fields["correlation_id"]
        request._inputs = inputs
        request._outputs = reply.outputs
        request._flags = fields["flags"]
        request._timeout = fields["timeout"]
        request._parameters = fields["parameters"]
        request._trace = InferenceTrace(fields["trace"], fields["serial"]) if "trace" in fields else _NO_TRACE
        request._reply = reply
        return request

    def inputs(self) -> list[Tensor]:
        return list(self._inputs)

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = arguments.integer(flags, "set_flags: flags", arguments.UINT32)

    def timeout(self) -> int:
        """Return the timeout (µs); 0 if the client set none."""
        return self._timeout

    def parameters(self) -> str:
        """Return the parameters as JSON: compact for a received request, with spaces and escapes for a created one."""
        if self._reply is None:
            return json.dumps(self._parameters)
        return json.dumps(self._parameters, ensure_ascii=False, separators=(",", ":"))

    def requested_output_names(self) -> set[str]:
        return set(self._outputs)

    def trace(self) -> InferenceTrace:
        return self._trace

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request."""
        return self._received_reply().is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        return InferenceResponseSender(self._received_reply())

    def set_release_flags(self, flags: int) -> None:
        """Set how the request is released when ``execute`` returns.

        With ``TRITONSERVER_REQUEST_RELEASE_RESCHEDULE``, it is passed to ``execute`` again, in an iterative sequence.
        """
        flags = arguments.integer(flags, "set_release_flags: flags", arguments.UINT32)
        if self._reply is not None:
            self._reply.reschedule(bool(flags & TRITONSERVER_REQUEST_RELEASE_RESCHEDULE))

    def exec(self, decoupled: bool = False) -> Any:
        """Send the request to the model that it names; return its response, or a response iterator if ``decoupled``.

        A failure is returned as the error of a response, not raised.
        """
        decoupled = arguments.truth(decoupled, "exec: decoupled")
        call = self._call(decoupled)
        return ResponseIterator(call) if decoupled else call.next()[0]

    def async_exec(self, decoupled: bool = False) -> Any:
        """Return a future of the result of :meth:`exec`; if ``decoupled``, it completes at the first response."""
        asyncio.get_running_loop()
        decoupled = arguments.truth(decoupled, "async_exec: decoupled")
        call = self._call(decoupled)
        if decoupled:
            return call.next_later(lambda first: ResponseIterator(call, first))
        return call.next_later(lambda item: item[0])

    def _call(self, decoupled: bool) -> BlsCall:
        runtime = current()
        if runtime.phase != "serving":
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        packer = Packer()
        header = {
            "op": "call",
            "decoupled": decoupled,
            "model": runtime.model["name"] if self._reply is not None else self._model_name,
            "version": -1 if self._reply is not None else self._model_version,
            "id": self._id,
            "correlation_id": self._correlation_id,
            "flags": self._flags,
            "timeout": self._timeout,
            "parameters": self._parameters,
            "outputs": list(self._outputs),
            "inputs": [tensor.pack(packer) for tensor in self._inputs],
        }
        if self._trace._serial:
            header["trace"] = self._trace._serial
        return runtime.bls.start(header, packer)

    def _received_reply(self) -> ResponseChannel:
        if self._reply is None:
            raise TritonModelException("The request was not received by this model: it has no client.")
        return self._reply


def _correlation_id(value: Any) -> int | str:
    if value is None:
        raise TypeError("InferenceRequest: correlation_id must be an int or a str, not None")
    if isinstance(value, str):
        return value
    if not isinstance(value, int):
        raise TritonModelException("Correlation ID must be integer or string")
    if value not in arguments.UINT64:
        raise RuntimeError(f"InferenceRequest: correlation_id must be below 2**64 and not negative, not {value}")
    return int(value)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | MaybeNone:
    """Return the named input of a request; None if there is none."""
    for tensor in inference_request._inputs:
        if tensor._name == name:
            return tensor
    return None
