"""``pb_utils.load_model``, ``unload_model``, ``is_model_ready``: a model has its server load and unload others.

Runs in the worker of a Python model; works in ``initialize`` and ``finalize`` too.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

from conch.backends.python.errors import TritonModelException
from conch.backends.python.response import InferenceResponse
from conch.backends.python.runtime import current
from conch.workers.child.packing import Packer


def load_model(model_name: str, config: str = "", files: Optional[Dict[str, bytes]] = None) -> None:
    """Load or reload a model, where given with a configuration (JSON) and with files by ``file:<path>``."""
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    packer = Packer()
    contents = []
    for path, content in (files or {}).items():
        data = memoryview(content).cast("B")
        contents.append(packer.add(_text(path), "UINT8", (len(data),), data))
    response = _ask({"do": "load", "model": _text(model_name), "config": _text(config), "inputs": contents}, packer)
    _raise("Failed to load model", response)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Stop serving a model; returns while its last requests still run."""
    response = _ask({"do": "unload", "model": _text(model_name), "dependents": bool(unload_dependents)})
    _raise("Failed to unload model", response)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether requests to a model, or to that version of it, can run now."""
    version = -1
    if model_version:
        try:
            version = int(model_version)
        except ValueError:
            version = -2
        if version < 0:
            raise TritonModelException(
                "Failed to check model readiness: failed to get model version from specified version string "
                f"'{model_version}', version should be an integral value > 0"
            )
    response = _ask({"do": "ready", "model": _text(model_name), "version": version})
    _raise("Failed to check model readiness", response)
    return bool(response._parameters["ready"])


def _ask(header: Dict[str, Any], packer: Optional[Packer] = None) -> InferenceResponse:
    runtime = current()
    header.update(op="model_control", starting=runtime.phase == "starting")
    return runtime.bls.start(header, packer).next()[0]


def _raise(what: str, response: InferenceResponse) -> None:
    error = response.error()
    if error is not None:
        about = f"Failed to process the request for model '{current().instance}', message"
        raise TritonModelException(f"{what}: {about}: {error.message()}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a str, not {type(value)}")
    return value
