"""The module that a ``model.py`` imports as ``triton_python_backend_utils``.

Re-exports the public API from the other modules of this package; runs in the worker of a Python model. The functions
for model control also work in ``initialize`` and ``finalize``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from enum import IntEnum
from typing import Any

from conch.backends.python import arguments
from conch.backends.python.errors import TritonError, TritonModelException
from conch.backends.python.metrics import MetricFamily
from conch.backends.python.request import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponseSender,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    get_input_tensor_by_name,
)
from conch.backends.python.response import InferenceResponse, get_output_tensor_by_name
from conch.backends.python.runtime import current
from conch.backends.python.tensor import (
    TRITON_STRING_TO_NUMPY,
    MaybeNone,
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from conch.workers.child.packing import Packer

_HELPER = "auto-complete-config function for model"


class ModelConfig:
    """A model's configuration; a model may add missing fields but must not change existing ones."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary, in the format of ``GET /config``."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        present = self._model_config["max_batch_size"]
        if present > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {present}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching. Raises ValueError if the configuration has another scheduler."""
        for choice in ("sequence_batching", "ensemble_scheduling"):
            if choice in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{choice}', but auto-complete-config function for "
                    f"model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:
        """Add an input, or complete the existing one: ``name``, ``data_type``, ``dims``, ``optional``."""
        self._check("input", input, ("name", "data_type", "dims", "optional"))
        self._merge("input", input)

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, or complete the existing one: ``name``, ``data_type``, ``dims``."""
        self._check("output", output, ("name", "data_type", "dims"))
        self._merge("output", output)

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set whether the model is decoupled: ``{"decoupled": bool}``."""
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in {_HELPER} '{self._name}' contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', "
                f"which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = decoupled

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    def _check(self, kind: str, tensor: dict[str, Any], allowed: tuple[str, ...]) -> None:
        if any(key not in allowed for key in tensor):
            *first, last = (f"'{key}'" for key in allowed)
            raise ValueError(
                f"{kind} '{tensor.get('name', '')}' in {_HELPER} '{self._name}' contains property other than "
                f"{', '.join(first)} and {last}."
            )
        if "name" not in tensor:
            raise ValueError(f"{kind} in {_HELPER} '{self._name}' is missing 'name' property.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} '{tensor['name']}' in {_HELPER} '{self._name}' is missing '{key}' property.")

    def _merge(self, kind: str, tensor: dict[str, Any]) -> None:
        tensors: list[dict[str, Any]] = self._model_config[kind]
        name = tensor["name"]
        present: dict[str, Any] | None = next((known for known in tensors if known["name"] == name), None)
        if present is None:
            tensors.append(tensor)
            return
        datatype = present.get("data_type", "TYPE_INVALID")
        if datatype not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {datatype} for {kind} '{name}', "
                f"model provides {tensor['data_type']}"
            )
        about = f"model '{self._name}', tensor '{name}': the model expects"
        dims = present.get("dims")
        if dims and dims != tensor["dims"]:
            raise ValueError(f"{about} dims {tensor['dims']} but the model configuration specifies dims {dims}")
        if "optional" in tensor and present.get("optional", tensor["optional"]) != tensor["optional"]:
            raise ValueError(
                f"{about} optional {tensor['optional']} but the model configuration specifies optional "
                f"{present['optional']}"
            )
        present.update(tensor)


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


#: The part of a text that C's ``stol`` parses.
_LEADING_NUMBER = re.compile(r"\s*[+-]?\d+")
_READINESS = "Failed to check model readiness"


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
    _ask("Failed to load model", {"do": "load", "model": name, "config": config, "inputs": contents}, packer)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; returns before its last requests have completed."""
    name = arguments.text(model_name, "unload_model: model_name")
    dependents = arguments.truth(unload_dependents, "unload_model: unload_dependents")
    _ask("Failed to unload model", {"do": "unload", "model": name, "dependents": dependents})


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model, or the given version of it, is ready for requests."""
    version = -1
    if arguments.text(model_version, "is_model_ready: model_version"):
        number = _LEADING_NUMBER.match(model_version)
        if number is None or int(number[0]) < 0:
            raise current().failure(
                _READINESS,
                f"failed to get model version from specified version string '{model_version}'"
                f"{' (details: stol)' if number is None else ''}, version should be an integral value > 0",
            )
        version = int(number[0])
    name = arguments.text(model_name, "is_model_ready: model_name")
    response = _ask(_READINESS, {"do": "ready", "model": name, "version": version})
    return bool(response._parameters["ready"])


def _ask(what: str, header: dict[str, Any], packer: Packer | None = None) -> InferenceResponse:
    runtime = current()
    return runtime.ask(what, {**header, "op": "model_control", "starting": runtime.phase == "starting"}, packer)


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
