"""Checks of ensembles: the graph of their tensors, and the compatibility of steps with their models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from conch.config.reading import FieldPath, Problem, Problems
from conch.config.schema import ModelConfig, ModelInput, ModelOutput, datatype_name, is_ensemble, scheduler
from conch.core.tensors import format_shape

_SCHEDULING: FieldPath = ("ensemble_scheduling",)


def ensemble_problems(config: ModelConfig) -> Problems:
    """Yield all errors in an ensemble's own configuration, and in other models with ensemble steps."""
    name, has_steps = config.name, scheduler(config) == "ensemble_scheduling"
    if not is_ensemble(config):
        if has_steps:
            yield Problem(
                f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble", _SCHEDULING
            )
        return
    if not has_steps:
        yield Problem(
            f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble",
            (scheduler(config) or "platform",),
        )
        return
    if config.instance_group:
        yield Problem(f"instance group should not be specified for ensemble '{name}'", ("instance_group",))
    if config.HasField("optimization"):
        yield Problem(f"optimization should not be specified for ensemble '{name}'", ("optimization",))
    if config.model_warmup:
        yield Problem(f"model_warmup can not be specified for ensemble '{name}'", ("model_warmup",))
    if not config.ensemble_scheduling.step:
        yield Problem(f"must specify 'step' for ensemble '{name}'", _SCHEDULING)
    # Each check is meaningful only if the previous one found nothing.
    for check in (_step_problems, _edge_problems, _unused_problems):
        problems = list(check(config))
        yield from problems
        if problems:
            return


def _step_problems(config: ModelConfig) -> Problems:
    written: set[str] = set()
    for index, step in enumerate(config.ensemble_scheduling.step):
        path = _step_path(index)
        for part in ("model_name", "input_map", "output_map"):
            if not getattr(step, part):
                yield Problem(f"must specify '{part}' in step {index} of ensemble '{config.name}'", path)
        for tensor in _values(step.output_map):
            if tensor in written:
                yield Problem(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{config.name}' "
                    f"step {index}",
                    (*path, "output_map"),
                )
            written.add(tensor)


def _step_path(index: int) -> FieldPath:
    return (*_SCHEDULING, 0, "step", index)


def _values(mapping: Mapping[str, str]) -> list[str]:
    return [mapping[key] for key in sorted(mapping)]


def _edge_problems(config: ModelConfig) -> Problems:
    name, steps = config.name, config.ensemble_scheduling.step
    read = {tensor for step in steps for tensor in step.input_map.values()}
    writers = {tensor: step for step in steps for tensor in step.output_map.values()}
    connected = _connected(config)
    for index, tensor in enumerate(config.input):
        if tensor.name not in read and tensor.name not in writers:
            yield Problem(f"ensemble input '{tensor.name}' for ensemble {name}' is not used", ("input", index))
    for index, tensor in enumerate(config.output):
        if tensor.name not in read and tensor.name not in writers:
            yield Problem(f"ensemble output '{tensor.name}' for ensemble {name}' is not used", ("output", index))
        elif tensor.name not in connected:
            reason = ""
            if tensor.name in writers:
                lacking = sorted(set(writers[tensor.name].input_map.values()) - connected)
                reason = f": at least one of its depending tensors, '{lacking[0]}', is not connected"
            yield Problem(f"output '{tensor.name}' for ensemble '{name}' is not written{reason}", ("output", index))


def _unused_problems(config: ModelConfig) -> Problems:
    steps = config.ensemble_scheduling.step
    read = {tensor for step in steps for tensor in step.input_map.values()}
    written = {tensor for step in steps for tensor in step.output_map.values()}
    used = read | {tensor.name for tensor in config.output}
    for name in sorted(read | written):
        if name not in _connected(config) or name not in used:
            yield Problem(f"ensemble tensor '{name}' is unused in ensemble '{config.name}'", _SCHEDULING)


def _connected(config: ModelConfig) -> set[str]:
    """Return the tensors that are available after running all steps that the ensemble's inputs reach."""
    written = (config.ensemble_scheduling.step[index].output_map.values() for index in _in_order(config))
    return {tensor.name for tensor in config.input}.union(*written)


@dataclass(frozen=True)
class _Inferred:
    """Shape and type of an ensemble tensor, from the first model that reads or writes it."""

    model: str
    data_type: int
    dims: tuple[int, ...]
    batching: bool

    @classmethod
    def of(cls, config: ModelConfig, tensor: ModelInput | ModelOutput) -> _Inferred:
        return cls(config.name, tensor.data_type, tuple(tensor.dims), config.max_batch_size > 0)

    @property
    def full(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batching else self.dims

    def fits(self, other: _Inferred) -> bool:
        return _same_shape(self.dims, other.dims) or _same_shape(self.full, other.full)


def _same_shape(shape: Sequence[int], other: Sequence[int]) -> bool:
    return len(shape) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(shape, other, strict=True))


def step_model_problems(config: ModelConfig, step_configs: Mapping[str, ModelConfig]) -> Problems:
    """Yield all errors in an ensemble's use of other models.

    ``step_configs`` are the completed configurations of its steps' models, by name; unavailable models are missing.
    """
    for index, step in enumerate(config.ensemble_scheduling.step):
        if step.model_name not in step_configs:
            yield Problem(
                f"ensemble {config.name} contains models that are not available or ambiguous: {step.model_name}",
                (*_step_path(index), "model_name"),
            )
            return
    tensors = _Tensors(config)
    for index, step in enumerate(config.ensemble_scheduling.step):
        step_config = step_configs[step.model_name]
        if 1 <= step_config.max_batch_size < config.max_batch_size:
            yield Problem(
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
                f"{step_config.name} which only allows maximum batch size to be {step_config.max_batch_size}",
                ("max_batch_size",),
            )
        yield from _mapping_problems(config, index, step_config, tensors)
    yield from _origin_problems(config, step_configs, tensors)


@dataclass
class _Tensors:
    """Known shapes and types of ensemble tensors; at first only the ensemble's inputs and outputs are known."""

    ensemble: ModelConfig
    known: dict[str, _Inferred] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tensor in (*self.ensemble.input, *self.ensemble.output):
            self.known[tensor.name] = _Inferred.of(self.ensemble, tensor)

    def problems(self, name: str, inferred: _Inferred, path: FieldPath) -> Problems:
        first = self.known.setdefault(name, inferred)
        subject = f"in ensemble {self.ensemble.name}, ensemble tensor {name}: inconsistent"
        if first.data_type != inferred.data_type:
            yield Problem(
                f"{subject} data type: {datatype_name(first.data_type)} is inferred from model {first.model} while "
                f"{datatype_name(inferred.data_type)} is inferred from model {inferred.model}",
                path,
            )
        elif not first.fits(inferred):
            yield Problem(
                f"{subject} shape: {format_shape(first.full)} is inferred from model {first.model} while "
                f"{format_shape(inferred.full)} is inferred from model {inferred.model}",
                path,
            )


def _mapping_problems(config: ModelConfig, index: int, step_config: ModelConfig, tensors: _Tensors) -> Problems:
    step, path = config.ensemble_scheduling.step[index], _step_path(index)
    inputs = {tensor.name: tensor for tensor in step_config.input}
    outputs = {tensor.name: tensor for tensor in step_config.output}
    subject = f"in ensemble {config.name}"
    for name in sorted(set(step.input_map) - set(inputs)):
        yield Problem(
            f"{subject}, ensemble tensor {step.input_map[name]} is mapping to non-existing input {name} in model "
            f"{step_config.name}",
            (*path, "input_map"),
            hint=f"its inputs are: {_listed(inputs)}",
        )
    for name, tensor in inputs.items():
        if name in step.input_map:
            yield from tensors.problems(step.input_map[name], _Inferred.of(step_config, tensor), (*path, "input_map"))
        elif not tensor.optional:
            yield Problem(
                f"{subject}, input {name} in model {step_config.name} is not mapped to any ensemble tensors",
                (*path, "input_map"),
            )
    for name in sorted(set(step.output_map) - set(outputs)):
        yield Problem(
            f"{subject}, ensemble tensor {step.output_map[name]} is mapped from non-existing output {name} in model "
            f"{step_config.name}",
            (*path, "output_map"),
            hint=f"its outputs are: {_listed(outputs)}",
        )
    for name, tensor in outputs.items():
        if name in step.output_map:
            yield from tensors.problems(step.output_map[name], _Inferred.of(step_config, tensor), (*path, "output_map"))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _origin_problems(config: ModelConfig, step_configs: Mapping[str, ModelConfig], tensors: _Tensors) -> Problems:
    """Yield an error for tensors that cannot be paired because they come from different decoupled steps.

    Inputs of one step, and the outputs of the ensemble, must have the same origin. Tensors that do not come from a
    decoupled step share a separate origin.
    """
    subject = f"in ensemble {config.name}, step of model"
    reason = "receives inputs originated from different decoupled models"
    origin: dict[str, int | None] = {tensor.name: None for tensor in config.input}
    for index in _in_order(config):
        step = config.ensemble_scheduling.step[index]
        origins = {origin[tensor] for tensor in step.input_map.values()}
        if len(origins) > 1:
            written = next(iter(_values(step.output_map)))
            # Triton's message names the model that first defined the step's first output.
            yield Problem(f"{subject} '{tensors.known[written].model}' {reason}", _step_path(index))
            return
        decoupled = step_configs[step.model_name].model_transaction_policy.decoupled
        for tensor in step.output_map.values():
            origin[tensor] = index if decoupled else next(iter(origins), None)
    if len({origin[tensor.name] for tensor in config.output if tensor.name in origin}) > 1:
        yield Problem(f"{subject} '{config.name}' {reason}", ("output",))


def _in_order(config: ModelConfig) -> Iterator[int]:
    """Yield the indices of the steps in dependency order; omit steps that can never run."""
    connected = {tensor.name for tensor in config.input}
    waiting = dict(enumerate(config.ensemble_scheduling.step))
    while ready := [i for i, step in waiting.items() if connected.issuperset(step.input_map.values())]:
        for index in ready:
            connected.update(waiting.pop(index).output_map.values())
            yield index


def cycle_of(name: str, step_models: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Return the cycle of ensembles that begins at ``name``; empty without a cycle.

    Each ensemble in the cycle is a step of the previous one. ``step_models`` maps each ensemble to its steps' models.
    """
    paths: dict[str, tuple[str, ...]] = {name: (name,)}
    waiting = [name]
    while waiting:
        ensemble = waiting.pop()
        for model in step_models.get(ensemble, ()):
            if model == name:
                return paths[ensemble]
            if model not in paths:
                paths[model] = (*paths[ensemble], model)
                waiting.append(model)
    return ()


def circular_dependency(name: str, cycle: Sequence[str]) -> Problem:
    """Return the error for ensemble ``name``, which is part of ``cycle``."""
    last = cycle[cycle.index(name) - 1]
    return Problem(f"circular dependency between ensembles: {name} -> ... -> {last} -> {name}", _SCHEDULING)


def cycle_problem(name: str, step_models: Mapping[str, Iterable[str]]) -> Problem | None:
    """Return the error for ensemble ``name`` if it contains itself; ``step_models`` maps ensembles to steps' models."""
    cycle = cycle_of(name, step_models)
    return circular_dependency(name, cycle) if cycle else None


def version_problem(config: ModelConfig, loaded: Mapping[str, Iterable[int]]) -> Problem | None:
    """Return the error for an ensemble with a step version that is not in ``loaded``; -1 means any version."""
    for index, step in enumerate(config.ensemble_scheduling.step):
        if step.model_version >= 0 and step.model_version not in loaded.get(step.model_name, ()):
            return Problem(
                f"ensemble '{config.name}' depends on '{step.model_name}' whose required version {step.model_version} "
                "is not loaded.",
                (*_step_path(index), "model_version" if step.model_version else "model_name"),
                hint="model_version: -1 is the latest version",
            )
    return None


def step_model_not_loaded(ensemble: str, model: str, error: str) -> Problem:
    """Return the error for an ensemble with a step model that has no loaded version; ``error`` is its load error."""
    return Problem(
        f"ensemble '{ensemble}' depends on '{model}' which has no loaded version. Model '{model}' loading failed "
        f"with error: {error}"
    )


def step_model_not_valid(ensemble: str, model: str, error: str) -> Problem:
    """Return the error for an ensemble with a step ensemble that was refused because of ``error``."""
    return Problem(
        f"ensemble '{ensemble}' depends on '{model}' which is not valid. Model '{model}' failed with error: {error}"
    )
