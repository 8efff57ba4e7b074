"""The module that a ``model.py`` imports as ``triton_python_backend_utils``.

Re-exports the public API from the other modules of this package; runs in the worker of a Python model.
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


class LogLevel(IntEnum):
    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Static functions that log to the server, filtered by its log settings; cannot be instantiated."""

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


# The functions for model control also work in ``initialize`` and ``finalize``.


#: The part of a text that C's ``stol`` parses.
_LEADING_NUMBER = re.compile(r"\s*[+-]?\d+")


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load or reload a model, optionally with a configuration (JSON) and with file contents by ``file:<path>``."""
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
    """Unload a model; returns before its last requests have completed."""
    name = arguments.text(model_name, "unload_model: model_name")
    dependents = arguments.truth(unload_dependents, "unload_model: unload_dependents")
    response = _ask({"do": "unload", "model": name, "dependents": dependents})
    _raise("Failed to unload model", response)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model, or the given version of it, is ready for requests."""
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
    """Return the directory of the running model version."""
    return str(current().model["version_directory"])


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | MaybeNone:
    """Return the configuration of the named input; None if there is none."""
    return _by_name(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | MaybeNone:
    """Return the configuration of the named output; None if there is none."""
    return _by_name(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Whether a configuration (dictionary) is that of a decoupled model."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _by_name(tensors: Any, name: str) -> dict[str, Any] | MaybeNone:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)
