"""The inputs of one inference request: JSON data, binary data behind the JSON, or the raw body.

Called by :mod:`conch.wire.json.infer`.  Binary data is sliced, never copied.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

from conch.errors import ConchError, invalid
from conch.inference import InferRequest, ModelSignature
from conch.tensors import ELEMENT_SIZE, MAX_ELEMENTS, Buffer, WireTensor, format_shape
from conch.wire.json import tensor as tensor_data
from conch.wire.json import text
from conch.wire.regions import OFFSET, REGION, SIZE, Regions

_HINT: Final = "Use --http-max-input-size to increase the limit."
_INPUTS: Final = "Unable to parse 'inputs'"
_NAME: Final = "Unable to parse 'name'"
_DATATYPE: Final = "Unable to parse 'datatype'"
_SHAPE: Final = "Unable to parse 'shape'"


def read_inputs(
    document: dict[str, Any], binary: Buffer, request: InferRequest, max_input_size: int, regions: Regions
) -> None:
    """Fill ``request.inputs``; ``binary`` is what follows the JSON of the body and must be used up."""
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
    """The name of a tensor's region, and where in it the tensor is: offset and size (bytes), 0 where not given."""
    name = text.as_string(parameters[REGION], f"Unable to parse '{REGION}'")
    offset, size = (
        text.as_unsigned(parameters[key], f"Unable to parse '{key}'") if key in parameters else 0
        for key in (OFFSET, SIZE)
    )
    return name, offset, size


def raw_input(body: Buffer, signature: ModelSignature, request: InferRequest, max_input_size: int) -> None:
    """Take the whole body as the model's only input; its shape follows from the body's size."""
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
    """Where the data of an input is: exactly one of three places."""
    has_data = type(item) is dict and "data" in item
    if has_data and not parameters:
        return "data"
    given = ["data"] if has_data else []
    given += [key for key in ("binary_data_size", REGION) if key in parameters]
    if len(given) != 1:
        found = f"set {' '.join(map(repr, given))}" if given else "no field is set"
        raise invalid(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
            f" 'shared_memory_region' in 'parameters'. But {found}"
        )
    return given[0]


def _from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any, max_input_size: int) -> bytes:
    count = prod(shape)
    # The smallest that a BYTES element takes is its length.
    size = count * ELEMENT_SIZE.get(datatype, 4)
    if size > max_input_size:
        raise invalid(
            f"JSON input '{name}' has a byte_size ({size} bytes) that exceeds the maximum allowed value"
            f" of {max_input_size} bytes. {_HINT}"
        )
    return tensor_data.from_json(name, datatype, count, data)


def _shape(name: str, datatype: str, item: dict[str, Any]) -> tuple[int, ...]:
    """The shape of an input; refuses those whose elements or bytes cannot be counted in 63 bits."""
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
        # Not multiplied to the end: a product of many large dimensions takes for ever.
        if count > MAX_ELEMENTS:
            return invalid(f"{prefix} causes total element count to exceed maximum size of {MAX_ELEMENTS}")
    return invalid(
        f"byte size overflow for input '{name}': element count ({count}) * data type size ({size})"
        f" exceeds maximum allowed size ({MAX_ELEMENTS})"
    )
