"""Checks of a single configuration: its fields, tensors, instances and backend."""

from __future__ import annotations

from collections.abc import Iterator

from conch.backends.table import BACKENDS, WAYS_OUT, sequences_unsupported
from conch.config.effects import ineffective_problems
from conch.config.reading import Problem
from conch.config.remote import field_problems, is_remote
from conch.config.schema import InstanceGroup, ModelConfig, SequenceBatching, implementation, is_ensemble, scheduler
from conch.config.validate import (
    directory_name_problems,
    instance_problems,
    state_problems,
    static_problems,
    warmup_problems,
    written_io_problems,
)
from conch.core.errors import did_you_mean
from conch.machine.facts import visible_gpus
from conch.repository.backends import BackendDirectories
from conch.repository.checks.finding import CheckedModel, Finding
from conch.repository.model_files import CONFIG_FILE


def named_gpus(config: ModelConfig) -> list[int]:
    """Return the GPUs to check against: those in the configuration, because the serving machine's are unknown."""
    return sorted({gpu for group in config.instance_group for gpu in group.gpus}) or [0]


def check_configuration(model: CheckedModel) -> Iterator[Finding]:
    """Yield errors that loading reports for the configuration, as far as files show them."""
    config, files = model.config, model.files
    problems: list[Problem] = [*static_problems(config), *directory_name_problems(files.config, files.name)]
    completed = model.completes_itself()
    problems += [
        problem for problem in written_io_problems(config) if not (completed and "must specify" in problem.message)
    ]
    problems += state_problems(config)
    problems += instance_problems(config, named_gpus(files.config))
    problems += warmup_problems(config)
    if is_remote(config):
        problems += field_problems(config)
    yield from (model.finding(problem) for problem in problems)
    yield from (model.finding(problem, "warning") for problem in ineffective_problems(config))
    yield from _tensor_findings(model, completed)
    yield from _batching_findings(model, completed)
    yield from _gpu_warnings(model)


def _tensor_findings(model: CheckedModel, completed: bool) -> Iterator[Finding]:
    config = model.config
    if not config.output and not completed and not is_ensemble(config):
        lacks = "no output" if config.input else "neither input nor output"
        location = "here" if model.files.config_path else f"in {model.files.directory / CONFIG_FILE}"
        fix = f'write output {{ name: "…" data_type: TYPE_FP32 dims: [ 1 ] }} {location}'
        if implementation(config) == "python":
            fix += ", or auto_complete_config in model.py"
        yield model.warning(f"the configuration of model '{config.name}' declares {lacks}", (), fix)
    for kind in ("input", "output"):
        names = [tensor.name for tensor in getattr(config, kind)]
        for index, name in enumerate(names):
            if name and name in names[:index]:
                yield model.finding(Problem(f"{kind} '{name}' is declared twice", (kind, index), hint="leave one out"))


def _batching_findings(model: CheckedModel, completed: bool) -> Iterator[Finding]:
    config = model.config
    batches = config.max_batch_size > 0 or completed or implementation(config) != "python"
    if scheduler(config) == "dynamic_batching" and not batches:
        problem = "'dynamic_batching' has no effect without 'max_batch_size'"
        yield model.warning(problem, ("dynamic_batching",), "max_batch_size: 8, if the model accepts batches")
    if scheduler(config) == "sequence_batching" and config.max_batch_size > 1:
        yield from _row_warnings(model)


def _row_warnings(model: CheckedModel) -> Iterator[Finding]:
    """Warn of a model that cannot tell which rows of its batches have no request."""
    batching = model.config.sequence_batching
    kinds = {control.kind for tensor in batching.control_input for control in tensor.control}
    if not batching.HasField("oldest") and SequenceBatching.Control.CONTROL_SEQUENCE_READY not in kinds:
        yield model.warning(
            "batches of the direct strategy may have rows without a request, which the model cannot distinguish",
            ("sequence_batching",),
            "a control_input of kind CONTROL_SEQUENCE_READY, or oldest { }",
        )


def _gpu_warnings(model: CheckedModel) -> Iterator[Finding]:
    """Warn of instances on GPUs that this machine lacks; another machine may serve the model."""
    visible = visible_gpus()
    for index, group in enumerate(model.files.config.instance_group):
        lacks = [gpu for gpu in group.gpus if gpu not in visible]
        if group.kind == InstanceGroup.KIND_GPU and (lacks or not visible):
            has = f"has no GPU {lacks[0]}" if visible else "has no GPU"
            yield model.warning(
                f"the model requires a GPU, but this machine {has}; it cannot load here",
                ("instance_group", index),
                "KIND_AUTO uses a GPU if there is one",
            )


def check_backend(model: CheckedModel, backends: BackendDirectories) -> Iterator[Finding]:
    """Yield errors for a backend or a scheduler that this server does not support."""
    config = model.config
    backend = BACKENDS.get(implementation(config))
    if scheduler(config) == "sequence_batching" and backend is not None and not backend.takes_sequences:
        message = sequences_unsupported(config.name, config.backend)
        yield model.finding(Problem(message, ("sequence_batching",), hint="dynamic_batching { }"))
    try:
        for version in model.versions[:1]:
            backends.check(model.config, model.files.directory, version)
    except Problem as problem:
        hint = problem.hint or _other_backend(model.config.backend, backends)
        yield model.finding(Problem(problem.message.removesuffix(f": {hint}"), problem.field, hint=hint))


def _other_backend(backend: str, backends: BackendDirectories) -> str:
    """Return a hint for an unknown backend."""
    if backend in WAYS_OUT:
        return WAYS_OUT[backend]
    known = sorted({*BACKENDS, *backends.found()})
    return did_you_mean(backend, known, f"available: {', '.join(known)}")
