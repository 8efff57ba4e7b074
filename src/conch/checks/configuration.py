"""Checks of a configuration by itself: its fields, its tensors, its instances and its backend."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Final

from conch.backends.table import BACKENDS
from conch.checks.finding import Finding
from conch.checks.model import CheckedModel
from conch.config.problem import Problem
from conch.config.schema import ModelConfig, is_ensemble
from conch.config.validate import directory_name_problems, static_problems
from conch.config.validate_instances import instance_problems, warmup_problems
from conch.config.validate_io import io_problems
from conch.config.validate_scheduling import state_problems

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


def check_backend(model: CheckedModel) -> Iterator[Finding]:
    """A backend that this server does not have."""
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
