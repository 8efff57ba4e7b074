"""All checks of a configuration, in the order in which loading makes them.

``validate`` runs when a model is read from its repository, before its versions are listed; ``validate_written`` runs
instead where no backend completes configurations. ``validate_io``, ``validate_states`` and ``validate_instances`` run
when a version is loaded, after the backend has completed the configuration. ``validate_ensemble`` runs once the
configurations of the steps' models are known. Each function raises the first :class:`Problem`; the underlying
``…_problems`` generators yield all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conch.config.problem import Problem, Problems, refuse
from conch.config.schema import ModelConfig, is_ensemble, scheduler
from conch.config.validate_ensemble import ensemble_problems, member_problems
from conch.config.validate_instances import instance_problems
from conch.config.validate_io import io_problems, written_io_problems
from conch.config.validate_scheduling import (
    dynamic_batching_problems,
    response_cache_problems,
    sequence_batching_problems,
    state_problems,
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


def validate_ensemble(config: ModelConfig, members: Mapping[str, ModelConfig]) -> None:
    """Refuse an ensemble with steps that do not fit the completed configurations of their models."""
    refuse(member_problems(config, members))


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
        where = ("model_metrics", 0, "metric_control", index)
        if not control.HasField("metric_identifier"):
            yield Problem("metric control must specify 'metric_identifier'", where)
        elif not control.metric_identifier.family:
            yield Problem("metric identifier must specify non-empty 'family'", where)
        if not control.HasField("histogram_options"):
            yield Problem("metric control must specify 'histogram_options'", where)
        elif not control.histogram_options.buckets:
            yield Problem("histogram options must specify non-empty 'buckets'", where)
