"""Locates and reads a model directory: configuration, versions, artefacts, labels. Blocks, because it reads disks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conch.config import pbtxt
from conch.config.complete import complete
from conch.config.reading import ConfigError, read_small
from conch.config.remote import ONLY_VERSION, REMOTE
from conch.config.schema import ModelConfig
from conch.core.errors import ConchError, internal, invalid
from conch.repository.backends import DEFAULT_BACKEND_DIRECTORIES, ENVIRONMENT_ARCHIVE, BackendDirectories
from conch.repository.errors import PollError
from conch.repository.fingerprint import Fingerprint
from conch.repository.names import qualified
from conch.repository.versions import directories_in, read_versions


@dataclass(frozen=True)
class Inventory:
    """The complete contents of a model in its repository; its local directory may hold fewer files.

    ``directories`` are all of its directories; ``artefacts`` are the names in the alphabetically first version.
    """

    directories: tuple[str, ...]
    artefacts: frozenset[str]
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Located:
    """The location of a model. If ``inventory`` is None, the directory is complete. ``copy`` keeps a copy in use."""

    directory: Path
    inventory: Inventory | None = None
    copy: object = None


CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True)
class ModelFiles:
    """The contents of a model directory.

    ``config`` is the configuration as written (empty without a file) and ``config_path`` its file. ``versions`` are
    all version directories, ascending; 1 for a remote model without any. ``artefacts`` are the names in the
    alphabetically first version. ``warnings`` are lines for the log. ``backend_directory`` is the directory of the
    Python-based backend that runs the model, None for any other backend. ``namespace`` is the model's repository,
    where names may be ambiguous. ``fingerprint`` is not newer than what was read; None if it cannot be taken, and for
    files from a client. ``copy`` keeps the copy of files from a store in use; callers must hold a reference to it while
    they use the files.
    """

    name: str
    directory: Path
    config: ModelConfig
    config_path: Path | None = None
    config_text: str = ""
    versions: tuple[int, ...] = ()
    artefacts: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()
    backend_directory: Path | None = None
    namespace: str = ""
    fingerprint: Fingerprint | None = None
    copy: object = None

    @property
    def key(self) -> str:
        """The model's key inside the server."""
        return qualified(self.namespace, self.name)

    def version_directory(self, version: int) -> Path:
        return self.directory / str(version)

    def check_configured(self) -> None:
        """Raise INTERNAL for a model without a configuration."""
        if self.config_path is None and self.config == ModelConfig():
            path = self.directory / CONFIG_FILE
            raise internal(f"failed to open text file for read {path}: No such file or directory")

    def completed(self, gpus: Sequence[int], written: ModelConfig | None = None) -> ModelConfig:
        """Return the configuration, or ``written``, with defaults filled in; raises as ``config.complete`` does."""
        python_based = self.backend_directory is not None
        config = self.config if written is None else written
        return complete(config, self.name, self.artefacts, gpus=gpus, python_based=python_based)

    def backend_environment(self) -> str:
        """Return the archive with the environment of the model's Python-based backend; empty if it has none."""
        archive = self.backend_directory and self.backend_directory / ENVIRONMENT_ARCHIVE
        return str(archive) if archive is not None and archive.exists() else ""

    def labels(self) -> dict[str, list[str]]:
        """Read the labels of each output with a label file, one label per line.

        Raises INTERNAL for an unreadable file, INVALID_ARG for a file outside the model directory.
        """
        return {
            output.name: read_labels(self.directory, output.label_filename)
            for output in self.config.output
            if output.label_filename
        }


def describe(
    name: str,
    directory: Path,
    config_name: str | None = None,
    override: ModelConfig | None = None,
    backends: BackendDirectories = DEFAULT_BACKEND_DIRECTORIES,
    namespace: str = "",
    located: Located | None = None,
    fingerprint: Fingerprint | None = None,
) -> ModelFiles:
    """Read ``directory`` as the model ``name``; ``override`` replaces the configuration file.

    ``located`` gives the full contents of the model if ``directory`` holds only some of its files; otherwise the caller
    may have taken the ``fingerprint`` of the directory.
    """
    inventory = located.inventory if located is not None else None
    try:
        path = None if override is not None else config_path(directory, config_name)
        text = read_config(path) if path else ""
        config = pbtxt.parse(text, str(path)) if path else override or ModelConfig()
        versions = read_versions(inventory.directories if inventory is not None else directories_in(directory))
        artefacts = inventory.artefacts if inventory is not None else _artefacts(directory, versions.found)
        return ModelFiles(
            name=name,
            directory=directory,
            config=config,
            config_path=path,
            config_text=text,
            versions=versions.found or ((ONLY_VERSION,) if config.backend == REMOTE else ()),
            artefacts=artefacts,
            warnings=versions.warnings,
            backend_directory=backends.directory_of(config, name, artefacts),
            namespace=namespace,
            fingerprint=inventory.fingerprint if inventory is not None else fingerprint,
            copy=located.copy if located is not None else None,
        )
    except ConchError as error:
        raise PollError.of(name, error) from error
    except OSError as error:
        raise PollError(name, f"Poll failed for model directory '{name}': {error}") from error


def config_path(directory: Path, config_name: str | None) -> Path | None:
    """Return the path of the configuration file, or None if the model has none."""
    named = [directory / "configs" / f"{config_name}.pbtxt"] if config_name else []
    return next((path for path in [*named, directory / CONFIG_FILE] if path.is_file()), None)


def read_config(path: Path) -> str:
    """Read a configuration file; raises :class:`ConfigError` if it is not UTF-8."""
    try:
        return read_small(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"failed to read text proto from {path}: not UTF-8 at byte {error.start}", path=str(path)
        ) from error


def read_labels(directory: Path, filename: str) -> list[str]:
    """Read the lines of a label file of the model in ``directory``."""
    path = (directory / filename).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise invalid(f"label file '{filename}' must be inside the model directory")
    try:
        return read_small(path).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise internal(f"failed to read text file {path}: not UTF-8 at byte {error.start}") from error
    except OSError as error:
        reason = error.strerror or error
        raise internal(f"failed to open text file for read {path}: {reason}") from error


def _artefacts(directory: Path, versions: Sequence[int]) -> frozenset[str]:
    if not versions:
        return frozenset()
    return frozenset(os.listdir(directory / min(map(str, versions))))
