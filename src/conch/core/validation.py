"""Checks a request against its model before it is scheduled.

The server calls it for every request of every front end. The order and the messages of the checks are Triton's, so that
clients see the same errors.
"""

from __future__ import annotations

from math import prod
from struct import Struct
from typing import Final

from conch.core.errors import ConchError, invalid
from conch.core.inference import InferRequest, ModelSignature, TensorSpec
from conch.core.tensors import ELEMENT_SIZE, Buffer, WireTensor, format_shape

_LENGTH: Final = Struct("<I")
_BATCH_NOTE: Final = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each"
    " input shape. If you want to specify the full shape including the batch dim in your input dims config, try"
    " setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def validate_request(signature: ModelSignature, request: InferRequest) -> None:
    """Raise INVALID_ARG if the model does not accept ``request``.

    Sets ``request.batch_size`` (1 for a model without batching) and reshapes inputs with a ``reshape`` to the shape
    that the model sees, so it must be called only once per request.
    """
    for name in request.outputs:
        if name not in signature.outputs:
            raise invalid(f"unexpected inference output '{name}' for model '{signature.name}'")
    specs, inputs = signature.inputs, request.inputs
    if inputs.keys() != specs.keys():
        _check_names(signature, request)
    if signature.max_batch_size > 0:
        request.batch_size = _batch_size(signature, request)
    for name, tensor in reversed(inputs.items()):
        _check_tensor(signature, request, specs[name], tensor)


def _check_names(signature: ModelSignature, request: InferRequest) -> None:
    """Check that all required inputs, and no others, are present."""
    specs, inputs = signature.inputs, request.inputs
    required = sum(not spec.optional for spec in specs.values())
    if not required <= len(inputs) <= len(specs):
        if required == len(specs):
            text = f"expected {len(specs)} inputs but got {len(inputs)} inputs"
        else:
            text = f"expected number of inputs between {required} and {len(specs)} but got {len(inputs)} inputs"
        names = ",".join(f"'{name}'" for name in reversed(inputs))
        missing = ",".join(f"'{name}'" for name, spec in specs.items() if not spec.optional and name not in inputs)
        # Triton omits the bracket if nothing is missing.
        raise request.error(
            f"{text} for model '{signature.name}'. Got input(s) [{names}], but missing required input(s)"
            f" {'[' if missing else ''}{missing}]. Please provide all required input(s)."
        )
    for name in reversed(inputs):
        if name not in specs:
            raise invalid(f"unexpected inference input '{name}' for model '{signature.name}'")


def _batch_size(signature: ModelSignature, request: InferRequest) -> int:
    batch: int | None = None
    for name, tensor in reversed(request.inputs.items()):
        if not tensor.shape:
            raise request.error(
                f"input '{name}' has no shape but model requires batch dimension for '{signature.name}'"
            )
        if tensor.shape[0] < 0:
            raise _wrong_shape(signature, request, name, tensor.shape)
        if batch is None:
            batch = tensor.shape[0]
        elif tensor.shape[0] != batch:
            raise request.error(f"input '{name}' batch size does not match other inputs for '{signature.name}'")
    # A batch of 0 counts as 1; the check of the data size then fails.
    batch = batch or 1
    if batch > signature.max_batch_size:
        raise request.error(
            f"inference request batch-size must be <= {signature.max_batch_size} for '{signature.name}'"
        )
    return batch


def _check_tensor(signature: ModelSignature, request: InferRequest, spec: TensorSpec, tensor: WireTensor) -> None:
    model, name = signature.name, spec.name
    if tensor.datatype != spec.datatype:
        raise request.error(
            f"inference input '{name}' data-type is '{tensor.datatype}', but model '{model}' expects '{spec.datatype}'"
        )
    shape = tensor.shape
    dims = shape[1:] if signature.max_batch_size > 0 else shape
    if (dims != spec.dims or -1 in dims) and not _fits(dims, spec.dims):
        raise _wrong_shape(signature, request, name, shape)
    count = prod(dims) * (request.batch_size if signature.max_batch_size > 0 else 1)
    if spec.datatype == "BYTES":
        if tensor.elements != count:
            _check_strings(signature, request, tensor, count)
            tensor.elements = count
    elif len(tensor.data) != count * ELEMENT_SIZE[spec.datatype]:
        raise request.error(
            f"input byte size mismatch for input '{name}' for model '{model}'."
            f" Expected {count * ELEMENT_SIZE[spec.datatype]}, got {len(tensor.data)}"
        )
    if spec.reshape is not None:
        variable = iter([size for size, dim in zip(dims, spec.dims, strict=True) if dim == -1])
        batch = shape[:1] if signature.max_batch_size > 0 else ()
        tensor.shape = (*batch, *(next(variable) if dim == -1 else dim for dim in spec.reshape))


def _fits(dims: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(dims) == len(expected) and all(
        want in (-1, size) and size >= 0 for size, want in zip(dims, expected, strict=True)
    )


def _wrong_shape(signature: ModelSignature, request: InferRequest, name: str, shape: tuple[int, ...]) -> ConchError:
    if -1 in shape:
        return request.error(
            f"All input dimensions should be specified for input '{name}' for model '{signature.name}',"
            f" got {format_shape(shape)}"
        )
    dims = signature.inputs[name].dims
    batching = signature.max_batch_size > 0
    expected = (-1, *dims) if batching else dims
    return request.error(
        f"unexpected shape for input '{name}' for model '{signature.name}'."
        f" Expected {format_shape(expected)}, got {format_shape(shape)}. {_BATCH_NOTE if batching else ''}"
    )


def count_strings(data: Buffer, most: int = 2**63) -> int | None:
    """Return the number of elements in BYTES data, at most ``most``; None if the data is malformed."""
    end, at, seen = len(data), 0, 0
    while at + 4 <= end and seen < most:
        at += 4 + _LENGTH.unpack_from(data, at)[0]
        seen += 1
    return seen if at == end or (at < end and seen == most) else None


def _check_strings(signature: ModelSignature, request: InferRequest, tensor: WireTensor, count: int) -> None:
    """Check that the data contains exactly ``count`` length-prefixed elements; copies no element."""
    data, name, model = tensor.data, tensor.name, signature.name
    end, at, seen = len(data), 0, 0
    while at + 4 <= end:
        if seen == count:
            raise request.error(
                f"unexpected number of string elements {seen + 1} for inference input '{name}' for model '{model}',"
                f" expecting {count}"
            )
        size = _LENGTH.unpack_from(data, at)[0]
        at += 4 + size
        seen += 1
    if at < end:
        raise request.error(
            f"incomplete string length indicator for inference input '{name}' for model '{model}', expecting 4 bytes"
            f" but only {end - at} bytes available. Please make sure the string length indicator is in one buffer."
        )
    if seen != count:
        raise request.error(
            f"expected {count} string elements for inference input '{name}' for model '{model}', got {seen}"
        )
    if at > end:
        raise invalid(
            f"incomplete string data for inference input '{name}', expecting string of length {size}"
            f" but only {end - at + size} bytes available"
        )
