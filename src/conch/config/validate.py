"""All checks of a configuration, in the order in which loading makes them.

``validate`` runs when a model is read from its repository, before its versions are listed; ``validate_written`` runs
instead if no backend completes configurations. ``validate_io``, ``validate_states`` and ``validate_instances`` run
when a version is loaded, after the backend has completed the configuration. ``validate_ensemble`` runs once the
configurations of the steps' models are known. Each function raises the first :class:`Problem`; the underlying
``…_problems`` generators yield all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from conch.config.reading import FieldPath, Problem, Problems, refuse
from conch.config.schema import (
    BatchInput,
    BatchOutput,
    DataType,
    InstanceGroup,
    ModelConfig,
    ModelInput,
    ModelOutput,
    QueuePolicy,
    SequenceBatching,
    is_ensemble,
    scheduler,
)
from conch.config.validate_ensemble import ensemble_problems, step_model_problems

#: The minimum CUDA compute capability of Triton, as printed in its message.
_COMPUTE_CAPABILITY = "6.000000"


def instance_problems(config: ModelConfig, gpus: Sequence[int] = ()) -> Problems:
    """Yield all errors in completed instance groups on a machine with the devices ``gpus``."""
    if is_ensemble(config):
        return
    for index, group in enumerate(config.instance_group):
        path: FieldPath = ("instance_group", index)
        subject = f"instance group {group.name} of model {config.name}"
        if group.kind == InstanceGroup.KIND_GPU:
            yield from _gpu_problems(group, subject, gpus, path)
        elif group.gpus:
            kind = InstanceGroup.Kind.Name(group.kind)
            yield Problem(f"{subject} has kind {kind} but specifies one or more GPUs", (*path, "gpus"))
        if group.profile and config.platform != "tensorrt_plan":
            yield Problem(
                f"{subject} and platform {config.platform}specifies profile field which is only supported "
                "for TensorRT models",
                (*path, "profile"),
            )


def _gpu_problems(group: InstanceGroup, subject: str, gpus: Sequence[int], path: FieldPath) -> Problems:
    if not group.gpus:
        has = "specifies no GPUs" if gpus else "no GPUs are available"
        yield Problem(f"{subject} has kind KIND_GPU but {has}", path, hint="use KIND_CPU or KIND_AUTO")
    for gpu in group.gpus:
        if gpu not in gpus:
            yield Problem(
                f"{subject} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum required "
                f"CUDA compute compatibility of {_COMPUTE_CAPABILITY} are: {' '.join(map(str, gpus))}",
                (*path, "gpus"),
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
            path = ("model_warmup", index, "inputs")
            if inputs and name not in inputs:
                message = f"{_REQUEST}unexpected inference input '{name}' for model '{config.name}'"
                yield Problem(message, path, hint=f"its inputs are {', '.join(inputs)}")
            if any(dim < 0 for dim in tensor.dims):
                yield Problem(
                    f"warmup setting expects all variable-size dimensions are specified for input '{name}'", path
                )
            if tensor.WhichOneof("input_data_type") is None or tensor.data_type == DataType.TYPE_INVALID:
                yield Problem(f"{_REQUEST}warmup setting expects input '{name}' to have input_data_type set", path)


def warmup_size_problem(file: str, expected: int, size: int) -> Problem:
    """Return the error for a warmup file of ``size`` instead of ``expected`` bytes.

    The missing space after the file name is copied from Triton's message.
    """
    return Problem(
        f"{_REQUEST}warmup setting expects {expected} bytes, but the data provided from {file}only has {size} bytes"
    )


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
        path: FieldPath = ("input", index)
        yield from _one_tensor("model input", tensor, path, config.max_batch_size)
        if tensor.format != ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
            yield Problem("model input NHWC/NCHW require 3 dims", (*path, "format"))
        yield from _tensorrt_only(config, tensor, path)
    for index, tensor in enumerate(config.output):
        path = ("output", index)
        yield from _one_tensor("model output", tensor, path, config.max_batch_size)
        yield from _tensorrt_only(config, tensor, path)
    yield from _batch_input_problems(config)
    yield from _batch_output_problems(config)


def _one_tensor(kind: str, tensor: ModelInput | ModelOutput, path: FieldPath, max_batch_size: int) -> Problems:
    if not tensor.name:
        yield Problem(f"{kind} must specify 'name'", path)
    named = f"{kind} '{tensor.name}'"
    if tensor.data_type == DataType.TYPE_INVALID:
        yield Problem(f"{named} must specify 'data_type'", path)
    if not tensor.dims:
        yield Problem(f"{named} must specify 'dims'", path, hint="a tensor of one number has dims: [ 1 ]")
    if any(not _is_dimension(dim) for dim in tensor.dims):
        yield Problem(f"{named} dimension {_DIMENSION}", (*path, "dims"), hint="dims: [ -1 ] takes any number")
    elif tensor.HasField("reshape") and tensor.dims:
        yield from _reshape_problems(named, tensor.dims, tensor.reshape.shape, (*path, "reshape"), max_batch_size)


def _is_dimension(dim: int) -> bool:
    return dim >= 1 or dim == -1


def _reshape_problems(
    named: str, dims: Sequence[int], shape: Sequence[int], path: FieldPath, max_batch_size: int
) -> Problems:
    if any(not _is_dimension(dim) for dim in shape):
        yield Problem(f"{named} reshape dimensions {_DIMENSION}", path)
    elif not shape and max_batch_size == 0:
        yield Problem(
            f"{named} cannot have empty reshape for non-batching model as scalar tensors are not supported", path
        )
    elif (-1 in dims) != (-1 in shape):
        yield Problem(f"{named} has different size for dims and reshape", path)
    elif list(dims).count(-1) != list(shape).count(-1):
        yield Problem(f"{named} has different number of variable-size dimensions for dims and reshape", path)
    elif _fixed_sizes(dims) != _fixed_sizes(shape):
        yield Problem(f"{named} has different size for dims and reshape", path)


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


def _tensorrt_only(config: ModelConfig, tensor: ModelInput | ModelOutput, path: FieldPath) -> Problems:
    if config.platform == "tensorrt_plan":
        return
    if tensor.is_shape_tensor:
        yield Problem("shape tensors are only supported for TensorRT platform", (*path, "is_shape_tensor"))
    if tensor.is_non_linear_format_io:
        yield Problem(
            "Non-linear IO format is only supported for the TensorRT platform", (*path, "is_non_linear_format_io")
        )


def _batch_input_problems(config: ModelConfig) -> Problems:
    inputs = {tensor.name for tensor in config.input}
    for index, tensor in enumerate(config.batch_input):
        path: FieldPath = ("batch_input", index)
        kind = BatchInput.Kind.Name(tensor.kind)
        if len(tensor.source_input) != 1:
            yield Problem(f"batch input kind '{kind}' expects 1 source input, got {len(tensor.source_input)}", path)
        if tensor.data_type not in (DataType.TYPE_INT32, DataType.TYPE_FP32):
            yield Problem("batch input data type must be TYPE_INT32 or TYPE_FP32", path)
        yield from _unknown_sources(tensor.source_input, inputs, path)


def _batch_output_problems(config: ModelConfig) -> Problems:
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    for index, tensor in enumerate(config.batch_output):
        taken: set[str] = set()  # per batch output; if two have the same target, the later one applies
        path: FieldPath = ("batch_output", index)
        kind = BatchOutput.Kind.Name(tensor.kind)
        if len(tensor.source_input) != 1:
            yield Problem(f"batch output kind '{kind}' expects 1 source input, got {len(tensor.source_input)}", path)
        yield from _unknown_sources(tensor.source_input, inputs, path)
        for target in tensor.target_name:
            if target not in outputs:
                yield Problem(f"unknown target output name '{target}'", (*path, "target_name"))
            if target in taken:
                yield Problem(f"target output name '{target}' can only be specified once", (*path, "target_name"))
            taken.add(target)


def _unknown_sources(sources: Sequence[str], inputs: set[str], path: FieldPath) -> Problems:
    for source in sources:
        if source not in inputs:
            yield Problem(f"unknown source input name '{source}'", (*path, "source_input"))


_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_ANY_VALUE = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
_CORRELATION_ID = SequenceBatching.Control.CONTROL_SEQUENCE_CORRID
_CORRELATION_ID_TYPES = (
    DataType.TYPE_UINT64,
    DataType.TYPE_INT64,
    DataType.TYPE_UINT32,
    DataType.TYPE_INT32,
    DataType.TYPE_STRING,
)


def dynamic_batching_problems(config: ModelConfig) -> Problems:
    """Yield all errors in ``dynamic_batching``."""
    batching, name = config.dynamic_batching, config.name
    path: FieldPath = ("dynamic_batching",)
    for size in batching.preferred_batch_size:
        if size <= 0:
            yield Problem(
                f"dynamic batching preferred size must be positive for {name}", (*path, "preferred_batch_size")
            )
        elif size > config.max_batch_size:
            yield Problem(
                f"dynamic batching preferred size must be <= max batch size for {name}",
                (*path, "preferred_batch_size"),
                hint=f"max_batch_size is {config.max_batch_size}",
            )
    levels = batching.priority_levels
    if levels and not 1 <= batching.default_priority_level <= levels:
        yield Problem(f"default priority level must be in range [1, {levels}] for {name}", path)
    if levels:
        for level in sorted(batching.priority_queue_policy):
            if not 1 <= level <= levels:
                yield Problem(
                    f"priority queue policy must have priority level in range [1, {levels}] for {name}",
                    (*path, "priority_queue_policy"),
                )
    if batching.preserve_ordering:
        yield from _ordering_problems(config)


def _ordering_problems(config: ModelConfig) -> Problems:
    batching = config.dynamic_batching
    path = ("dynamic_batching", 0, "preserve_ordering")
    if batching.priority_levels > 1:
        yield Problem(f"Only one priority level is allowed when 'preserve_ordering' is true for {config.name}", path)
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(policy.default_timeout_microseconds and policy.timeout_action == QueuePolicy.DELAY for policy in policies):
        yield Problem(
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            f"for {config.name}",
            path,
        )  # fmt: skip


def sequence_batching_problems(config: ModelConfig) -> Problems:
    """Yield all errors in ``sequence_batching`` except its states."""
    batching, name = config.sequence_batching, config.name
    yield from _control_problems(config)
    if batching.HasField("oldest"):
        path = ("sequence_batching", 0, "oldest", 0, "preferred_batch_size")
        for size in batching.oldest.preferred_batch_size:
            if size <= 0:
                yield Problem(f"sequence batching preferred batch size must be positive for {name}", path)
            elif size > config.max_batch_size:
                yield Problem(
                    f"sequence batching preferred batch size must be <= max batch size for {name}",
                    path,
                    hint=f"max_batch_size is {config.max_batch_size}",
                )
    if batching.HasField("direct") and not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        yield Problem(
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}",
            ("sequence_batching", 0, "direct", 0, "minimum_slot_utilization"),
        )


def _control_problems(config: ModelConfig) -> Problems:
    names: set[str] = set()
    kinds: set[int] = set()
    for index, tensor in enumerate(config.sequence_batching.control_input):
        path: FieldPath = ("sequence_batching", 0, "control_input", index)
        if not tensor.name:
            yield Problem(f"sequence batching control tensor must have a name for {config.name}", path)
        elif tensor.name in names:
            yield Problem(
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds "
                f"for {config.name}",
                path,
            )
        names.add(tensor.name)
        for nth, control in enumerate(tensor.control):
            kind = SequenceBatching.Control.Kind.Name(control.kind)
            at = (*path, "control", nth)
            if control.kind in kinds:
                yield Problem(f"sequence batching specifies multiple {kind} tensors for {config.name}", at)
            kinds.add(control.kind)
            if control.kind == _CORRELATION_ID:
                yield from _correlation_id_problems(config, control, at)
            else:
                yield from _value_problems(config, control, kind, at)


def _value_problems(config: ModelConfig, control: SequenceBatching.Control, kind: str, path: FieldPath) -> Problems:
    present = [field for field in _VALUES if getattr(control, field)]
    if not present:
        yield Problem(f"sequence batching must specify either {_ANY_VALUE} for {kind} for {config.name}", path)
    if len(present) > 1:
        yield Problem(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {kind} for {config.name}",
            path,
        )
    for field in present:
        if len(getattr(control, field)) != 2:
            yield Problem(
                f"sequence batching control '{field}' must have exactly 2 entries for {kind} for {config.name}",
                (*path, field),
                hint="the values for false and for true",
            )


def _correlation_id_problems(config: ModelConfig, control: SequenceBatching.Control, path: FieldPath) -> Problems:
    if any(getattr(control, field) for field in _VALUES):
        yield Problem(
            f"sequence batching must not specify either {_ANY_VALUE} for CONTROL_SEQUENCE_CORRID for {config.name}",
            path,
        )
    if control.data_type not in _CORRELATION_ID_TYPES:
        yield Problem(
            f"unexpected data type for control CONTROL_SEQUENCE_CORRID for {config.name}. "
            "Allowed data types are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
            path,
        )


def state_problems(config: ModelConfig) -> Problems:
    """Yield all errors in the initial values of a sequence model's states."""
    initialised: set[str] = set()
    for index, state in enumerate(config.sequence_batching.state):
        path: FieldPath = ("sequence_batching", 0, "state", index)
        if len(state.initial_state) > 1:
            yield Problem(
                f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element. "
                f"Found '{len(state.initial_state)}' elements.",
                path,
            )
        elif state.initial_state:
            if state.input_name in initialised:
                yield Problem(f"State input name '{state.input_name}' specified more than once.", path)
            initialised.add(state.input_name)
            yield from _initial_state_problems(state, state.initial_state[0], (*path, "initial_state"))


def _initial_state_problems(
    state: SequenceBatching.State, initial: SequenceBatching.InitialState, path: FieldPath
) -> Problems:
    tensor = state.input_name
    if initial.data_type != state.data_type:
        yield Problem(
            f"The data type used for 'initial_state' field of state '{tensor}' does not match the state data type.",
            path,
        )
    if not initial.name:
        yield Problem(f"Field 'name' must be set when using initial_state for state input '{tensor}'.", path)
    if len(initial.dims) != len(state.dims):
        yield Problem(
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{tensor}'. {len(initial.dims)} != {len(state.dims)}",
            path,
        )
    elif -1 in initial.dims:
        yield Problem(f"'initial_state' field for state input name '{tensor}' contains variable dimensions.", path)
    else:
        for dim, expected in zip(initial.dims, state.dims, strict=True):
            if expected not in (dim, -1):
                yield Problem(
                    f"'initial_state' dim for input name '{tensor}' doesn't match 'state' dim description. "
                    f"{dim} != {expected}",
                    path,
                )
    if initial.WhichOneof("state_data") is None:
        yield Problem(
            f"'initial_state' of state input '{tensor}' must specify 'zero_data' or 'data_file'.", path
        )  # fmt: skip


def response_cache_problems(config: ModelConfig) -> Problems:
    """Yield errors for settings that are incompatible with the response cache."""
    if not config.response_cache.enable:
        return
    obstacle = ""
    if scheduler(config) == "sequence_batching":
        obstacle = "sequence batching scheduler"
    elif config.model_transaction_policy.decoupled:
        obstacle = "'decoupled' transaction policy"
    if obstacle:
        yield Problem(
            f"Response Cache does not currently support model {config.name} with {obstacle}. "
            "Please disable the response cache.",
            ("response_cache",),
        )


#: Backends with one kind of model file, and the values of ``platform`` that they allow.
_PLATFORMS = {
    "onnxruntime": {"onnxruntime_onnx"},
    "pytorch": {"pytorch_libtorch", "torch_aoti"},
    "tensorflow": {"tensorflow_graphdef", "tensorflow_savedmodel"},
    "tensorrt": {"tensorrt_plan"},
}


def validate(config: ModelConfig) -> None:
    """Refuse a completed configuration with errors that no backend could correct."""
    refuse(static_problems(config))


def validate_written(config: ModelConfig) -> None:
    """Refuse an invalid configuration that no backend completes."""
    validate(config)
    refuse(written_io_problems(config))


def validate_io(config: ModelConfig) -> None:
    """Refuse incomplete or contradictory inputs and outputs."""
    refuse(io_problems(config))


def validate_states(config: ModelConfig) -> None:
    """Refuse contradictory states of a sequence model."""
    refuse(state_problems(config))


def validate_instances(config: ModelConfig, gpus: Sequence[int] = ()) -> None:
    """Refuse instance groups that a machine with the devices ``gpus`` cannot run."""
    refuse(instance_problems(config, gpus))


def validate_load(config: ModelConfig, gpus: Sequence[int] = ()) -> None:
    """Run all checks of loading a version before its instances start."""
    validate(config)
    validate_io(config)
    validate_states(config)
    validate_instances(config, gpus)


def validate_ensemble(config: ModelConfig, step_configs: Mapping[str, ModelConfig]) -> None:
    """Refuse an ensemble with steps that do not fit the completed configurations of their models."""
    refuse(step_model_problems(config, step_configs))


def check_directory_name(config: ModelConfig, directory: str) -> None:
    """Refuse a configuration with a name other than its directory's."""
    refuse(directory_name_problems(config, directory))


def directory_name_problems(config: ModelConfig, directory: str) -> Problems:
    if config.name and config.name != directory:
        yield Problem(
            f"unexpected directory name '{directory}' for model '{config.name}', directory name must equal model name",
            ("name",),
            hint=f"use name: \"{directory}\" or leave 'name' out",
        )


def static_problems(config: ModelConfig) -> Problems:
    """Yield all errors in a completed configuration."""
    name = config.name
    if not name:
        yield Problem("model configuration must specify 'name'")
    yield from _platform_problems(config)
    if config.max_batch_size < 0:
        yield Problem(
            f"'max_batch_size' must be non-negative value for {name}", ("max_batch_size",), hint="0 means no batching"
        )
    if not config.HasField("version_policy"):
        yield Problem(f"must specify 'version policy' for {name}")
    match scheduler(config):
        case "dynamic_batching":
            yield from dynamic_batching_problems(config)
        case "sequence_batching":
            yield from sequence_batching_problems(config)
    yield from ensemble_problems(config)
    yield from response_cache_problems(config)
    yield from _metric_problems(config)


def _platform_problems(config: ModelConfig) -> Problems:
    name, platform, backend = config.name, config.platform, config.backend
    if is_ensemble(config):
        if backend:
            yield Problem(
                f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type", ("backend",)
            )
    elif not backend:
        yield Problem(
            f"unexpected platform type '{platform}' for {name}", ("platform",), hint="set 'backend', e.g. \"python\""
        )
    elif backend in _PLATFORMS and platform not in _PLATFORMS[backend]:
        yield Problem(
            f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}",
            ("platform",),
            hint=f"use platform \"{sorted(_PLATFORMS[backend])[0]}\" or leave 'platform' out",
        )


def _metric_problems(config: ModelConfig) -> Problems:
    for index, control in enumerate(config.model_metrics.metric_control):
        path = ("model_metrics", 0, "metric_control", index)
        if not control.HasField("metric_identifier"):
            yield Problem("metric control must specify 'metric_identifier'", path)
        elif not control.metric_identifier.family:
            yield Problem("metric identifier must specify non-empty 'family'", path)
        if not control.HasField("histogram_options"):
            yield Problem("metric control must specify 'histogram_options'", path)
        elif not control.histogram_options.buckets:
            yield Problem("histogram options must specify non-empty 'buckets'", path)
