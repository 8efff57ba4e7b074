"""The configuration message and the names of its enums.

The server and tools use this module, workers never do.
"""

from __future__ import annotations

from typing import Any, Final

from conch.core.protocol.model_config import (
    BatchInput,
    BatchOutput,
    DataType,
    ModelConfig,
    ModelInput,
    ModelOutput,
)
from conch.core.protocol.model_config import ModelInstanceGroup as InstanceGroup
from conch.core.protocol.model_config import ModelQueuePolicy as QueuePolicy
from conch.core.protocol.model_config import ModelSequenceBatching as SequenceBatching
from conch.core.tensors import CONFIG_NAME, PROTOCOL_NAME

__all__ = [
    "PYTHON_RUNTIME",
    "BatchInput",
    "BatchOutput",
    "DataType",
    "InstanceGroup",
    "ModelConfig",
    "ModelInput",
    "ModelOutput",
    "QueuePolicy",
    "SequenceBatching",
    "copied",
    "datatype",
    "datatype_name",
    "datatype_number",
    "implementation",
    "is_ensemble",
    "scheduler",
    "unknown_enum_value",
]

#: The datatype of a tensor without one in the configuration.
UNSPECIFIED: Final = 0
#: The value of ``runtime`` for models of Python-based backends.
PYTHON_RUNTIME: Final = "model.py"


def datatype(number: int) -> str:
    """Return the protocol name (``FP32``, ``BYTES`` …) of a configuration's ``data_type``; ``<invalid>`` if none."""
    return PROTOCOL_NAME.get(datatype_name(number), "<invalid>")


def datatype_name(number: int) -> str:
    """Return the configuration name (``TYPE_FP32``, ``TYPE_STRING`` …) of a ``data_type``."""
    known = DataType.DESCRIPTOR.values_by_number.get(number)
    return str(known.name) if known else "TYPE_INVALID"


def datatype_number(protocol_name: str) -> int:
    """Return the ``data_type`` for a protocol name; ``UNSPECIFIED`` for an unknown name."""
    name = CONFIG_NAME.get(protocol_name)
    return int(DataType.Value(name)) if name else UNSPECIFIED


def scheduler(config: ModelConfig) -> str:
    """Return ``dynamic_batching``, ``sequence_batching``, ``ensemble_scheduling``, or ``""`` for none."""
    return str(config.WhichOneof("scheduling_choice") or "")


def copied(config: ModelConfig) -> ModelConfig:
    """Return an independent copy of a configuration."""
    copy = ModelConfig()
    copy.CopyFrom(config)
    return copy


def without_placement(config: ModelConfig) -> ModelConfig:
    """Return a copy without the fields that may change while a version runs: instance groups and version policy."""
    rest = copied(config)
    rest.ClearField("instance_group")
    rest.ClearField("version_policy")
    return rest


def with_placement(config: ModelConfig, other: ModelConfig) -> ModelConfig:
    """Return ``config`` with the instance groups and the version policy of ``other``."""
    changed = without_placement(config)
    changed.instance_group.extend(other.instance_group)
    changed.version_policy.CopyFrom(other.version_policy)
    return changed


def is_ensemble(config: ModelConfig) -> bool:
    return bool(config.platform == "ensemble")


def implementation(config: ModelConfig) -> str:
    """Return the backend that runs the model of a completed configuration; ``python`` for all Python-based ones."""
    return "python" if config.runtime == PYTHON_RUNTIME else str(config.backend)


def unknown_enum_value(message: Any) -> str:
    """Return ``field: number`` of the first enum in a message with an unknown number, else ``""``.

    Protobuf parsers accept any number for an enum. Code that reads a configuration uses this function to refuse unknown
    numbers, so that later code need not handle them.
    """
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of = field.message_type.fields_by_name["value"]
            values = [value[key] for key in sorted(value)]
        else:
            of, values = field, value if isinstance(field.default_value, list) else [value]
        for element in values:
            if of.enum_type is not None and element not in of.enum_type.values_by_number:
                return f"{field.name}: {element}"
            if of.message_type is not None and (nested := unknown_enum_value(element)):
                return nested
    return ""
