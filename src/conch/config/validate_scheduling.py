"""Checks of dynamic batching, sequence batching with its states, and the response cache."""

from __future__ import annotations

from conch.config.problem import FieldPath, Problem, Problems
from conch.config.schema import DataType, ModelConfig, QueuePolicy, SequenceBatching, scheduler

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
    where: FieldPath = ("dynamic_batching",)
    for size in batching.preferred_batch_size:
        if size <= 0:
            yield Problem(
                f"dynamic batching preferred size must be positive for {name}", (*where, "preferred_batch_size")
            )
        elif size > config.max_batch_size:
            yield Problem(
                f"dynamic batching preferred size must be <= max batch size for {name}",
                (*where, "preferred_batch_size"),
                hint=f"max_batch_size is {config.max_batch_size}",
            )
    levels = batching.priority_levels
    if levels and not 1 <= batching.default_priority_level <= levels:
        yield Problem(f"default priority level must be in range [1, {levels}] for {name}", where)
    if levels:
        for level in sorted(batching.priority_queue_policy):
            if not 1 <= level <= levels:
                yield Problem(
                    f"priority queue policy must have priority level in range [1, {levels}] for {name}",
                    (*where, "priority_queue_policy"),
                )
    if batching.preserve_ordering:
        yield from _ordering_problems(config)


def _ordering_problems(config: ModelConfig) -> Problems:
    batching = config.dynamic_batching
    where = ("dynamic_batching", 0, "preserve_ordering")
    if batching.priority_levels > 1:
        yield Problem(f"Only one priority level is allowed when 'preserve_ordering' is true for {config.name}", where)
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(policy.default_timeout_microseconds and policy.timeout_action == QueuePolicy.DELAY for policy in policies):
        yield Problem(
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            f"for {config.name}",
            where,
        )  # fmt: skip


def sequence_batching_problems(config: ModelConfig) -> Problems:
    """Yield all errors in ``sequence_batching`` except its states."""
    batching, name = config.sequence_batching, config.name
    yield from _control_problems(config)
    if batching.HasField("oldest"):
        where = ("sequence_batching", 0, "oldest", 0, "preferred_batch_size")
        for size in batching.oldest.preferred_batch_size:
            if size <= 0:
                yield Problem(f"sequence batching preferred batch size must be positive for {name}", where)
            elif size > config.max_batch_size:
                yield Problem(
                    f"sequence batching preferred batch size must be <= max batch size for {name}",
                    where,
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
        where: FieldPath = ("sequence_batching", 0, "control_input", index)
        if not tensor.name:
            yield Problem(f"sequence batching control tensor must have a name for {config.name}", where)
        elif tensor.name in names:
            yield Problem(
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds "
                f"for {config.name}",
                where,
            )
        names.add(tensor.name)
        for nth, control in enumerate(tensor.control):
            kind = SequenceBatching.Control.Kind.Name(control.kind)
            at = (*where, "control", nth)
            if control.kind in kinds:
                yield Problem(f"sequence batching specifies multiple {kind} tensors for {config.name}", at)
            kinds.add(control.kind)
            if control.kind == _CORRELATION_ID:
                yield from _correlation_id_problems(config, control, at)
            else:
                yield from _value_problems(config, control, kind, at)


def _value_problems(config: ModelConfig, control: SequenceBatching.Control, kind: str, where: FieldPath) -> Problems:
    present = [field for field in _VALUES if getattr(control, field)]
    if not present:
        yield Problem(f"sequence batching must specify either {_ANY_VALUE} for {kind} for {config.name}", where)
    if len(present) > 1:
        yield Problem(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {kind} for {config.name}",
            where,
        )
    for field in present:
        if len(getattr(control, field)) != 2:
            yield Problem(
                f"sequence batching control '{field}' must have exactly 2 entries for {kind} for {config.name}",
                (*where, field),
                hint="the values for false and for true",
            )


def _correlation_id_problems(config: ModelConfig, control: SequenceBatching.Control, where: FieldPath) -> Problems:
    if any(getattr(control, field) for field in _VALUES):
        yield Problem(
            f"sequence batching must not specify either {_ANY_VALUE} for CONTROL_SEQUENCE_CORRID for {config.name}",
            where,
        )
    if control.data_type not in _CORRELATION_ID_TYPES:
        yield Problem(
            f"unexpected data type for control CONTROL_SEQUENCE_CORRID for {config.name}. "
            "Allowed data types are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
            where,
        )


def state_problems(config: ModelConfig) -> Problems:
    """Yield all errors in the initial values of a sequence model's states."""
    initialised: set[str] = set()
    for index, state in enumerate(config.sequence_batching.state):
        where: FieldPath = ("sequence_batching", 0, "state", index)
        if len(state.initial_state) > 1:
            yield Problem(
                f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element. "
                f"Found '{len(state.initial_state)}' elements.",
                where,
            )
        elif state.initial_state:
            if state.input_name in initialised:
                yield Problem(f"State input name '{state.input_name}' specified more than once.", where)
            initialised.add(state.input_name)
            yield from _initial_state_problems(state, state.initial_state[0], (*where, "initial_state"))


def _initial_state_problems(
    state: SequenceBatching.State, initial: SequenceBatching.InitialState, where: FieldPath
) -> Problems:
    tensor = state.input_name
    if initial.data_type != state.data_type:
        yield Problem(
            f"The data type used for 'initial_state' field of state '{tensor}' does not match the state data type.",
            where,
        )
    if not initial.name:
        yield Problem(f"Field 'name' must be set when using initial_state for state input '{tensor}'.", where)
    if len(initial.dims) != len(state.dims):
        yield Problem(
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{tensor}'. {len(initial.dims)} != {len(state.dims)}",
            where,
        )
    elif -1 in initial.dims:
        yield Problem(f"'initial_state' field for state input name '{tensor}' contains variable dimensions.", where)
    else:
        for dim, expected in zip(initial.dims, state.dims, strict=True):
            if expected not in (dim, -1):
                yield Problem(
                    f"'initial_state' dim for input name '{tensor}' doesn't match 'state' dim description. "
                    f"{dim} != {expected}",
                    where,
                )
    if initial.WhichOneof("state_data") is None:
        yield Problem(
            f"'initial_state' of state input '{tensor}' must specify 'zero_data' or 'data_file'.", where
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
