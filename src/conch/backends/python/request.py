"""``pb_utils.InferenceRequest``, as received by a model or built by one.

Runs in the worker of a Python model.
"""

from __future__ import annotations

import asyncio
import json
import operator
from enum import IntEnum
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Union

from conch.backends.python.calls import BlsCall, ResponseIterator
from conch.backends.python.errors import TritonModelException
from conch.backends.python.response import check_parameters
from conch.backends.python.response_sender import InferenceResponseSender
from conch.backends.python.runtime import ResponseChannel, current
from conch.backends.python.tensor import MaybeNone, Tensor
from conch.workers.child.packing import Packer

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class MemoryType(IntEnum):
    """Where the outputs of a called model may be."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """Where a model would like the outputs of a model that it calls."""

    __slots__ = ("_device_id", "_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError(f"PreferredMemory takes TRITONSERVER_MEMORY_CPU or _GPU, not {preferred_memory_type!r}")
        self._type = preferred_memory_type
        self._device_id = preferred_device_id


class InferenceTrace:
    """A request's place in a trace."""

    __slots__ = ("_context",)

    def __init__(self, context: Optional[str] = None) -> None:
        self._context = context

    def get_context(self) -> Optional[str]:
        """The trace context as JSON text; None when the request is not traced."""
        return self._context


class InferenceRequest:
    """A request: its tensors and what else the client said."""

    __slots__ = (
        "__weakref__", "_correlation_id", "_flags", "_id", "_inputs", "_model_name", "_model_version", "_outputs",
        "_parameters", "_preferred_memory", "_reply", "_timeout", "_trace",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str = "",
        correlation_id: Union[int, str] = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: Optional[PreferredMemory] = None,
        trace: Optional[InferenceTrace] = None,
        parameters: Optional[Mapping[str, Any]] = None,
    ) -> None:
        about = f"request with id '{request_id}' and model name '{model_name}' should not be empty."
        if any(tensor is None for tensor in inputs):
            raise TritonModelException(f"Input tensor for {about}")
        if not all(requested_output_names):
            raise TritonModelException(f"Requested output name for {about}")
        _check_types("inputs", inputs, Tensor)
        _check_types("requested_output_names", requested_output_names, str)
        _check_types("model_name, request_id", (model_name, request_id), str)
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        self._id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._outputs = set(requested_output_names)
        self._model_name = model_name
        self._model_version = operator.index(model_version)
        self._flags = operator.index(flags)
        self._timeout = operator.index(timeout)
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters: Mapping[str, Any] = check_parameters(parameters)
        self._reply: Optional[ResponseChannel] = None

    @staticmethod
    def received(fields: Dict[str, Any], inputs: List[Tensor], reply: ResponseChannel) -> InferenceRequest:
        """The request that an ``execute`` frame describes in ``fields``."""
        request = InferenceRequest.__new__(InferenceRequest)
        request._id = fields["id"]
        request._correlation_id = fields["correlation_id"]
        request._inputs = inputs
        request._outputs = reply.outputs
        request._flags = fields["flags"]
        request._timeout = fields["timeout"]
        request._parameters = fields["parameters"]
        request._trace = None
        request._reply = reply
        return request

    def inputs(self) -> List[Tensor]:
        return list(self._inputs)

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> Union[int, str]:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = operator.index(flags)

    def timeout(self) -> int:
        """Microseconds; 0 if the client set none."""
        return self._timeout

    def parameters(self) -> str:
        """The parameters as JSON text: compact for a client's, with blanks and escapes for a model's own."""
        if self._reply is None:
            return json.dumps(self._parameters)
        return json.dumps(self._parameters, ensure_ascii=False, separators=(",", ":"))

    def requested_output_names(self) -> Set[str]:
        return set(self._outputs)

    def trace(self) -> InferenceTrace:
        return self._trace or InferenceTrace()

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request."""
        return self._received_reply().is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        return InferenceResponseSender(self._received_reply())

    def set_release_flags(self, flags: int) -> None:
        """Accepts ``TRITONSERVER_REQUEST_RELEASE_ALL``, which every request has anyway."""
        if flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            raise TritonModelException("Rescheduling a request is not supported yet.")

    def exec(self, decoupled: bool = False) -> Any:
        """Send the request to the model that it names and wait for its response, or, ``decoupled``, return an iterator.

        A failure is the error of a response; nothing is raised for it.
        """
        call = self._call(decoupled)
        return ResponseIterator(call) if decoupled else call.next()[0]

    def async_exec(self, decoupled: bool = False) -> Any:
        """A future of what :meth:`exec` returns; if ``decoupled``, it is done once there is a first response."""
        asyncio.get_running_loop()
        call = self._call(decoupled)
        if decoupled:
            return call.next_later(lambda answer: ResponseIterator(call, answer))
        return call.next_later(lambda answer: answer[0])

    def _call(self, decoupled: bool) -> BlsCall:
        runtime = current()
        if runtime.phase != "serving":
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        packer = Packer()
        header = {
            "op": "call",
            "decoupled": bool(decoupled),
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
        return runtime.bls.start(header, packer)

    def _received_reply(self) -> ResponseChannel:
        if self._reply is None:
            raise TritonModelException("The request was not received by this model: it has no client.")
        return self._reply


def _check_types(what: str, values: Sequence[Any], expected: type) -> None:
    for value in values:
        if not isinstance(value, expected):
            raise TypeError(f"InferenceRequest: {what} must be of type {expected.__name__}, not {type(value)}")


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Union[Tensor, MaybeNone]:
    """The input of that name; None if the request has none."""
    for tensor in inference_request._inputs:
        if tensor._name == name:
            return tensor
    return None
