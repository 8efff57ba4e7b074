"""Checks of instance groups against the devices of the machine, and of warmup samples."""

from __future__ import annotations

from collections.abc import Sequence

from conch.config.problem import FieldPath, Problem, Problems
from conch.config.schema import DataType, InstanceGroup, ModelConfig, is_ensemble

#: The minimum CUDA compute capability of Triton, as printed in its message.
_COMPUTE_CAPABILITY = "6.000000"


def instance_problems(config: ModelConfig, gpus: Sequence[int] = ()) -> Problems:
    """Yield all errors in completed instance groups on a machine with the devices ``gpus``."""
    if is_ensemble(config):
        return
    for index, group in enumerate(config.instance_group):
        where: FieldPath = ("instance_group", index)
        subject = f"instance group {group.name} of model {config.name}"
        if group.kind == InstanceGroup.KIND_GPU:
            yield from _gpu_problems(group, subject, gpus, where)
        elif group.gpus:
            kind = InstanceGroup.Kind.Name(group.kind)
            yield Problem(f"{subject} has kind {kind} but specifies one or more GPUs", (*where, "gpus"))
        if group.profile and config.platform != "tensorrt_plan":
            yield Problem(
                f"{subject} and platform {config.platform}specifies profile field which is only supported "
                "for TensorRT models",
                (*where, "profile"),
            )


def _gpu_problems(group: InstanceGroup, subject: str, gpus: Sequence[int], where: FieldPath) -> Problems:
    if not group.gpus:
        has = "specifies no GPUs" if gpus else "no GPUs are available"
        yield Problem(f"{subject} has kind KIND_GPU but {has}", where, hint="use KIND_CPU or KIND_AUTO")
    for gpu in group.gpus:
        if gpu not in gpus:
            yield Problem(
                f"{subject} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum required "
                f"CUDA compute compatibility of {_COMPUTE_CAPABILITY} are: {' '.join(map(str, gpus))}",
                (*where, "gpus"),
            )


#: Prefix of Triton's errors, which it raises for warmup requests without an id.
_REQUEST = "[request id: <id_unknown>] "


def warmup_problems(config: ModelConfig) -> Problems:
    """Yield errors in warmup samples that need no file access. Samples of batch size 0 never run."""
    sequences = config.sequence_batching
    inputs = [tensor.name for tensor in config.input]
    if inputs:
        inputs += [tensor.name for tensor in sequences.control_input]
        inputs += [state.input_name for state in sequences.state]
    for index, sample in enumerate(config.model_warmup):
        if not sample.batch_size:
            continue
        for name in sorted(sample.inputs):
            tensor = sample.inputs[name]
            where = ("model_warmup", index, "inputs")
            if inputs and name not in inputs:
                message = f"{_REQUEST}unexpected inference input '{name}' for model '{config.name}'"
                yield Problem(message, where, hint=f"its inputs are {', '.join(inputs)}")
            if any(dim < 0 for dim in tensor.dims):
                yield Problem(
                    f"warmup setting expects all variable-size dimensions are specified for input '{name}'", where
                )
            if tensor.WhichOneof("input_data_type") is None or tensor.data_type == DataType.TYPE_INVALID:
                yield Problem(f"{_REQUEST}warmup setting expects input '{name}' to have input_data_type set", where)


def warmup_size_problem(file: str, expected: int, size: int) -> Problem:
    """Return the error for a warmup file of ``size`` instead of ``expected`` bytes.

    The missing space after the file name is copied from Triton's message.
    """
    return Problem(
        f"{_REQUEST}warmup setting expects {expected} bytes, but the data provided from {file}only has {size} bytes"
    )
