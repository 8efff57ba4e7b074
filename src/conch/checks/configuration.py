"""Checks of a configuration by itself: its fields, its tensors, its instances and its backend."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Final

from conch.backends.table import BACKENDS
from conch.checks.finding import Finding
from conch.checks.model import CheckedModel
from conch.config.effects import ineffective_problems
from conch.config.problem import Problem
from conch.config.schema import InstanceGroup, ModelConfig, is_ensemble, scheduler
from conch.config.validate import directory_name_problems, static_problems
from conch.config.validate_instances import instance_problems, warmup_problems
from conch.config.validate_io import io_problems
from conch.config.validate_scheduling import state_problems
from conch.repository.scan import CONFIG_FILE
from conch.server.devices import visible_gpus

#: Backends that repositories written for Triton name; those without an entry in the table are not available yet.
_KNOWN_ELSEWHERE: Final = frozenset(
    {
        *("dali", "fil", "huggingface", "identity", "onnxruntime", "openvino", "pytorch", "repeat", "sequence"),
        *("square", "tensorflow", "tensorrt", "tensorrtllm", "vllm"),
    }
)


def named_gpus(config: ModelConfig) -> list[int]:
    """The devices to check against: those that the configuration names, as the serving machine's are not known here."""
    return sorted({gpu for group in config.instance_group for gpu in group.gpus}) or [0]


def check_configuration(model: CheckedModel) -> Iterator[Finding]:
    """What loading refuses in the configuration, as far as files tell."""
    config, files = model.config, model.files
    problems: list[Problem] = [*directory_name_problems(files.config, files.name), *static_problems(config)]
    completed = model.completes_itself()
    problems += [problem for problem in io_problems(config) if not (completed and "must specify" in problem.message)]
    problems += state_problems(config)
    problems += instance_problems(config, named_gpus(files.config))
    problems += warmup_problems(config)
    yield from (model.finding(problem) for problem in problems)
    yield from (model.finding(problem, "warning") for problem in ineffective_problems(config))
    yield from _tensor_findings(model, completed)
    yield from _batching_findings(model, completed)
    yield from _gpu_warnings(model)


def _tensor_findings(model: CheckedModel, completed: bool) -> Iterator[Finding]:
    config = model.config
    if not config.output and not completed and not is_ensemble(config):
        lacks = "no output" if config.input else "neither input nor output"
        here = "here" if model.files.config_path else f"in {model.files.directory / CONFIG_FILE}"
        fix = (
            f'write output {{ name: "…" data_type: TYPE_FP32 dims: [ 1 ] }} {here}, or auto_complete_config in model.py'
        )
        yield model.warning(f"the configuration of model '{config.name}' declares {lacks}", (), fix)
    for kind in ("input", "output"):
        names = [tensor.name for tensor in getattr(config, kind)]
        for index, name in enumerate(names):
            if name and name in names[:index]:
                yield model.finding(Problem(f"{kind} '{name}' is declared twice", (kind, index), hint="leave one out"))


def _batching_findings(model: CheckedModel, completed: bool) -> Iterator[Finding]:
    config = model.config
    batches = config.max_batch_size > 0 or completed or config.backend != "python"
    if scheduler(config) == "dynamic_batching" and not batches:
        problem = "'dynamic_batching' has no effect without 'max_batch_size'"
        yield model.warning(problem, ("dynamic_batching",), "max_batch_size: 8, where the model takes batches")


def _gpu_warnings(model: CheckedModel) -> Iterator[Finding]:
    """Instances on GPUs that this machine, which may not be the one that serves, does not have."""
    here = visible_gpus()
    for index, group in enumerate(model.files.config.instance_group):
        lacks = [gpu for gpu in group.gpus if gpu not in here]
        if group.kind == InstanceGroup.KIND_GPU and (lacks or not here):
            has = f"has no GPU {lacks[0]}" if here else "has no GPU"
            yield model.warning(
                f"the model asks for a GPU, and this machine {has}: here it does not load",
                ("instance_group", index),
                "KIND_AUTO takes a GPU where there is one",
            )


def check_backend(model: CheckedModel) -> Iterator[Finding]:
    """A backend or a scheduler that this server does not have."""
    if scheduler(model.config) == "sequence_batching":
        yield model.finding(
            Problem("sequence batching is not available yet", ("sequence_batching",), hint="dynamic_batching { }")
        )
    backend = model.config.backend
    if is_ensemble(model.config) or not backend or backend in BACKENDS:
        return
    if backend in _KNOWN_ELSEWHERE:
        problem, fix = f"backend '{backend}' is not available yet", f"available: {', '.join(sorted(BACKENDS))}"
    else:
        known = sorted({*BACKENDS, *_KNOWN_ELSEWHERE})
        nearest = difflib.get_close_matches(backend, known, n=1)
        problem = f"unknown backend '{backend}'"
        fix = f"did you mean '{nearest[0]}'?" if nearest else f"available: {', '.join(sorted(BACKENDS))}"
    yield model.finding(Problem(problem, ("backend",), hint=fix))
