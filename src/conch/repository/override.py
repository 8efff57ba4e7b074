"""Load requests that contain a configuration or files to use instead of those in the repository.

Uploaded files are written to a temporary directory that looks like a model directory. The server removes it when the
load is replaced or undone.

Files are programs, and a configuration selects the program that runs; only clients that may run code on the server may
send either (``--model-load-overrides``).
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from conch.config import render
from conch.config.complete import RUNTIME_FACT_PREFIX
from conch.config.remote import is_remote
from conch.config.schema import ModelConfig
from conch.core.errors import ConchError, internal, invalid
from conch.machine.temporary import TemporaryFolder
from conch.repository.backends import DEFAULT_BACKEND_DIRECTORIES, BackendDirectories
from conch.repository.errors import PollError
from conch.repository.model_files import ModelFiles, describe

_FILE = "file:"


@dataclass(frozen=True)
class Override:
    """The parameters of a load: a configuration as JSON text, and files by their path in the model directory.

    Unless ``of_any_code`` is set, the configuration may not select code that the repository's does not use.
    """

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    of_any_code: bool = True

    def __bool__(self) -> bool:
        return self.config is not None or bool(self.files)


def read_parameters(name: str, parameters: Mapping[str, object]) -> Override:
    """Return the override in the parameters of a load of model ``name``; file contents are bytes.

    Raises INVALID_ARG for an unknown parameter or a wrong type, and :class:`PollError` for a file path outside of the
    model directory and for files without ``config``.
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == "config" and isinstance(value, str):
            config = value
        elif key.startswith(_FILE) and isinstance(value, bytes):
            files[_inside(name, key)] = value
        else:
            raise invalid(f"Unrecognized load parameter '{key}' with type '{_type_name(value)}'")
    if files and config is None:
        raise PollError.of(name, invalid("Load parameter 'config' must be specified for model file override"))
    return Override(config, files)


def _inside(name: str, key: str) -> str:
    """Return the normalized path in ``file:<path>``; a leading ``/`` means the model directory."""
    path = key.removeprefix(_FILE)
    normalized = posixpath.normpath(path.lstrip("/") or ".")
    if normalized == "." or normalized.split("/")[0] == ".." or "\0" in path or "\\" in path:
        cause = invalid(
            f"Invalid file parameter '{key}' with normalized path '{normalized}' must stay within model directory."
        )
        raise PollError.of(name, cause)
    return normalized


def _type_name(value: object) -> str:
    match value:
        case bool():
            return "BOOL"
        case int():
            return "INT"
        case float():
            return "DOUBLE"
        case str():
            return "STRING"
        case bytes():
            return "BYTES"
        case _:
            return "<invalid>"


def needs_no_directory(override: Override) -> bool:
    """Return whether a load needs nothing from the repository, because it contains a remote model's configuration."""
    if override.config is None:
        return False
    try:
        return is_remote(render.from_json(override.config))
    except ConchError:
        return False  # describing the model reports the error


class UploadedModel:
    """The temporary model directory of a load with uploaded files; :meth:`close` removes it."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        """Write the files. Raises :class:`PollError` if writing fails."""
        self._home = TemporaryFolder("model")
        self.directory = self._home.path / "model"
        try:
            self.directory.mkdir()
            for path, content in files.items():
                target = self.directory / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        except (OSError, ValueError) as error:
            self.close()
            raise PollError(name, f"Poll failed for model directory '{name}': {_reason(error)}") from error

    def close(self) -> None:
        self._home.close()


def _reason(error: OSError | ValueError) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def describe_override(
    name: str,
    directory: Path,
    config: str | None,
    backends: BackendDirectories = DEFAULT_BACKEND_DIRECTORIES,
    namespace: str = "",
) -> ModelFiles:
    """Read ``directory`` as the model ``name`` under the overriding configuration.

    Raises :class:`PollError`, also for JSON that is not a configuration.
    """
    override = read_override(name, config)
    return describe(name, directory, override=override, backends=backends, namespace=namespace)


def read_override(name: str, config: str | None) -> ModelConfig | None:
    """Parse the overriding configuration; return None if there is none.

    Raises :class:`PollError` if the JSON is not a configuration.
    """
    if config is None:
        return None
    try:
        return render.from_json(config)
    except ConchError as error:
        raise PollError.of(name, internal(error.message)) from error


#: Configuration fields that select the code that runs or the files that it loads.
_CODE_FIELDS: Final = (
    "backend",
    "platform",
    "runtime",
    "default_model_filename",
    "cc_model_filenames",
    "model_operations",
    "optimization",
)


def check_allowed(allowed: str, config: str | None, files: Mapping[str, Any]) -> None:
    """Raise INVALID_ARG for a load that sends more than ``allowed``: ``files``, ``config`` or ``none``."""
    brings = "files" if files else "a configuration" if config is not None else ""
    if brings and (allowed == "none" or (allowed == "config" and files)):
        raise invalid(
            f"a load must not contain {brings}, because this server has --model-load-overrides={allowed}: load the "
            f"model by its name{' and a configuration' if allowed == 'config' else ''}"
        )


def check_same_code(config: ModelConfig, known: Iterable[ModelConfig]) -> None:
    """Raise INVALID_ARG if a client's ``config`` selects code that no ``known`` configuration selects.

    The known configurations are the one in the repository and the one with which the model serves. All are completed.
    """
    of_server = list(known)
    for name in _CODE_FIELDS:
        value = getattr(config, name)
        if value and all(value != getattr(known_config, name) for known_config in of_server):
            raise _chooses_code(name)
    for name, parameter in config.parameters.items():
        if name.startswith(RUNTIME_FACT_PREFIX):
            continue  # shown by the server; without effect in a client's configuration
        if all(
            name not in known_config.parameters or known_config.parameters[name] != parameter
            for known_config in of_server
        ):
            raise _chooses_code(f"parameters['{name[:100]}']")


def _chooses_code(field: str) -> Exception:
    return invalid(
        f"a load's configuration may not change {field} from its value in the model repository, because it selects "
        "the code that runs and this server has --model-load-overrides=config"
    )
