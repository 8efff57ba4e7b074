"""HTTP bodies of a client: encodes inference requests and decodes responses, the reverse of :mod:`.infer`.

Does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from conch.core.errors import Code, ConchError, internal
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse
from conch.core.tensors import Buffer, WireTensor, plain
from conch.wire.json import tensor as tensor_data
from conch.wire.json import text

#: The codes of HTTP statuses; all others are UNKNOWN.
CODES: Final[Mapping[int, Code]] = {
    400: Code.INVALID_ARG,
    404: Code.NOT_FOUND,
    500: Code.INTERNAL,
    501: Code.UNSUPPORTED,
    503: Code.UNAVAILABLE,
}

_SCALARS: Final = (bool, int, float, str)


def model_path(model: str, version: int) -> str:
    """Return the path of a model; version -1 means any."""
    path = f"/v2/models/{quote(model, safe='')}"
    return path if version < 0 else f"{path}/versions/{version}"


def encode_request(request: InferRequest) -> tuple[bytes, list[Buffer]]:
    """Return the JSON of a request for binary outputs, and the data of its tensors, which follows it."""
    tensors = request.inputs.values()
    parameters: dict[str, Any] = dict(request.parameters)
    if request.priority:
        parameters["priority"] = request.priority
    if request.timeout:  # µs
        parameters["timeout"] = request.timeout
    if request.correlation_id:
        parameters["sequence_id"] = request.correlation_id
    for name, flag in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
        if request.flags & flag:
            parameters[name] = True
    document: dict[str, Any] = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": tensor.shape,
                "parameters": {"binary_data_size": len(tensor.data)},
            }
            for tensor in tensors
        ]
    }
    if request.id:
        document["id"] = request.id
    if request.outputs:
        document["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in request.outputs]
    else:
        parameters["binary_data_output"] = True
    if parameters:
        document["parameters"] = parameters
    return text.dumps(document), [plain(tensor.data) for tensor in tensors if len(tensor.data)]


class ReceivedOutput(NamedTuple):
    """An output in a response: its binary ``data``, or the ``values`` of the JSON; None if the response has neither."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview | None
    values: Any


def read_response(body: Buffer, json_size: int | None) -> tuple[dict[str, Any], list[ReceivedOutput]]:
    """Return the JSON of a response and its outputs; the first ``json_size`` bytes are JSON, or all of it if None.

    Raises INTERNAL if the body is not an inference response.
    """
    view = memoryview(body)
    size = len(view) if json_size is None else json_size
    document, binary = _document(view[:size]), view[size:]
    try:
        outputs, start = [], 0
        for entry in document["outputs"]:
            byte_size = (entry.get("parameters") or {}).get("binary_data_size")
            data = binary[start : start + int(byte_size)] if byte_size is not None else None
            start += int(byte_size or 0)
            shape = tuple(map(int, entry["shape"]))
            outputs.append(ReceivedOutput(str(entry["name"]), str(entry["datatype"]), shape, data, entry.get("data")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise internal(f"the response is not an inference response: {type(error).__name__} {error}") from None
    if start > len(binary):
        raise internal(f"the response lacks {start - len(binary)} bytes of its outputs")
    return document, outputs


def decode_response(body: bytes, json_size: int | None) -> InferResponse:
    """Decode a response; see :func:`read_response`."""
    document, outputs = read_response(body, json_size)
    parameters = document.get("parameters")
    scalars = parameters.items() if isinstance(parameters, dict) else ()
    return InferResponse(
        [WireTensor(output.name, output.datatype, output.shape, output_data(output)) for output in outputs],
        parameters={name: parameter for name, parameter in scalars if isinstance(parameter, _SCALARS)},
    )


def output_data(output: ReceivedOutput) -> Buffer:
    """Return the bytes of an output. Raises INTERNAL for values that do not fit its datatype and shape."""
    if output.data is not None:
        return output.data
    try:
        return tensor_data.from_json(output.name, output.datatype, prod(output.shape), output.values)
    except ConchError as error:  # its message may be for a request
        raise internal(f"output '{output.name}' of the response cannot be read: {error.message}") from None


def _document(data: Buffer) -> Any:
    try:
        return text.loads(data)
    except ConchError:  # its message is for a request
        raise internal("the response is not an inference response: it is not JSON") from None


def decode_error(status: int, body: bytes) -> ConchError:
    """Return the error of an unsuccessful response."""
    try:
        message = str(text.loads(body)["error"])
    except (ConchError, ValueError, KeyError, TypeError):
        message = " ".join(body[:300].decode("utf-8", "replace").split()) or f"HTTP status {status}"
    return ConchError(message, CODES.get(status, Code.UNKNOWN))
