"""The module that a ``model.py`` imports as ``triton_python_backend_utils``.

Gathers what models use from the modules beside it; runs in the worker of a Python model.
"""

from __future__ import annotations

import os
import re
import sys
from enum import IntEnum
from typing import Any

from conch.backends.python import arguments
from conch.backends.python.datatypes import (
    TRITON_STRING_TO_NUMPY,
    numpy_to_triton_type,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from conch.backends.python.errors import TritonError, TritonModelException
from conch.backends.python.metrics import MetricFamily
from conch.backends.python.model_config import ModelConfig
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
from conch.workers.child.packing import Packer

# Runs in the worker of a Python model; the server's log settings decide what is sent.


class LogLevel(IntEnum):
    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Functions to log with; there are no instances."""

    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    def __init__(self) -> None:
        raise TypeError("Logger has no instances: call its functions")

    @staticmethod
    def log(message: str, level: IntEnum = LogLevel.INFO) -> None:
        if not isinstance(level, LogLevel):
            raise TypeError(f"Logger.log: the level must be one of Logger's, not {level!r}")
        _log(message, level)

    @staticmethod
    def log_info(message: str) -> None:
        _log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        _log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        _log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log(message, LogLevel.VERBOSE)


def _log(message: str, level: LogLevel) -> None:
    if not isinstance(message, str):
        raise TypeError(f"Logger: the message must be a str, not {type(message)}")
    caller = sys._getframe(2)
    current().write_log(level.name, os.path.basename(caller.f_code.co_filename), caller.f_lineno, message)


# Runs in the worker of a Python model; works in ``initialize`` and ``finalize`` too.


#: What C's ``stol`` reads of a text.
_LEADING_NUMBER = re.compile(r"\s*[+-]?\d+")


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load or reload a model, where given with a configuration (JSON) and with files by ``file:<path>``."""
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    packer = Packer()
    contents = []
    for path, content in (files or {}).items():
        data = memoryview(content).cast("B")
        contents.append(packer.add(arguments.text(path, "load_model: files"), "UINT8", (len(data),), data))
    name, config = arguments.text(model_name, "load_model: model_name"), arguments.text(config, "load_model: config")
    response = _ask({"do": "load", "model": name, "config": config, "inputs": contents}, packer)
    _raise("Failed to load model", response)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Stop serving a model; returns while its last requests still run."""
    name = arguments.text(model_name, "unload_model: model_name")
    dependents = arguments.truth(unload_dependents, "unload_model: unload_dependents")
    response = _ask({"do": "unload", "model": name, "dependents": dependents})
    _raise("Failed to unload model", response)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether requests to a model, or to that version of it, can run now."""
    version = -1
    if arguments.text(model_version, "is_model_ready: model_version"):
        number = _LEADING_NUMBER.match(model_version)
        if number is None or int(number[0]) < 0:
            raise TritonModelException(
                f"Failed to check model readiness: {_about()}: failed to get model version from specified version "
                f"string '{model_version}'{' (details: stol)' if number is None else ''}, version should be an "
                "integral value > 0"
            )
        version = int(number[0])
    name = arguments.text(model_name, "is_model_ready: model_name")
    response = _ask({"do": "ready", "model": name, "version": version})
    _raise("Failed to check model readiness", response)
    return bool(response._parameters["ready"])


def _ask(header: dict[str, Any], packer: Packer | None = None) -> InferenceResponse:
    runtime = current()
    header.update(op="model_control", starting=runtime.phase == "starting")
    return runtime.bls.start(header, packer).next()[0]


def _raise(what: str, response: InferenceResponse) -> None:
    error = response.error()
    if error is not None:
        raise TritonModelException(f"{what}: {_about()}: {error.message()}")


def _about() -> str:
    return f"Failed to process the request for model '{current().instance}', message"


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
