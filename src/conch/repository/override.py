"""Load requests that contain a configuration or files to use instead of those in the repository.

Uploaded files are written to a temporary directory that looks like a model directory. The server removes it when the
load is replaced or undone.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from conch.config import render
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
    """Parse the overriding configuration, None without one.

    Raises :class:`PollError` if the JSON is not a configuration.
    """
    if config is None:
        return None
    try:
        return render.from_json(config)
    except ConchError as error:
        raise PollError.of(name, internal(error.message)) from error
