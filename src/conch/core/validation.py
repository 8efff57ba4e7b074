"""Checks a request against its model before it is scheduled.

The server calls it for every request of every front end. The order and the messages of the checks are Triton's, so that
clients see the same errors.
"""

from __future__ import annotations

from math import prod
from struct import Struct
from typing import Final, NamedTuple

from conch.core.errors import ConchError, invalid
from conch.core.inference import InferRequest, ModelSignature, TensorSpec
from conch.core.tensors import ELEMENT_SIZE, MAX_ELEMENTS, Buffer, WireTensor, format_shape

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
        if tensor.elements is None:
            _check_strings(model, request, tensor, count)
            tensor.elements = count
        elif tensor.elements != count:
            raise _wrong_count(model, request, tensor, tensor.elements, count)
    elif len(tensor.data) != count * ELEMENT_SIZE[spec.datatype]:
        raise request.error(
            f"input byte size mismatch for input '{name}' for model '{model}'."
            f" Expected {count * ELEMENT_SIZE[spec.datatype]}, got {len(tensor.data)}"
        )
    if spec.reshape is not None:
        variable = iter([size for size, dim in zip(dims, spec.dims, strict=True) if dim == -1])
        batch = shape[:1] if signature.max_batch_size > 0 else ()
        reshaped = (*batch, *(next(variable) if dim == -1 else dim for dim in spec.reshape))
        # Other requests may share the tensor.
        request.inputs[name] = WireTensor(name, tensor.datatype, reshaped, tensor.data, tensor.elements)


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


def has_strings(data: Buffer, count: int) -> bool:
    """Whether BYTES data has at least ``count`` elements; looks at no more of them."""
    return _walk_strings(data, count).seen == count


def count_strings(model: str, request: InferRequest, tensor: WireTensor) -> int:
    """Return the number of elements of a BYTES input; copies none. Raises INVALID_ARG for malformed data."""
    walk = _walk_strings(tensor.data, MAX_ELEMENTS)
    _check_end(model, request, tensor, walk)
    return walk.seen


def _check_strings(model: str, request: InferRequest, tensor: WireTensor, count: int) -> None:
    """Check that the data contains exactly ``count`` elements, preceded by their lengths; copies no element."""
    walk = _walk_strings(tensor.data, count)
    if walk.seen == count and walk.end + 4 <= len(tensor.data):
        raise _wrong_count(model, request, tensor, count + 1, count)
    if walk.end >= len(tensor.data) and walk.seen != count:
        raise _wrong_count(model, request, tensor, walk.seen, count)
    _check_end(model, request, tensor, walk)


class _Walk(NamedTuple):
    """The number of elements, the position after the last one, and its size (bytes)."""

    seen: int
    end: int
    size: int


def _walk_strings(data: Buffer, limit: int) -> _Walk:
    """Walk over at most ``limit`` elements; the last one may end after the data."""
    last, at, count, size = len(data) - 4, 0, 0, 0
    while at <= last and count < limit:
        size = _LENGTH.unpack_from(data, at)[0]
        at += 4 + size
        count += 1
    return _Walk(count, at, size)


def _check_end(model: str, request: InferRequest, tensor: WireTensor, walk: _Walk) -> None:
    """Raise INVALID_ARG unless the data ends with the last element."""
    missing = walk.end - len(tensor.data)
    if missing < 0:
        raise request.error(
            f"incomplete string length indicator for inference input '{tensor.name}' for model '{model}',"
            f" expecting 4 bytes but only {-missing} bytes available. Please make sure the string length indicator is"
            " in one buffer."
        )
    if missing > 0:
        raise invalid(
            f"incomplete string data for inference input '{tensor.name}', expecting string of length {walk.size}"
            f" but only {walk.size - missing} bytes available"
        )


def _wrong_count(model: str, request: InferRequest, tensor: WireTensor, count: int, expected: int) -> ConchError:
    """Return the error for BYTES data of ``count`` elements; beyond ``expected``, Triton counts only one."""
    subject = f"inference input '{tensor.name}' for model '{model}'"
    if count > expected:
        return request.error(f"unexpected number of string elements {expected + 1} for {subject}, expecting {expected}")
    return request.error(f"expected {expected} string elements for {subject}, got {count}")
