"""The module that a ``model.py`` imports as ``triton_python_backend_utils``.

Gathers what models use from the modules beside it; runs in the worker of a Python model.
"""

from __future__ import annotations

from typing import Any

from conch.backends.python.datatypes import (
    TRITON_STRING_TO_NUMPY,
    numpy_to_triton_type,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from conch.backends.python.errors import TritonError, TritonModelException
from conch.backends.python.logger import Logger
from conch.backends.python.metrics import MetricFamily
from conch.backends.python.model_config import ModelConfig
from conch.backends.python.model_control import is_model_ready, load_model, unload_model
from conch.backends.python.request import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    get_input_tensor_by_name,
)
from conch.backends.python.response import InferenceResponse, get_output_tensor_by_name
from conch.backends.python.response_sender import TRITONSERVER_RESPONSE_COMPLETE_FINAL, InferenceResponseSender
from conch.backends.python.runtime import current
from conch.backends.python.strings import deserialize_bytes_tensor, serialize_byte_tensor
from conch.backends.python.tensor import MaybeNone, Tensor

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU


def get_model_dir() -> str:
    """The directory of the model version that is running."""
    return str(current().model["version_directory"])


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | MaybeNone:
    """The part of a configuration about that input; None if there is none."""
    return _by_name(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | MaybeNone:
    """The part of a configuration about that output; None if there is none."""
    return _by_name(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Whether a configuration (as a dictionary) says that the model is decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _by_name(tensors: Any, name: str) -> dict[str, Any] | MaybeNone:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)
