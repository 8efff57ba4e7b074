"""Bodies of ``POST …/generate`` and ``…/generate_stream``: plain JSON objects in both directions.

Called by the HTTP front end on the event loop; large bodies are handled in an offloading process. Members named like an
input are tensors, all others are parameters. Source: Triton's generate extension.

Triton flattens every tensor into one list. Models that respond by row (``ModelSignature.by_row``) keep rows apart: a
list of texts gets a list of as many values, and a single value applies to all rows. For models that take one text per
request, each text of a list becomes a request; Triton refuses such a body, because a list does not fit a tensor of one
element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from math import prod
from typing import Any, Final

from conch.config.signature import no_such_input
from conch.core.errors import Code, ConchError, internal, invalid
from conch.core.inference import InferRequest, InferResponse, ModelSignature, ParameterValue, TensorSpec, ignore
from conch.core.tensors import Buffer, WireTensor
from conch.wire.json import tensor as tensor_data
from conch.wire.json import text
from conch.wire.json.infer import as_parameter, check_json_size

#: Maximum number of texts in a body.
MOST_TEXTS: Final = 256
#: Maximum number of members in a body with several texts; every member is repeated for each text.
MOST_MEMBERS: Final = 1000


def decode_texts(
    document: Mapping[str, Any], signature: ModelSignature, max_input_size: int
) -> list[InferRequest] | None:
    """Return a request for each text; None if no input of one element is given as a list.

    Raises the errors of ``split_texts`` and ``decode_document``, and INVALID_ARG for more than ``max_input_size`` bytes
    in total.
    """
    documents = split_texts(document, signature)
    if documents is None:
        return None
    requests: list[InferRequest] = []
    size = 0
    for index, single in enumerate(documents):
        request, _ = decode_document(single, signature, max_input_size)
        requests.append(request)
        size += sum(len(tensor.data) for tensor in request.inputs.values())
        if size > max_input_size:
            raise invalid(
                f"the requests of {index + 1} texts have {size} bytes, which exceeds the maximum allowed input size"
                f" of {max_input_size} bytes. Use --http-max-input-size to increase the limit."
            )
    return requests


def split_texts(document: Mapping[str, Any], signature: ModelSignature) -> list[dict[str, Any]] | None:
    """Return the body for each text of ``document``; None if no input of one element is given as a list.

    Single values apply to all texts. Raises INVALID_ARG for lists of different lengths, empty lists and too many texts.
    """
    listed = {
        name: value
        for name, value in document.items()
        if type(value) is list and (spec := signature.inputs.get(name)) is not None and spec.dims == (1,)
    }
    if not listed:
        return None
    lengths = {name: len(values) for name, values in listed.items()}
    first, count = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != count:
            raise invalid(f"'{first}' has {count} values and '{name}' has {length}; lists must have one value per text")
    if not 0 < count <= MOST_TEXTS:
        raise invalid(f"'{first}' is a list of {count}; a request may have 1 to {MOST_TEXTS} texts")
    if len(document) > MOST_MEMBERS:
        raise invalid(f"a request for several texts has {len(document)} members; at most {MOST_MEMBERS} are allowed")
    return [{**document, **{name: values[index] for name, values in listed.items()}} for index in range(count)]


def encode_texts(requests: Sequence[InferRequest], responses: Sequence[InferResponse]) -> bytes:
    """Encode one JSON object with a list for each output and parameter: the value for each text, null if missing.

    Raises INVALID_ARG for outputs that JSON cannot carry.
    """
    lists: dict[str, list[Any]] = {}
    for index, response in enumerate(responses):
        for name, value in _values(response).items():
            lists.setdefault(name, [None] * len(responses))[index] = value
    return text.dumps({**_head(requests[0]), **lists}, sort=True)


def _head(request: InferRequest) -> dict[str, Any]:
    """Return the members of a response that are not the model's."""
    head = {"model_name": request.model_name, "model_version": str(request.model_version)}
    return {**head, "id": request.id} if request.id else head


def _values(response: InferResponse) -> dict[str, Any]:
    values = {name: text.numbers(value) for name, value in response.parameters.items()}
    for tensor in response.outputs:
        elements = tensor_data.to_json(tensor)
        values[tensor.name] = text.numbers(elements[0] if len(elements) == 1 else elements)
    return values


#: The body of ``/generate`` if a model returns no response, or more than one.
NOT_ONE_RESPONSE: Final = (
    "generate expects model to produce exactly 1 response,"
    " use generate stream for model that generates various number of responses"
)

#: Inputs specific to conch's text models, which take the text of a JSON document.
_CONVERSATIONS: Final = frozenset({"messages", "tools"})


class Layout(Enum):
    """The JSON form of outputs: flat as in Triton, the value of a single row, or a list of row values."""

    FLAT = auto()
    ROW = auto()
    ROWS = auto()


def decode_generate(
    signature: ModelSignature, body: Buffer, texts: bool, max_input_size: int
) -> tuple[list[InferRequest], Layout | None]:
    """Decode a body: one request, not yet checked against the model, and the layout of its responses.

    If ``texts`` allows several texts and the body has a list of them, returns a request for each, and None. Raises
    :class:`ConchError` with Triton's messages and codes for an invalid body.
    """
    document = read_document(body, signature, max_input_size)
    requests = decode_texts(document, signature, max_input_size) if texts else None
    if requests is not None:
        return requests, None
    request, layout = decode_document(document, signature, max_input_size)
    return [request], layout


def read_document(body: Buffer, signature: ModelSignature, max_input_size: int) -> dict[str, Any]:
    """Return the members of a body.

    Raises :class:`ConchError` unless the body is an object of at most ``max_input_size`` bytes without duplicate
    inputs.
    """
    check_json_size(len(body), max_input_size)
    document = text.as_members(text.loads(body))
    data = body if not isinstance(body, memoryview) else bytes(body)
    # The parser keeps the last duplicate; counting the names in the bytes clears most bodies.
    suspects = [name for name in signature.inputs if data.count(b'"%b"' % text.utf8(name)) > 1]
    counts = Counter(text.members(data) if suspects else ())
    for name in suspects:
        if counts[name] > 1:
            id = document.get("id") or "<id_unknown>"
            raise invalid(f"[request id: {id}] input '{name}' already exists in request")
    return document


def decode_document(
    document: Mapping[str, Any], signature: ModelSignature, max_input_size: int
) -> tuple[InferRequest, Layout]:
    """Decode one request with these members, and the layout of its responses."""
    request = InferRequest(signature.name, {}, ignore, model_version=signature.version)
    if "id" in document:
        request.id = text.as_string(document["id"], "Unable to parse 'id'")
    reader = _Members(signature, request, max_input_size)
    for key, value in document.items():
        if key == "parameters":
            reader.read_parameters(value)
        else:
            reader.read(key, value)
    request.parameters = reader.parameters
    if request.parameters and signature.check_parameters is not None:
        signature.check_parameters(request.parameters)
    if not signature.by_row or not signature.max_batch_size:
        return request, Layout.FLAT
    return request, Layout.ROWS if reader.spread() > 1 or reader.listed else Layout.ROW


class _Members:
    """Converts the members of a body to tensors in ``request.inputs``, and to ``parameters``."""

    def __init__(self, signature: ModelSignature, request: InferRequest, max_input_size: int) -> None:
        self.signature = signature
        self.request = request
        self.max_input_size = max_input_size
        self.input_size = 0
        self.parameters: dict[str, ParameterValue] = {}
        #: Whether a required input was given as a list.
        self.listed = False

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
            self.parameters[key] = self._parameter(key, value)
        elif key in self.request.inputs:
            raise self.request.error(f"input '{key}' already exists in request")
        else:
            self.request.inputs[key] = self._tensor(spec, value)
            self.listed = self.listed or (type(value) is list and spec.dims == (1,) and not spec.optional)

    def _parameter(self, key: str, value: Any) -> ParameterValue:
        try:
            return as_parameter(key, value)
        except ConchError as error:
            if not isinstance(value, list | dict):
                raise
            # No parameter takes a list or an object, so an input was meant.
            sentence = no_such_input(self.signature, key)
            raise invalid(f"{error.message} {sentence[0].upper()}{sentence[1:]}") from None

    def spread(self) -> int:
        """Repeat single-row inputs to match the number of rows; returns that number.

        The check of the request handles more rows than the model accepts.
        """
        inputs = self.request.inputs
        rows = max([tensor.shape[0] for tensor in inputs.values()], default=0)
        if 1 < rows <= self.signature.max_batch_size:
            for name, tensor in inputs.items():
                if tensor.shape[0] == 1:
                    self._count(name, (rows - 1) * len(tensor.data))
                    shape = (rows, *tensor.shape[1:])
                    inputs[name] = WireTensor(name, tensor.datatype, shape, bytes(tensor.data) * rows)
        return rows

    def _tensor(self, spec: TensorSpec, value: Any) -> WireTensor:
        values = value if type(value) is list else [value]
        if (
            spec.name in _CONVERSATIONS
            and self.signature.by_row
            and any(type(element) is not str for element in values)
        ):
            raise invalid(
                f"input '{spec.name}' must be a string that contains JSON; a list of messages can be sent directly to "
                "/v1/chat/completions"
            )
        dims = (-1, *spec.dims) if self.signature.max_batch_size > 0 else spec.dims
        shape = deduced_shape(spec.name, dims, len(values))
        try:
            data = tensor_data.from_json(spec.name, spec.datatype, len(values), values)
        except ConchError as error:
            if error.code is not Code.INTERNAL:
                raise
            # Triton's words, which do not name the input.
            raise internal(f"{error.message} (input '{spec.name}')") from None
        self._count(spec.name, len(data))
        return WireTensor(spec.name, spec.datatype, shape, data)

    def _count(self, name: str, size: int) -> None:
        self.input_size += size
        if self.input_size > self.max_input_size:
            raise invalid(
                f"request size of {self.input_size} bytes with input '{name}' of size {size} bytes exceeds"
                f" the maximum allowed input size of {self.max_input_size} bytes."
                " Use --http-max-input-size to increase the limit."
            )


def deduced_shape(name: str, dims: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return ``dims`` with the last variable dimension set to fit ``count`` elements, and the others to 1."""
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


def encode_generate(request: InferRequest, response: InferResponse, layout: Layout = Layout.FLAT) -> bytes:
    """Encode a response as one JSON object with sorted keys; a tensor or row of one element is a scalar.

    Raises INVALID_ARG for outputs that JSON cannot carry.
    """
    document = _head(request)
    for key, value in response.parameters.items():
        document[key] = text.numbers(value)
    for tensor in response.outputs:
        values = tensor_data.to_json(tensor)
        if layout is Layout.FLAT or tensor.shape[:1] != (request.batch_size,):
            document[tensor.name] = text.numbers(values[0] if len(values) == 1 else values)
        else:
            rows = _rows(values, tensor.shape)
            document[tensor.name] = text.numbers(rows if layout is Layout.ROWS else rows[0], values)
    return text.dumps(document, sort=True)


def _rows(values: list[Any], shape: Sequence[int]) -> list[Any]:
    """Return the value of each row: nested by the other dimensions, a scalar if it is a single element."""
    width = prod(shape[1:])
    if width == 1:
        return values
    return [_nested(values[row * width : (row + 1) * width], shape[1:]) for row in range(shape[0])]


def _nested(values: list[Any], dims: Sequence[int]) -> list[Any]:
    if len(dims) < 2:
        return values
    width = prod(dims[1:])
    return [_nested(values[at * width : (at + 1) * width], dims[1:]) for at in range(dims[0])]


def server_sent_event(data: Buffer) -> bytes:
    """Return an event of a ``text/event-stream``; ``data`` is JSON on one line."""
    return b"".join((b"data: ", data, b"\n\n"))
