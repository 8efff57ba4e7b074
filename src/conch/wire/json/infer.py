"""Bodies of ``POST …/infer``: decodes requests of JSON and binary tensors, and encodes responses.

Called by the HTTP front end for every inference on the event loop; large JSON is handled in a process. Binary
tensors are slices of the body, never copies. Source: the KServe v2 protocol with Triton's extensions for binary data,
classification, sequences, scheduling and parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

from conch.core.errors import ConchError, invalid
from conch.core.inference import (
    SEQUENCE_END,
    SEQUENCE_START,
    InferRequest,
    InferResponse,
    ModelSignature,
    ParameterValue,
)
from conch.core.tensors import ELEMENT_SIZE, MAX_ELEMENTS, Buffer, WireTensor, format_shape
from conch.wire.classification import classify
from conch.wire.json import tensor as tensor_data
from conch.wire.json import text
from conch.wire.regions import NO_REGIONS, OFFSET, REGION, SIZE, Regions

_HINT: Final = "Use --http-max-input-size to increase the limit."
_INPUTS: Final = "Unable to parse 'inputs'"
_NAME: Final = "Unable to parse 'name'"
_DATATYPE: Final = "Unable to parse 'datatype'"
_SHAPE: Final = "Unable to parse 'shape'"


def read_inputs(
    document: dict[str, Any], binary: Buffer, request: InferRequest, max_input_size: int, regions: Regions
) -> None:
    """Fill ``request.inputs``; ``binary`` is the data after the JSON of the body and must be used completely.

    Binary data is sliced, not copied.
    """
    inputs = request.inputs
    at = 0
    for item in text.as_array(text.member(document, "inputs", _INPUTS), _INPUTS):
        parameters = text.optional_object(item, "parameters")
        source = _source(item, parameters)
        name = text.as_string(text.member(item, "name", _NAME), _NAME)
        datatype = text.as_string(text.member(item, "datatype", _DATATYPE), _DATATYPE)
        shape = _shape(name, datatype, item)
        data: Buffer
        if source == "data":
            data = _from_json(name, datatype, shape, item["data"], max_input_size)
        elif source == "binary_data_size":
            size = text.as_unsigned(parameters["binary_data_size"], "Unable to parse 'binary_data_size'")
            data = binary[at : at + size]
            at += size
            if at > len(binary):
                raise invalid(
                    f"unexpected size for input '{name}', expecting {at - len(binary)} additional bytes"
                    f" for model '{request.model_name}'"
                )
        else:
            data = regions.read(datatype, *read_part(parameters))
            request.shared = regions
        if name in inputs:
            raise request.error(f"input '{name}' already exists in request")
        inputs[name] = WireTensor(name, datatype, shape, data)
    if at != len(binary):
        raise invalid(f"unexpected additional input data for model '{request.model_name}'")


def read_part(parameters: dict[str, Any]) -> tuple[str, int, int]:
    """Return the name of a tensor's region, and its offset and size there (bytes), 0 if missing."""
    name = text.as_string(parameters[REGION], f"Unable to parse '{REGION}'")
    offset, size = (
        text.as_unsigned(parameters[key], f"Unable to parse '{key}'") if key in parameters else 0
        for key in (OFFSET, SIZE)
    )
    return name, offset, size


def raw_input(body: Buffer, signature: ModelSignature, request: InferRequest, max_input_size: int) -> None:
    """Use the whole body as the model's only input; derive its shape from the size of the body."""
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
        body = b"".join((len(body).to_bytes(4, "little"), body))
        shape = (*batch, 1)
    elif spec.dims.count(-1) > 1:
        raise request.error(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one"
            " variable-sized dimension"
        )
    else:
        row = prod(dim for dim in spec.dims if dim != -1) * ELEMENT_SIZE[spec.datatype]
        shape = (*batch, *(len(body) // row if dim == -1 else dim for dim in spec.dims))
    request.inputs[spec.name] = WireTensor(spec.name, spec.datatype, shape, body)


def _source(item: Any, parameters: dict[str, Any]) -> str:
    """Return the location of an input's data, exactly one of three."""
    has_data = type(item) is dict and "data" in item
    if has_data and not parameters:
        return "data"
    fields = ["data"] if has_data else []
    fields += [key for key in ("binary_data_size", REGION) if key in parameters]
    if len(fields) != 1:
        state = f"set {' '.join(map(repr, fields))}" if fields else "no field is set"
        raise invalid(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
            f" 'shared_memory_region' in 'parameters'. But {state}"
        )
    return fields[0]


def _from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any, max_input_size: int) -> bytes:
    count = prod(shape)
    # A BYTES element takes at least its length field of 4 bytes.
    size = count * ELEMENT_SIZE.get(datatype, 4)
    if size > max_input_size:
        raise invalid(
            f"JSON input '{name}' has a byte_size ({size} bytes) that exceeds the maximum allowed value"
            f" of {max_input_size} bytes. {_HINT}"
        )
    return tensor_data.from_json(name, datatype, count, data)


def _shape(name: str, datatype: str, item: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of an input; refuses shapes whose elements or bytes cannot be counted in 63 bits."""
    shape = tuple([text.as_unsigned(dim, _SHAPE) for dim in text.as_array(text.member(item, "shape", _SHAPE), _SHAPE)])
    size = ELEMENT_SIZE.get(datatype, 1)
    count = 1
    for dim in shape:
        count *= dim or 1
        if count * size > MAX_ELEMENTS:
            raise _overflow(name, shape, size)
    return shape


def _overflow(name: str, shape: tuple[int, ...], size: int) -> ConchError:
    prefix = f"invalid shape for input '{name}': shape {format_shape(shape)}"
    if any(dim > MAX_ELEMENTS for dim in shape):
        return invalid(f"{prefix} contains one or more invalid dimensions")
    count = 1
    for dim in shape:
        count *= dim or 1
        # The product is not computed to the end: with many large dimensions this would take too long.
        if count > MAX_ELEMENTS:
            return invalid(f"{prefix} causes total element count to exceed maximum size of {MAX_ELEMENTS}")
    return invalid(
        f"byte size overflow for input '{name}': element count ({count}) * data type size ({size})"
        f" exceeds maximum allowed size ({MAX_ELEMENTS})"
    )


#: Default of ``--http-max-input-size`` (bytes).
MAX_INPUT_SIZE: Final = 64 << 20


class RequestedOutput(NamedTuple):
    """The requested form of an output: binary or JSON, all values or the ``classification`` best classes."""

    binary: bool
    classification: int = 0


@dataclass(slots=True)
class JsonOutputPlan:
    """The form of the response that the client requested.

    ``outputs`` is empty if the client names none and gets all, in binary form if ``binary`` is true. ``batched`` is
    true if outputs have a batch dimension.
    """

    binary: bool = False
    batched: bool = False
    outputs: dict[str, RequestedOutput] = field(default_factory=dict)


def parse_header_length(value: bytes | None, content_length: int) -> int | None:
    """Return the value of ``Inference-Header-Content-Length``, the size of the JSON in a body (bytes).

    Returns None without the header (the whole body is JSON), 0 for a raw request. ``content_length`` is the size of the
    decompressed body.
    """
    if value is None:
        return None
    shown = value.decode("latin-1")
    if not re.fullmatch(r"[ \t]*[+-]?[0-9]{1,100}[ \t]*", shown):
        raise invalid(f"Unable to parse Inference-Header-Content-Length, got: {shown}")
    length = int(shown)
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
    regions: Regions = NO_REGIONS,
) -> tuple[InferRequest, JsonOutputPlan]:
    """Decode a request, and the form of its response.

    ``header_length`` comes from :func:`parse_header_length`. The request is not yet checked against the model
    (:mod:`conch.core.validation` does that). Raises :class:`ConchError` with Triton's messages and codes for an invalid
    body.
    """
    if header_length == 0 or (header_length is None and not body):
        request = InferRequest(signature.name, {}, on_response, model_version=signature.version)
        raw_input(body, signature, request, max_input_size)
        return request, JsonOutputPlan(binary=True, batched=signature.max_batch_size > 0)
    header, binary = _split(body, header_length)
    return decode_split(header, binary, signature, on_response, max_input_size=max_input_size, regions=regions)


def decode_split(
    header: Buffer,
    binary: Buffer,
    signature: ModelSignature,
    on_response: Callable[[InferResponse], None],
    *,
    max_input_size: int = MAX_INPUT_SIZE,
    regions: Regions = NO_REGIONS,
) -> tuple[InferRequest, JsonOutputPlan]:
    """Decode a request from its JSON ``header`` and the ``binary`` data after it, as :func:`decode_infer` does."""
    request = InferRequest(signature.name, {}, on_response, model_version=signature.version)
    plan = JsonOutputPlan(batched=signature.max_batch_size > 0)
    check_json_size(len(header), max_input_size)
    document = text.loads(header)
    if type(document) is not dict:
        document = {}
    if "id" in document:
        request.id = text.as_string(document["id"], "Unable to parse 'id'")
    if "parameters" in document:
        _read_parameters(document["parameters"], request, plan)
        if request.parameters and signature.check_parameters is not None:
            signature.check_parameters(request.parameters)
    read_inputs(document, binary, request, max_input_size, regions)
    if "outputs" in document:
        _read_outputs(document["outputs"], request, plan, regions)
    return request, plan


def check_json_size(size: int, max_input_size: int) -> None:
    """Raise INVALID_ARG for JSON larger than ``--http-max-input-size``."""
    if size > max_input_size:
        raise invalid(
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of {max_input_size} bytes."
            " Use --http-max-input-size to increase the limit."
        )


def _split(body: Buffer, header_length: int | None) -> tuple[Buffer, Buffer]:
    """Split a body into its JSON and the binary data after it."""
    size = len(body)
    if header_length is None or header_length == size:
        return body, b""
    if header_length > size:
        raise invalid(f"unexpected size for request JSON, expecting {header_length - size} more bytes")
    view = memoryview(body)
    return view[:header_length], view[header_length:]


def _read_parameters(value: Any, request: InferRequest, plan: JsonOutputPlan) -> None:
    custom: dict[str, ParameterValue] = {}
    for key, item in text.as_members(value, "failed to get request params.").items():
        if key == "sequence_id":
            request.correlation_id = _correlation_id(item)
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


def _correlation_id(value: Any) -> int | str:
    if type(value) is int and 0 <= value < 2**64:
        return value
    return text.as_string(value, "Unable to parse 'sequence_id'")


def as_parameter(key: str, value: Any) -> ParameterValue:
    """Return a custom request parameter: a string, a bool, a 64-bit integer or another number."""
    text.as_string(key)
    if isinstance(value, str):
        return text.as_string(value)
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else float(value)
    raise invalid(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _unable(key: str) -> str:
    return f"Unable to parse '{key}'"


def _read_outputs(value: Any, request: InferRequest, plan: JsonOutputPlan, regions: Regions) -> None:
    outputs = plan.outputs
    for item in text.as_array(value, "Unable to parse 'outputs'"):
        name = text.as_string(text.member(item, "name", _NAME), _NAME)
        if name in outputs:
            raise request.error(f"output '{name}' already exists in request")
        parameters = text.optional_object(item, "parameters")
        # ``binary_data_output`` applies only to requests that name no outputs, as in Triton.
        outputs[name] = _requested(parameters) if parameters else RequestedOutput(binary=False)
        if REGION in parameters:
            regions.set_target(name, *read_part(parameters))
            request.shared = regions
    request.outputs = tuple(outputs)


def _requested(parameters: dict[str, Any]) -> RequestedOutput:
    classification, binary = 0, False
    if "classification" in parameters:
        classification = text.as_unsigned(parameters["classification"], "Unable to set 'classification'")
    if REGION in parameters:
        if classification:
            raise invalid("Output can't set both 'shared_memory_region' and 'classification'")
        if text.as_bool(parameters.get("binary_data", False), _unable("binary_data")):
            raise invalid("Output can't set both 'shared_memory_region' and 'binary_data'")
    if "binary_data" in parameters:
        binary = text.as_bool(parameters["binary_data"], _unable("binary_data"))
    return RequestedOutput(binary, classification)


def encode_infer(
    request: InferRequest,
    response: InferResponse,
    plan: JsonOutputPlan,
    labels: Callable[[str], Sequence[str] | None],
) -> tuple[bytes, list[Buffer]]:
    """Encode a response as its JSON and the binary tensors that follow it.

    ``labels`` returns the lines of an output's label file, if it has one. Outputs in shared memory have been written
    there. Without binary tensors, the body is plain JSON and needs no ``Inference-Header-Content-Length``. Raises
    INVALID_ARG for outputs that cannot be written in the requested form.
    """
    outputs: list[dict[str, Any]] = []
    blobs: list[Buffer] = []
    requested, shared = plan.outputs, request.shared
    for tensor in response.outputs:
        binary, classes = plan.binary, 0
        if requested:
            if tensor.name not in requested:
                continue
            binary, classes = requested[tensor.name]
        if classes:
            tensor = classify(tensor, classes, labels(tensor.name), plan.batched)
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if shared is not None and tensor.name in shared.output_targets:
            outputs.append(entry)
            continue
        if binary:
            size = len(tensor.data)
            entry["parameters"] = {"binary_data_size": size}
            if size:
                blobs.append(tensor.data)
        else:
            entry["data"] = text.numbers(tensor_data.to_json(tensor))
        outputs.append(entry)

    document: dict[str, Any] = {}
    if request.id:
        document["id"] = request.id
    document["model_name"] = request.model_name
    document["model_version"] = str(request.model_version)
    if response.parameters:
        document["parameters"] = {key: text.numbers(value) for key, value in response.parameters.items()}
    document["outputs"] = outputs
    return text.dumps(document), blobs
