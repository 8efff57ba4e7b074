"""Checks of inputs, outputs, and the tensors that batching adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from conch.config.problem import FieldPath, Problem, Problems
from conch.config.schema import BatchInput, BatchOutput, DataType, ModelConfig, ModelInput, ModelOutput

_DIMENSION = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def io_problems(config: ModelConfig) -> Problems:
    """Yield all errors in the tensors of a completed configuration."""
    for index, batch_input in enumerate(config.batch_input):
        # Triton reports it when a backend completes the configuration.
        if batch_input.data_type == DataType.TYPE_INVALID:
            yield Problem("unexpected batch input data type 'TYPE_INVALID'", ("batch_input", index))
    yield from written_io_problems(config)


def written_io_problems(config: ModelConfig) -> Problems:
    """Yield all errors in the tensors of a configuration that no backend completes."""
    for problem in _tensor_problems(config):
        yield Problem(f"{problem.message} for {config.name}", problem.field, hint=problem.hint)


def _tensor_problems(config: ModelConfig) -> Problems:
    for index, tensor in enumerate(config.input):
        where: FieldPath = ("input", index)
        yield from _one_tensor("model input", tensor, where, config.max_batch_size)
        if tensor.format != ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
            yield Problem("model input NHWC/NCHW require 3 dims", (*where, "format"))
        yield from _tensorrt_only(config, tensor, where)
    for index, tensor in enumerate(config.output):
        where = ("output", index)
        yield from _one_tensor("model output", tensor, where, config.max_batch_size)
        yield from _tensorrt_only(config, tensor, where)
    yield from _batch_input_problems(config)
    yield from _batch_output_problems(config)


def _one_tensor(kind: str, tensor: ModelInput | ModelOutput, where: FieldPath, max_batch_size: int) -> Problems:
    if not tensor.name:
        yield Problem(f"{kind} must specify 'name'", where)
    named = f"{kind} '{tensor.name}'"
    if tensor.data_type == DataType.TYPE_INVALID:
        yield Problem(f"{named} must specify 'data_type'", where)
    if not tensor.dims:
        yield Problem(f"{named} must specify 'dims'", where, hint="a tensor of one number has dims: [ 1 ]")
    if any(not _is_dimension(dim) for dim in tensor.dims):
        yield Problem(f"{named} dimension {_DIMENSION}", (*where, "dims"), hint="dims: [ -1 ] takes any number")
    elif tensor.HasField("reshape") and tensor.dims:
        yield from _reshape_problems(named, tensor.dims, tensor.reshape.shape, (*where, "reshape"), max_batch_size)


def _is_dimension(dim: int) -> bool:
    return dim >= 1 or dim == -1


def _reshape_problems(
    named: str, dims: Sequence[int], shape: Sequence[int], where: FieldPath, max_batch_size: int
) -> Problems:
    if any(not _is_dimension(dim) for dim in shape):
        yield Problem(f"{named} reshape dimensions {_DIMENSION}", where)
    elif not shape and max_batch_size == 0:
        yield Problem(
            f"{named} cannot have empty reshape for non-batching model as scalar tensors are not supported", where
        )
    elif (-1 in dims) != (-1 in shape):
        yield Problem(f"{named} has different size for dims and reshape", where)
    elif list(dims).count(-1) != list(shape).count(-1):
        yield Problem(f"{named} has different number of variable-size dimensions for dims and reshape", where)
    elif _fixed_sizes(dims) != _fixed_sizes(shape):
        yield Problem(f"{named} has different size for dims and reshape", where)


def _fixed_sizes(dims: Sequence[int]) -> list[int]:
    """Return the number of elements in each run of fixed dimensions between variable ones.

    The runs of ``dims`` and ``reshape`` must agree, because elements cannot move across a variable dimension.
    """
    return list(_runs(dims))


def _runs(dims: Sequence[int]) -> Iterator[int]:
    run: list[int] = []
    for dim in dims:
        if dim == -1:
            yield prod(run)
            run = []
        else:
            run.append(dim)
    yield prod(run)


def _tensorrt_only(config: ModelConfig, tensor: ModelInput | ModelOutput, where: FieldPath) -> Problems:
    if config.platform == "tensorrt_plan":
        return
    if tensor.is_shape_tensor:
        yield Problem("shape tensors are only supported for TensorRT platform", (*where, "is_shape_tensor"))
    if tensor.is_non_linear_format_io:
        yield Problem(
            "Non-linear IO format is only supported for the TensorRT platform", (*where, "is_non_linear_format_io")
        )


def _batch_input_problems(config: ModelConfig) -> Problems:
    inputs = {tensor.name for tensor in config.input}
    for index, tensor in enumerate(config.batch_input):
        where: FieldPath = ("batch_input", index)
        kind = BatchInput.Kind.Name(tensor.kind)
        if len(tensor.source_input) != 1:
            yield Problem(f"batch input kind '{kind}' expects 1 source input, got {len(tensor.source_input)}", where)
        if tensor.data_type not in (DataType.TYPE_INT32, DataType.TYPE_FP32):
            yield Problem("batch input data type must be TYPE_INT32 or TYPE_FP32", where)
        yield from _unknown_sources(tensor.source_input, inputs, where)


def _batch_output_problems(config: ModelConfig) -> Problems:
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    for index, tensor in enumerate(config.batch_output):
        taken: set[str] = set()  # per batch output; if two have the same target, the later one applies
        where: FieldPath = ("batch_output", index)
        kind = BatchOutput.Kind.Name(tensor.kind)
        if len(tensor.source_input) != 1:
            yield Problem(f"batch output kind '{kind}' expects 1 source input, got {len(tensor.source_input)}", where)
        yield from _unknown_sources(tensor.source_input, inputs, where)
        for target in tensor.target_name:
            if target not in outputs:
                yield Problem(f"unknown target output name '{target}'", (*where, "target_name"))
            if target in taken:
                yield Problem(f"target output name '{target}' can only be specified once", (*where, "target_name"))
            taken.add(target)


def _unknown_sources(sources: Sequence[str], inputs: set[str], where: FieldPath) -> Problems:
    for source in sources:
        if source not in inputs:
            yield Problem(f"unknown source input name '{source}'", (*where, "source_input"))
