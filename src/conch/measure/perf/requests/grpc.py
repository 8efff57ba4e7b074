"""Encodes requests over gRPC: messages of the inference service with their prefixes."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from conch.core.errors import invalid
from conch.measure.perf.inputs.data import Sample
from conch.measure.perf.inputs.specs import ModelSpec
from conch.measure.perf.requests.form import RequestForm, tensors_of
from conch.measure.perf.requests.payload import Payload
from conch.measure.perf.requests.sequences import grpc_fields

#: The inference methods.
MODEL_INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
MODEL_STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
#: Number of digits of a request's id in a stream; the id ends the message.
ID_SIZE: Final = 8
#: Header of field 3 of ``ModelInferRequest`` (``id``), a string of that length.
_ID_FIELD: Final = bytes([3 << 3 | 2, ID_SIZE])
#: The field of a parameter by the type of its value.
_PARAMETERS: Final[Mapping[type, str]] = {
    bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param",
}  # fmt: skip
_COMPRESS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "gzip": lambda data: gzip.compress(data, 6, mtime=0),
    "deflate": zlib.compress,
}


def infer_message(model: ModelSpec, batch: Sequence[Sample], form: RequestForm) -> Payload:
    """Return a ``ModelInferRequest`` with its prefix."""
    encoded, place = _encode(model, batch, form)
    if form.encoding:
        encoded = _COMPRESS[form.encoding](encoded)
    return Payload(_prefixed(encoded, compressed=bool(form.encoding)), len(batch), place)


def stream_message(model: ModelSpec, batch: Sequence[Sample], form: RequestForm) -> Payload:
    """Return a stream message, which ends with an id; decoupled models are asked to mark the last response."""
    if model.decoupled:
        form = replace(form, parameters={**form.parameters, "triton_enable_empty_final_response": True})
    encoded, place = _encode(model, batch, form)
    return Payload(_prefixed(encoded + _ID_FIELD + b"0" * ID_SIZE), len(batch), place)


def _encode(model: ModelSpec, batch: Sequence[Sample], form: RequestForm) -> tuple[bytes, int]:
    """Return the message, and the offset of the sequence fields in the prefixed message (-1: none)."""
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest(model_name=model.name, model_version=model.version)
    _set(message.parameters, form.parameters)
    for tensor in tensors_of(model, batch):
        entry = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if form.memory is not None:
            _set(entry.parameters, form.memory.place(bytes(tensor.data)).parameters)
        else:
            message.raw_input_contents.append(bytes(tensor.data))
    if form.memory is not None:
        for name, part in form.memory.outputs.items():
            _set(message.outputs.add(name=name).parameters, part.parameters)
    encoded: bytes = message.SerializeToString()
    if not form.sequence:
        return encoded, -1
    return encoded + grpc_fields(0), 5 + len(encoded)


def _set(parameters: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        kind = _PARAMETERS.get(type(value))
        try:
            if kind is None:
                raise ValueError(f"{value} is neither int, float, bool nor string, and gRPC has no others")
            setattr(parameters[name], kind, value)
        except ValueError as error:
            raise invalid(f"--request-parameter {name}: {error}") from None


def _prefixed(message: bytes, *, compressed: bool = False) -> bytes:
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message
