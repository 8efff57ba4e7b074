"""Values derived from a configuration, such as the signature that requests are checked against."""

from __future__ import annotations

from collections.abc import Sequence

from conch.config.schema import ModelConfig, ModelInput, ModelOutput, datatype
from conch.core.errors import did_you_mean
from conch.core.inference import ModelSignature, TensorSpec


def signature(config: ModelConfig, version: int) -> ModelSignature:
    """Return the inputs and outputs of ``version`` of a completed configuration, in the configuration's order."""
    return ModelSignature(
        name=config.name,
        version=version,
        max_batch_size=config.max_batch_size,
        inputs={
            tensor.name: _spec(tensor, optional=tensor.optional, ragged=tensor.allow_ragged_batch)
            for tensor in config.input
        },
        outputs={tensor.name: _spec(tensor) for tensor in config.output},
        decoupled=config.model_transaction_policy.decoupled,
    )


def no_such_input(signature: ModelSignature, name: str) -> str:
    """Return the error text for an unknown input, with the model's inputs."""
    hint = did_you_mean(name, signature.inputs)
    known = ", ".join(f"'{input}'" for input in signature.inputs)
    message = f"model '{signature.name}' has no input '{name}'{', only ' + known if known else ''}"
    return f"{message}; {hint}" if hint else message


def _spec(tensor: ModelInput | ModelOutput, *, optional: bool = False, ragged: bool = False) -> TensorSpec:
    return TensorSpec(
        name=tensor.name,
        datatype=datatype(tensor.data_type),
        dims=tuple(tensor.dims),
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        optional=optional,
        ragged=ragged,
    )


def full_shape(config: ModelConfig, dims: Sequence[int]) -> list[int]:
    """Return ``dims``, preceded by the batch dimension if the model batches, as in metadata."""
    return [-1, *dims] if config.max_batch_size > 0 else list(dims)


def parameters(config: ModelConfig) -> dict[str, str]:
    """Return the ``parameters`` map; its values are always strings."""
    return {key: config.parameters[key].string_value for key in sorted(config.parameters)}


def platform(config: ModelConfig) -> str:
    """Return the platform in a model's metadata: ``platform``, or else the backend."""
    return str(config.platform or config.backend)


def histogram_buckets(config: ModelConfig) -> dict[str, list[float]]:
    """Return the buckets (ms, ascending) that ``model_metrics`` sets, by the family of the histogram."""
    buckets: dict[str, set[float]] = {}
    for control in config.model_metrics.metric_control:
        buckets.setdefault(control.metric_identifier.family, set()).update(control.histogram_options.buckets)
    return {family: sorted(bounds) for family, bounds in buckets.items()}
