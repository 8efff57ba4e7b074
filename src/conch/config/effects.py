"""Finds configuration fields that Triton supports but that have no effect in conch."""

from __future__ import annotations

from conch.config.reading import FieldPath, Problem, Problems
from conch.config.schema import ModelConfig, implementation, is_ensemble
from conch.telemetry.statistics import FIRST_RESPONSE, LATENCIES

_NOT_YET = "this server does not support it yet"
#: Top-level fields, and why they have no effect.
FIELDS_WITHOUT_EFFECT = {
    "cc_model_filenames": "use instance groups and versions",
    "model_operations": "libraries of ONNX operations are not loaded; a Python model can load them with "
    "'register_custom_ops_library' of ONNX Runtime's session options",
    "model_repository_agents": _NOT_YET,
}
INSTANCE_FIELDS_WITHOUT_EFFECT = {
    "secondary_devices": _NOT_YET,
    "host_policy": _NOT_YET,
    "passive": _NOT_YET,
}
OPTIMIZATION_FIELDS_WITHOUT_EFFECT = {
    "priority": _NOT_YET,
    "cuda": _NOT_YET,
    "gather_kernel_buffer_threshold": _NOT_YET,
    "eager_batching": _NOT_YET,
}
#: Backends that read ``optimization.graph`` and ``optimization.execution_accelerators``.
_OPTIMIZING = frozenset({"onnxruntime"})

#: Backends that join the tensors of a batch's requests; others receive separate requests, as in Triton.
_COLLECTING = frozenset({"onnxruntime", "openvino", "pytorch"})


def ineffective_problems(config: ModelConfig) -> Problems:
    """Yield a warning for each field of a configuration, written or completed, that has no effect."""
    for name, reason in FIELDS_WITHOUT_EFFECT.items():
        if _is_set(config, name):
            yield _ineffective(f"'{name}'", (name,), reason)
    if implementation(config) not in _COLLECTING:
        for name in ("batch_input", "batch_output"):
            if _is_set(config, name):
                yield _ineffective(f"'{name}'", (name,), "the model gets each request with its own tensors")
    yield from _of_metrics(config)
    yield from _of_instances(config)
    yield from _of_optimization(config)
    yield from _of_ensembles(config)


def _of_metrics(config: ModelConfig) -> Problems:
    for index, control in enumerate(config.model_metrics.metric_control):
        family = control.metric_identifier.family
        if family and family not in (FIRST_RESPONSE, *LATENCIES):
            field = ("model_metrics", 0, "metric_control", index)
            yield _ineffective(
                f"'metric_control' of '{family}'", field, f"only {', '.join((FIRST_RESPONSE, *LATENCIES))} have buckets"
            )


def _of_instances(config: ModelConfig) -> Problems:
    for index, group in enumerate(config.instance_group):
        for name, reason in INSTANCE_FIELDS_WITHOUT_EFFECT.items():
            if _is_set(group, name):
                yield _ineffective(f"'{name}' of an instance group", ("instance_group", index, name), reason)
    if is_ensemble(config) and config.instance_group:
        yield _ineffective("'instance_group'", ("instance_group",), "an ensemble has no instances")


def _of_optimization(config: ModelConfig) -> Problems:
    for name, reason in OPTIMIZATION_FIELDS_WITHOUT_EFFECT.items():
        if _is_set(config.optimization, name):
            yield _ineffective(f"'{name}' of 'optimization'", ("optimization", 0, name), reason)
    for name in ("graph", "execution_accelerators"):
        if _is_set(config.optimization, name) and config.backend not in _OPTIMIZING:
            reason = f"only backend {', '.join(sorted(_OPTIMIZING))} reads it"
            yield _ineffective(f"'{name}' of 'optimization'", ("optimization", 0, name), reason)


def _of_ensembles(config: ModelConfig) -> Problems:
    ensemble: FieldPath = ("ensemble_scheduling", 0)
    for index, step in enumerate(config.ensemble_scheduling.step):
        if step.model_namespace:
            yield _ineffective(
                "'model_namespace'",
                (*ensemble, "step", index, "model_namespace"),
                "without --model-namespacing, or if the ensemble's own repository has the step's model",
            )


def _is_set(message: object, name: str) -> bool:
    return any(field.name == name for field, _ in message.ListFields())  # type: ignore[attr-defined]


def _ineffective(subject: str, field: FieldPath, reason: str) -> Problem:
    return Problem(f"{subject} has no effect: {reason}", field, hint="leave it out")
