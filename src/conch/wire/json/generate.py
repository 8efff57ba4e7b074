"""Bodies of ``POST …/generate`` and ``…/generate_stream``: a plain JSON object in, plain JSON objects out.

Called by the HTTP front end: on the event loop, but for large bodies, which are decoded in a thread.  Members named
like an input are tensors, all others are parameters.  Source: Triton's generate extension.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

from conch.errors import ConchError, invalid
from conch.inference import InferRequest, InferResponse, ModelSignature, ParameterValue, TensorSpec
from conch.tensors import Buffer, WireTensor
from conch.wire.json import tensor as tensor_data
from conch.wire.json import text
from conch.wire.json.infer import MAX_INPUT_SIZE, as_parameter, check_json_size

#: The body of ``/generate`` when a model gives no response, or more than one.
NOT_ONE_RESPONSE: Final = (
    "generate expects model to produce exactly 1 response,"
    " use generate stream for model that generates various number of responses"
)


def decode_generate(
    body: Buffer,
    signature: ModelSignature,
    on_response: Callable[[InferResponse], None],
    *,
    max_input_size: int = MAX_INPUT_SIZE,
) -> InferRequest:
    """The request in ``body``, not yet checked against the model; all outputs are wanted.

    Raises :class:`ConchError` with Triton's texts and codes for whatever is wrong with the body.
    """
    check_json_size(len(body), max_input_size)
    document = text.as_members(text.loads(body))
    request = InferRequest(signature.name, {}, on_response, model_version=signature.version)
    if "id" in document:
        request.id = text.as_string(document["id"], "Unable to parse 'id'")
    reader = _Members(signature, request, max_input_size)
    for key, value in document.items():
        if key == "parameters":
            reader.read_parameters(value)
        else:
            reader.read(key, value)
    request.parameters = reader.parameters
    return request


class _Members:
    """Sorts the members of a body into tensors, which go into ``request.inputs``, and ``parameters``."""

    def __init__(self, signature: ModelSignature, request: InferRequest, max_input_size: int) -> None:
        self.signature = signature
        self.request = request
        self.max_input_size = max_input_size
        self.input_size = 0
        self.parameters: dict[str, ParameterValue] = {}

    def read_parameters(self, value: Any) -> None:
        if "parameters" in self.signature.inputs:
            raise invalid("Keyword 'parameters' for nested schema also given as input tensor name")
        for key, item in text.as_object(value, "Expected JSON object for keyword: 'parameters'").items():
            try:
                self.read(key, item)
            except ConchError as error:
                raise ConchError(f"Converting keyword: 'parameters': {error.message}", error.code) from None

    def read(self, key: str, value: Any) -> None:
        spec = self.signature.inputs.get(key)
        if spec is None:
            self.parameters[key] = as_parameter(key, value)
        elif key in self.request.inputs:
            raise self.request.error(f"input '{key}' already exists in request")
        else:
            self.request.inputs[key] = self._tensor(spec, value)

    def _tensor(self, spec: TensorSpec, value: Any) -> WireTensor:
        values = value if type(value) is list else [value]
        dims = (-1, *spec.dims) if self.signature.max_batch_size > 0 else spec.dims
        shape = _shape(spec.name, dims, len(values))
        data = tensor_data.from_json(spec.name, spec.datatype, len(values), values)
        self.input_size += len(data)
        if self.input_size > self.max_input_size:
            raise invalid(
                f"request size of {self.input_size} bytes with input '{spec.name}' of size {len(data)} bytes exceeds"
                f" the maximum allowed input size of {self.max_input_size} bytes."
                " Use --http-max-input-size to increase the limit."
            )
        return WireTensor(spec.name, spec.datatype, shape, data)


def _shape(name: str, dims: tuple[int, ...], count: int) -> tuple[int, ...]:
    """``dims`` with the last variable one filled so that ``count`` elements fit, the others being 1."""
    fixed = prod(dim for dim in dims if dim != -1)
    rest, remainder = divmod(count, fixed)
    if remainder or (rest != 1 and -1 not in dims):
        raise invalid(f"The schema can not convert input '{name}' to tensor with proper shape")
    shape: list[int] = []
    for dim in reversed(dims):
        shape.append(rest if dim == -1 else dim)
        if dim == -1:
            rest = 1
    return tuple(reversed(shape))


def encode_generate(request: InferRequest, response: InferResponse) -> bytes:
    """A response as one JSON object, keys in alphabetical order; a tensor of one element is a bare value.

    Raises INVALID_ARG for outputs that JSON cannot carry.
    """
    document: dict[str, Any] = {"model_name": request.model_name, "model_version": str(request.model_version)}
    if request.id:
        document["id"] = request.id
    for key, value in response.parameters.items():
        document[key] = text.numbers(value)
    for tensor in response.outputs:
        values = tensor_data.to_json(tensor)
        document[tensor.name] = text.numbers(values[0] if len(values) == 1 else values)
    return text.dumps(document, sort=True)


def server_sent_event(data: bytes) -> bytes:
    """One event of a ``text/event-stream``; ``data`` is JSON on one line."""
    return b"data: " + data + b"\n\n"
