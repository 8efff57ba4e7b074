"""``pb_utils.load_model``, ``unload_model``, ``is_model_ready``: a model has its server load and unload others.

Runs in the worker of a Python model; works in ``initialize`` and ``finalize`` too.
"""

from __future__ import annotations

import re
from typing import Any

from conch.backends.python import arguments
from conch.backends.python.errors import TritonModelException
from conch.backends.python.response import InferenceResponse
from conch.backends.python.runtime import current
from conch.workers.child.packing import Packer

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
