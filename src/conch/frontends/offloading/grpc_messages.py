"""What a codec process does with large gRPC messages: the values of tensors become their bytes.

As in ``decode.py``.  ``ModelInferRequest`` may carry tensors as lists of numbers and texts, of which the library makes
objects; what comes back is the same message with empty lists, and the tensors as if they had been sent raw.  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from conch.errors import internal, invalid
from conch.frontends.offloading.decode import Ask, Result, Work
from conch.frontends.offloading.memory import Header
from conch.tensors import CONFIG_NAME, Buffer
from conch.validation import count_strings
from conch.wire.grpc.contents import read_contents
from conch.wire.grpc.infer import sent_inputs

#: The most bytes that a message may have besides its tensors: the server parses them on its event loop.
MOST_BESIDES: Final = 512 << 10


def infer(header: Header, body: memoryview, ask: Ask) -> Result:
    """A ``ModelInferRequest``: the message without the data of its tensors, then that of each.

    ``elements`` are the numbers of elements of BYTES, None where the data is not well-formed.  Raises INTERNAL for
    what is no message, INVALID_ARG for values that do not fit their datatype.
    """
    try:
        message = service_pb2.ModelInferRequest.FromString(bytes(body))
    except DecodeError:
        raise internal("Unable to parse request") from None  # in Triton's words
    raw: list[Buffer] = list(message.raw_input_contents)
    if raw:
        message.ClearField("raw_input_contents")
    else:
        raw = _read_typed(message)
    for tensor in message.inputs:
        if tensor.HasField("contents"):
            # That it was there is refused beside raw contents, and told from no data at all.
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
    """The data of the inputs up to the first that has none, without whose data the request is refused."""
    raw: list[Buffer] = []
    for tensor in sent_inputs(message):
        if not tensor.HasField("contents"):
            break
        datatype = tensor.datatype if tensor.datatype in CONFIG_NAME else "<invalid>"
        raw.append(read_contents(tensor.contents, tensor.name, datatype, message.model_name))
        tensor.ClearField("contents")
    return raw


WORK: Final[Mapping[str, Work]] = {"grpc infer": infer}
