"""Fields of a configuration that Triton obeys and that have no effect here, so that nobody waits for it in vain."""

from __future__ import annotations

from conch.config.problem import FieldPath, Problem, Problems
from conch.config.schema import ModelConfig, is_ensemble
from conch.config.signature import FIRST_RESPONSE

_NOT_YET = "this server does not have that yet"
#: Whole fields, and why they have no effect.
_FIELDS = {
    "runtime": "backends have one runtime here",
    "batch_input": _NOT_YET,
    "batch_output": _NOT_YET,
    "cc_model_filenames": "use instance groups and versions",
    "model_operations": "there are no custom operations to load",
    "model_repository_agents": _NOT_YET,
}
_OF_INSTANCES = {
    "rate_limiter": _NOT_YET,
    "secondary_devices": _NOT_YET,
    "host_policy": _NOT_YET,
    "passive": _NOT_YET,
}
_OF_OPTIMIZATION = {
    "priority": _NOT_YET,
    "cuda": _NOT_YET,
    "gather_kernel_buffer_threshold": _NOT_YET,
    "eager_batching": _NOT_YET,
}
#: The backends that read ``optimization.graph`` and ``optimization.execution_accelerators``.
_OPTIMIZING = frozenset({"onnxruntime"})


def ineffective_problems(config: ModelConfig) -> Problems:
    """Everything that is set in a configuration, as written or completed, and has no effect.  These are warnings."""
    if config.response_cache.enable:
        yield _ineffective("the response cache", ("response_cache",), _NOT_YET)
    for name, reason in _FIELDS.items():
        if _is_set(config, name):
            yield _ineffective(f"'{name}'", (name,), reason)
    for index, group in enumerate(config.instance_group):
        for name, reason in _OF_INSTANCES.items():
            if _is_set(group, name):
                yield _ineffective(f"'{name}' of an instance group", ("instance_group", index, name), reason)
    for name, reason in _OF_OPTIMIZATION.items():
        if _is_set(config.optimization, name):
            yield _ineffective(f"'{name}' of 'optimization'", ("optimization", 0, name), reason)
    for name in ("graph", "execution_accelerators"):
        if _is_set(config.optimization, name) and config.backend not in _OPTIMIZING:
            reason = f"only backend {', '.join(sorted(_OPTIMIZING))} reads it"
            yield _ineffective(f"'{name}' of 'optimization'", ("optimization", 0, name), reason)
    yield from _of_ensemble(config)
    for index, control in enumerate(config.model_metrics.metric_control):
        family = control.metric_identifier.family
        if family and family != FIRST_RESPONSE:
            reason = f"the only histogram with buckets of a model's own is {FIRST_RESPONSE}"
            yield _ineffective(f"'{family}'", ("model_metrics", 0, "metric_control", index), reason)


def _of_ensemble(config: ModelConfig) -> Problems:
    where: FieldPath = ("ensemble_scheduling", 0)
    if config.ensemble_scheduling.max_inflight_requests:
        yield _ineffective("'max_inflight_requests'", (*where, "max_inflight_requests"), _NOT_YET)
    for index, step in enumerate(config.ensemble_scheduling.step):
        if step.model_namespace:
            yield _ineffective("'model_namespace'", (*where, "step", index, "model_namespace"), _NOT_YET)
    if is_ensemble(config) and config.instance_group:
        yield _ineffective("'instance_group'", ("instance_group",), "an ensemble has no instances of its own")


def _is_set(message: object, name: str) -> bool:
    return any(field.name == name for field, _ in message.ListFields())  # type: ignore[attr-defined]


def _ineffective(what: str, field: FieldPath, reason: str) -> Problem:
    return Problem(f"{what} has no effect: {reason}", field, hint="leave it out")
