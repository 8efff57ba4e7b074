"""Decodes large gRPC messages in a codec process.

As in ``decode.py``. A ``ModelInferRequest`` may carry tensors as lists of numbers and texts, for which the library
creates objects. The result is the message with empty lists, and the tensors as raw bytes. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from conch.core.errors import internal, invalid
from conch.core.tensors import CONFIG_NAME, Buffer
from conch.core.validation import count_strings
from conch.frontends.offloading.decode import Ask, Result, Work
from conch.frontends.offloading.memory import Header
from conch.wire.grpc.infer import read_contents, sent_inputs

#: Maximum size of a message without its tensors (bytes): the server parses it on its event loop.
MOST_BESIDES: Final = 512 << 10


def infer(header: Header, body: memoryview, ask: Ask) -> Result:
    """Decode a ``ModelInferRequest``: returns the message without tensor data, and the data of each tensor.

    ``elements`` are the numbers of elements of BYTES tensors, None for malformed data. Raises INTERNAL for an invalid
    message, INVALID_ARG for values that do not fit their datatype.
    """
    try:
        message = service_pb2.ModelInferRequest.FromString(bytes(body))
    except DecodeError:
        raise internal("Unable to parse request") from None  # Triton's message
    raw: list[Buffer] = list(message.raw_input_contents)
    if raw:
        message.ClearField("raw_input_contents")
    else:
        raw = _read_typed(message)
    for tensor in message.inputs:
        if tensor.HasField("contents"):
            # The empty field stays set: contents beside raw contents are refused, and differ from missing data.
            tensor.contents.Clear()
            tensor.contents.SetInParent()
    elements = [
        count_strings(data) if tensor.datatype == "BYTES" else None
        for tensor, data in zip(sent_inputs(message), raw, strict=False)
    ]
    rest = message.SerializeToString()
    if len(rest) > MOST_BESIDES:
        raise invalid(f"the request has {len(rest)} bytes besides its tensors; at most {MOST_BESIDES} are allowed")
    return {"elements": elements}, [rest, *raw]


def _read_typed(message: service_pb2.ModelInferRequest) -> list[Buffer]:
    """Return the data of the inputs up to the first without data; the server refuses a request with missing data."""
    raw: list[Buffer] = []
    for tensor in sent_inputs(message):
        if not tensor.HasField("contents"):
            break
        datatype = tensor.datatype if tensor.datatype in CONFIG_NAME else "<invalid>"
        raw.append(read_contents(tensor.contents, tensor.name, datatype, message.model_name))
        tensor.ClearField("contents")
    return raw


WORK: Final[Mapping[str, Work]] = {"grpc infer": infer}
