"""Bodies of ``POST …/infer``: from JSON (and binary tensors behind it) to a request, and from a response back.

Called by the HTTP front end for every inference, on the event loop.  Tensors given in binary are
slices of the body, never copies.  Source: the KServe v2 protocol with Triton's extensions for
binary data, classification, sequences, scheduling and parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

from conch.errors import ConchError, invalid, unsupported
from conch.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse, ModelSignature, ParameterValue
from conch.tensors import ELEMENT_SIZE, MAX_ELEMENTS, Buffer, Tensor, format_shape
from conch.wire.json import tensor as tensor_data
from conch.wire.json import text
from conch.wire.json.classification import classify

#: What ``--http-max-input-size`` is unless given, in bytes.
MAX_INPUT_SIZE: Final = 64 << 20
_HINT: Final = "Use --http-max-input-size to increase the limit."
_SHARED_MEMORY: Final = "shared memory is not available in this build of conch"


class RequestedOutput(NamedTuple):
    """How the client wants one output: in binary or as JSON, whole or as its ``classification`` best classes."""

    binary: bool
    classification: int = 0


@dataclass(slots=True)
class OutputPlan:
    """How the client wants the response.  ``outputs`` is empty when all outputs are wanted."""

    binary: bool = False
    batched: bool = False
    outputs: dict[str, RequestedOutput] = field(default_factory=dict)


def parse_header_length(value: bytes | None, content_length: int) -> int | None:
    """The value of ``Inference-Header-Content-Length``: how many bytes of the body are JSON.

    ``None`` without the header (all of the body is JSON), 0 for a raw request.
    ``content_length`` is that of the body after decompression.
    """
    if value is None:
        return None
    shown = value.decode("latin-1")
    try:
        length = int(shown)
    except ValueError:
        raise invalid(f"Unable to parse Inference-Header-Content-Length, got: {shown}") from None
    if not -(2**31) <= length < 2**31:
        raise invalid(
            "Unable to parse Inference-Header-Content-Length, value is out of range"
            f" [ -2147483648, 2147483647 ], got: {shown}"
        )
    if not 0 <= length <= content_length:
        raise invalid(f"inference header size should be in range (0, {content_length}), got: {shown}")
    return length


def decode_infer(
    body: Buffer,
    header_length: int | None,
    signature: ModelSignature,
    on_response: Callable[[InferResponse], None],
    *,
    max_input_size: int = MAX_INPUT_SIZE,
) -> tuple[InferRequest, OutputPlan]:
    """The request in ``body``, and how its response is to be written.

    ``header_length`` comes from :func:`parse_header_length`.  The request is not yet checked
    against the model (:mod:`conch.validation` does that).  Raises :class:`ConchError` with
    Triton's texts and codes for whatever is wrong with the body.
    """
    if header_length == 0 or (header_length is None and not body):
        return _decode_raw(body, signature, on_response, max_input_size)
    size = len(body)
    if header_length is None or header_length == size:
        header, binary = body, None
    elif header_length > size:
        raise invalid(f"unexpected size for request JSON, expecting {header_length - size} more bytes")
    else:
        view = memoryview(body)
        header, binary = view[:header_length], view[header_length:]
    if len(header) > max_input_size:
        raise invalid(
            f"request JSON size of {len(header)} bytes exceeds the maximum allowed input size"
            f" of {max_input_size} bytes. {_HINT}"
        )
    document = text.loads(header)
    if type(document) is not dict:
        document = {}

    request = InferRequest(signature.name, {}, on_response, model_version=signature.version)
    plan = OutputPlan(batched=signature.max_batch_size > 0)
    if "id" in document:
        request.id = text.as_string(document["id"], "Unable to parse 'id'")
    if "parameters" in document:
        _read_parameters(document["parameters"], request, plan)
    _Inputs(request, binary, max_input_size).read(document)
    if "outputs" in document:
        _read_outputs(document["outputs"], request, plan)
    return request, plan


def _read_parameters(value: Any, request: InferRequest, plan: OutputPlan) -> None:
    custom: dict[str, ParameterValue] = {}
    for key, item in text.as_members(value, "Unable to parse 'parameters'").items():
        if key == "sequence_id":
            request.correlation_id = item if type(item) is str else text.as_unsigned(item, _unable(key))
        elif key == "sequence_start":
            request.flags |= SEQUENCE_START if text.as_bool(item, _unable(key)) else 0
        elif key == "sequence_end":
            request.flags |= SEQUENCE_END if text.as_bool(item, _unable(key)) else 0
        elif key == "priority":
            request.priority = text.as_unsigned(item, _unable(key))
        elif key == "timeout":
            request.timeout = text.as_unsigned(item, _unable(key))
        elif key == "binary_data_output":
            plan.binary = text.as_bool(item, _unable(key))
        elif key.startswith("triton_"):
            raise invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        else:
            custom[key] = as_parameter(key, item)
    request.parameters = custom


def as_parameter(key: str, value: Any) -> ParameterValue:
    """A custom request parameter: a string, an integer of 64 bits, a bool or a number."""
    if type(value) in (str, bool, float) or (type(value) is int and -(2**63) <= value < 2**63):
        return value  # type: ignore[no-any-return]
    raise invalid(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _unable(key: str) -> str:
    return f"Unable to parse '{key}'"


class _Inputs:
    """Reads the inputs of one request; ``binary`` is what follows the JSON, ``None`` if nothing can."""

    def __init__(self, request: InferRequest, binary: memoryview | None, max_input_size: int) -> None:
        self.request = request
        self.binary = binary
        self.at = 0
        self.max_input_size = max_input_size

    def read(self, document: dict[str, Any]) -> None:
        inputs = self.request.inputs
        for item in text.as_array(text.member(document, "inputs", "Unable to parse 'inputs'"), "Unable to parse 'inputs'"):
            tensor = self._tensor(item)
            if tensor.name in inputs:
                raise self.request.error(f"input '{tensor.name}' already exists in request")
            inputs[tensor.name] = tensor
        if self.binary is not None and self.at != len(self.binary):
            raise invalid(f"unexpected additional input data for model '{self.request.model_name}'")

    def _tensor(self, item: Any) -> Tensor:
        name = text.as_string(text.member(item, "name", "Unable to parse 'name'"), "Unable to parse 'name'")
        datatype = text.as_string(
            text.member(item, "datatype", "Unable to parse 'datatype'"), "Unable to parse 'datatype'"
        )
        shape = _shape(name, datatype, item)
        size, region = self._placement(item)
        data = item.get("data")
        given = [
            word
            for word, present in (
                ("'data'", data is not None),
                ("'binary_data_size'", size is not None),
                ("'shared_memory_region'", region is not None),
            )
            if present
        ]
        if len(given) != 1:
            raise invalid(
                "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
                " 'shared_memory_region' in 'parameters'. But "
                + (f"set {' '.join(given)}" if given else "no field is set")
            )
        if region is not None:
            raise unsupported(_SHARED_MEMORY)
        if size is not None:
            return Tensor(name, datatype, shape, self._binary(name, size))
        return Tensor(name, datatype, shape, self._json(name, datatype, shape, data))

    def _placement(self, item: dict[str, Any]) -> tuple[int | None, str | None]:
        """The size of binary data and the shared memory region that an input's parameters name."""
        parameters = item.get("parameters")
        if not parameters:
            return None, None
        size = region = None
        if "binary_data_size" in parameters:
            size = text.as_unsigned(parameters["binary_data_size"], "Unable to parse 'binary_data_size'")
        if "shared_memory_region" in parameters:
            region = text.as_string(parameters["shared_memory_region"], "Unable to parse 'shared_memory_region'")
        return size, region

    def _binary(self, name: str, size: int) -> Buffer:
        if self.binary is None:
            if not size:
                return b""
            raise invalid(
                "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size'"
                " when passing inputs in binary data format"
            )
        start = self.at
        end = start + size
        if end > len(self.binary):
            raise invalid(
                f"unexpected size for input '{name}', expecting {end - len(self.binary)} additional bytes"
                f" for model '{self.request.model_name}'"
            )
        self.at = end
        return self.binary[start:end]

    def _json(self, name: str, datatype: str, shape: tuple[int, ...], data: Any) -> bytes:
        count = prod(shape)
        size = count * ELEMENT_SIZE.get(datatype, 4)
        if size > self.max_input_size:
            raise invalid(
                f"JSON input '{name}' has a byte_size ({size} bytes) that exceeds the maximum allowed value"
                f" of {self.max_input_size} bytes. {_HINT}"
            )
        return tensor_data.from_json(name, datatype, count, data)


def _shape(name: str, datatype: str, item: dict[str, Any]) -> tuple[int, ...]:
    """The shape of an input; refuses shapes whose elements or bytes cannot be counted in 64 bits."""
    values = text.as_array(text.member(item, "shape", "Unable to parse 'shape'"), "Unable to parse 'shape'")
    shape = tuple([text.as_unsigned(value, "Unable to parse 'shape'") for value in values])
    count = prod(shape)
    if not count or count * ELEMENT_SIZE.get(datatype, 1) > MAX_ELEMENTS:
        _check_overflow(name, datatype, shape)
    return shape


def _check_overflow(name: str, datatype: str, shape: tuple[int, ...]) -> None:
    prefix = f"invalid shape for input '{name}': shape {format_shape(shape)}"
    if any(dim > MAX_ELEMENTS for dim in shape):
        raise invalid(f"{prefix} contains one or more invalid dimensions")
    if prod(dim for dim in shape if dim) > MAX_ELEMENTS:
        raise invalid(f"{prefix} causes total element count to exceed maximum size of {MAX_ELEMENTS}")
    count, size = prod(shape), ELEMENT_SIZE.get(datatype, 1)
    if count * size > MAX_ELEMENTS:
        raise invalid(
            f"byte size overflow for input '{name}': element count ({count}) * data type size ({size})"
            f" exceeds maximum allowed size ({MAX_ELEMENTS})"
        )


def _read_outputs(value: Any, request: InferRequest, plan: OutputPlan) -> None:
    wanted = plan.outputs
    for item in text.as_array(value, "Unable to parse 'outputs'"):
        name = text.as_string(text.member(item, "name", "Unable to parse 'name'"), "Unable to parse 'name'")
        if name in wanted:
            raise request.error(f"output '{name}' already exists in request")
        parameters = item.get("parameters")
        wanted[name] = _requested(parameters, plan.binary) if parameters else RequestedOutput(plan.binary)
    request.outputs = tuple(wanted)


def _requested(parameters: dict[str, Any], binary: bool) -> RequestedOutput:
    classification = 0
    if "classification" in parameters:
        classification = text.as_unsigned(parameters["classification"], "Unable to set 'classification'")
    if "shared_memory_region" in parameters:
        for other in ("classification", "binary_data"):
            if other in parameters:
                raise invalid(f"Output can't set both 'shared_memory_region' and '{other}'")
        raise unsupported(_SHARED_MEMORY)
    if "binary_data" in parameters:
        binary = text.as_bool(parameters["binary_data"], "Unable to parse 'binary_data'")
    return RequestedOutput(binary, classification)


def _decode_raw(
    body: Buffer, signature: ModelSignature, on_response: Callable[[InferResponse], None], max_input_size: int
) -> tuple[InferRequest, OutputPlan]:
    """A raw request: the body is the data of the model's only input, whose shape follows from its size."""
    request = InferRequest(signature.name, {}, on_response, model_version=signature.version)
    if len(body) > max_input_size:
        raise invalid(
            f"Raw input has a byte_size ({len(body)} bytes) that exceeds the maximum allowed value"
            f" of {max_input_size} bytes. {_HINT}"
        )
    if len(signature.inputs) != 1:
        raise request.error(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(signature.inputs)} inputs"
            f" in '{signature.name}' model configuration"
        )
    (spec,) = signature.inputs.values()
    batch = (1,) if signature.max_batch_size > 0 else ()
    if spec.datatype == "BYTES":
        if spec.dims != (1,):
            raise request.error(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        shape = (*batch, 1)
        body = len(body).to_bytes(4, "little") + bytes(body)
    else:
        if spec.dims.count(-1) > 1:
            raise request.error(
                f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one"
                " variable-sized dimension"
            )
        row = prod(dim for dim in spec.dims if dim != -1) * ELEMENT_SIZE[spec.datatype]
        shape = (*batch, *(len(body) // row if dim == -1 else dim for dim in spec.dims))
    request.inputs[spec.name] = Tensor(spec.name, spec.datatype, shape, body)
    return request, OutputPlan(binary=True, batched=signature.max_batch_size > 0)


def encode_infer(
    request: InferRequest,
    response: InferResponse,
    plan: OutputPlan,
    labels: Callable[[str], Sequence[str] | None],
) -> tuple[bytes, list[Buffer]]:
    """A response as its JSON and the binary tensors that follow it.

    ``labels`` gives the label file's lines of an output, if it has one.  Without binary tensors
    the body is plain JSON and needs no ``Inference-Header-Content-Length``.  Raises INVALID_ARG
    for outputs that cannot be written the way the client asked.
    """
    outputs: list[dict[str, Any]] = []
    blobs: list[Buffer] = []
    wanted = plan.outputs
    for tensor in response.outputs:
        binary, classes = plan.binary, 0
        if wanted:
            if tensor.name not in wanted:
                continue
            binary, classes = wanted[tensor.name]
        if classes:
            tensor = classify(tensor, classes, labels(tensor.name), plan.batched)
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if binary:
            size = len(tensor.data)
            entry["parameters"] = {"binary_data_size": size}
            if size:
                blobs.append(tensor.data)
        else:
            entry["data"] = tensor_data.to_json(tensor)
        outputs.append(entry)

    document: dict[str, Any] = {}
    if request.id:
        document["id"] = text.string(text.utf8(request.id))
    document["model_name"] = response.model_name or request.model_name
    document["model_version"] = str(
        response.model_version if response.model_version != -1 else request.model_version
    )
    if response.parameters:
        document["parameters"] = parameters_to_json(response.parameters)
    document["outputs"] = outputs
    return text.dumps(document), blobs
