"""Loads that bring their own configuration or files instead of using the repository's.

Uploaded files are written into a temporary directory that looks like a model directory; the
server removes it when the load is replaced or undone.
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
from conch.errors import ConchError, internal, invalid
from conch.repository.backends import USUAL_PLACES, BackendDirectories
from conch.repository.errors import PollError
from conch.repository.model_files import ModelFiles, describe
from conch.temporary import TemporaryFolder

_FILE = "file:"


@dataclass(frozen=True)
class Override:
    """The parameters of a load: a configuration as JSON text, and files by their path in the model directory.

    Without ``of_any_code`` the configuration may not choose other code than the repository's does.
    """

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    of_any_code: bool = True

    def __bool__(self) -> bool:
        return self.config is not None or bool(self.files)


def read_parameters(name: str, parameters: Mapping[str, object]) -> Override:
    """The override that the parameters of a load of model ``name`` ask for; the contents of files are bytes.

    Raises INVALID_ARG for an unknown parameter or a wrong type, and :class:`PollError` for a file
    path that leads out of the model directory and for files without ``config``.
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
    """The path that ``file:<path>`` names, without its detours; a leading ``/`` means the model directory."""
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
    """Whether a load brings all that there is of its model: a configuration for one that another server runs."""
    if override.config is None:
        return False
    try:
        return is_remote(render.from_json(override.config))
    except ConchError:
        return False  # whoever describes the model says why


class UploadedModel:
    """The temporary model directory of a load that brought files; :meth:`close` removes it."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        """Write the files.  Raises :class:`PollError` where the file system refuses one."""
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
    name: str, directory: Path, config: str | None, backends: BackendDirectories = USUAL_PLACES, namespace: str = ""
) -> ModelFiles:
    """What ``directory`` holds for ``name`` under the overriding configuration.

    Raises :class:`PollError`, for JSON that is no configuration as well.
    """
    override = read_override(name, config)
    return describe(name, directory, override=override, backends=backends, namespace=namespace)


def read_override(name: str, config: str | None) -> ModelConfig | None:
    """The overriding configuration, None where there is none; :class:`PollError` for JSON that is no configuration."""
    if config is None:
        return None
    try:
        return render.from_json(config)
    except ConchError as error:
        raise PollError.of(name, internal(error.message)) from error
