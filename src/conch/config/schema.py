"""The configuration message and the names of its enums.

The message class comes from ``tritonclient``, which the owner of the protocol maintains.  Used by
everything that touches a configuration, in the server and in tools; never in workers.
"""

from __future__ import annotations

from typing import Final

from tritonclient.grpc.model_config_pb2 import (
    BatchInput,
    BatchOutput,
    DataType,
    ModelConfig,
    ModelInput,
    ModelOutput,
)
from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup as InstanceGroup
from tritonclient.grpc.model_config_pb2 import ModelQueuePolicy as QueuePolicy
from tritonclient.grpc.model_config_pb2 import ModelSequenceBatching as SequenceBatching

from conch.tensors import CONFIG_NAME, PROTOCOL_NAME

__all__ = [
    "BatchInput",
    "BatchOutput",
    "DataType",
    "InstanceGroup",
    "ModelConfig",
    "ModelInput",
    "ModelOutput",
    "QueuePolicy",
    "SequenceBatching",
    "datatype",
    "datatype_name",
    "datatype_number",
    "is_ensemble",
    "scheduler",
]

#: The datatype that a configuration has where it names none.
UNSPECIFIED: Final = 0


def datatype(number: int) -> str:
    """Protocol name (``FP32``, ``BYTES`` …) of a configuration's ``data_type``; ``<invalid>`` for none."""
    return PROTOCOL_NAME.get(datatype_name(number), "<invalid>")


def datatype_name(number: int) -> str:
    """Configuration name (``TYPE_FP32``, ``TYPE_STRING`` …) of a ``data_type``."""
    known = DataType.DESCRIPTOR.values_by_number.get(number)
    return str(known.name) if known else "TYPE_INVALID"


def datatype_number(protocol_name: str) -> int:
    """The ``data_type`` that a protocol name stands for; ``UNSPECIFIED`` for an unknown name."""
    name = CONFIG_NAME.get(protocol_name)
    return int(DataType.Value(name)) if name else UNSPECIFIED


def scheduler(config: ModelConfig) -> str:
    """The choice made: ``dynamic_batching``, ``sequence_batching``, ``ensemble_scheduling``, or ``""`` for none."""
    return str(config.WhichOneof("scheduling_choice") or "")


def is_ensemble(config: ModelConfig) -> bool:
    return bool(config.platform == "ensemble")
