"""Model directories: which there are, and what each holds.

Owned by the server's lifecycle, which calls it in a thread because it reads disks; ``conch check``
uses it too.  Nothing is cached: every call looks again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conch.config import pbtxt
from conch.config.parameters import nearest
from conch.config.problem import ConfigError
from conch.config.reading import read_small
from conch.config.schema import ModelConfig
from conch.errors import ConchError, internal, invalid
from conch.repository.errors import NotFoundError, NotUniqueError, PollError
from conch.repository.fingerprint import Fingerprint, take_fingerprint
from conch.repository.listing import directories_in, is_directory
from conch.repository.names import is_directory_name, is_utf8
from conch.repository.places import repository_problem
from conch.repository.versions import read_versions

CONFIG_FILE = "config.pbtxt"

#: How many models a message lists.
_NAMED = 5


@dataclass(frozen=True)
class ModelFiles:
    """What a model directory holds.

    ``config`` is the configuration as written (empty without a file) and ``config_path`` its
    file; ``versions`` are all version directories, ascending; ``artefacts`` are the names in the
    alphabetically first of them; ``warnings`` are lines for the log.
    """

    name: str
    directory: Path
    config: ModelConfig
    config_path: Path | None = None
    config_text: str = ""
    versions: tuple[int, ...] = ()
    artefacts: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()

    def version_directory(self, version: int) -> Path:
        return self.directory / str(version)

    def labels(self) -> dict[str, list[str]]:
        """Read the labels of each output that names a label file, one a line.

        Raises INTERNAL for a file that cannot be read, INVALID_ARG for one outside the directory.
        """
        return {
            output.name: read_labels(self.directory, output.label_filename)
            for output in self.config.output
            if output.label_filename
        }


@dataclass(frozen=True)
class ModelRepository:
    """One or several repository directories, seen as one.

    ``config_name`` picks ``configs/<config_name>.pbtxt`` over ``config.pbtxt`` where a model has it.
    """

    paths: Sequence[Path]
    config_name: str | None = None
    _roots: list[Path] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        for path in self.paths:
            problem = repository_problem(path)
            if problem is not None:
                raise invalid(f"{problem.message} ({problem.hint})")
            if path.resolve() not in self._roots:
                self._roots.append(path.resolve())

    def names(self) -> list[str]:
        """Every model directory's name once, in order; also those that two repositories have."""
        return sorted({name for root in self._roots for name in directories_in(root) if is_utf8(name)})

    def unnameable(self) -> list[Path]:
        """The directories whose names are no UTF-8, under which no client could ask for a model; they are left out."""
        return [root / name for root in self._roots for name in directories_in(root) if not is_utf8(name)]

    def directory(self, name: str) -> Path:
        """The one directory of ``name``.

        Raises :class:`PollError` when there is none or more than one; a name that is no directory name is not there.
        """
        found = [root / name for root in self._roots if is_directory_name(name) and is_directory(root / name)]
        if not found:
            raise NotFoundError(name)
        if len(found) > 1:
            raise NotUniqueError(name)
        return found[0]

    def no_such_model(self, name: str) -> str:
        """The words that say where there is no ``name``, and which model was probably meant or which there are."""
        names = self.names()
        near = nearest(name, names, 0.6)
        others = f"; its models are {', '.join(names[:_NAMED])}{' …' if len(names) > _NAMED else ''}" if names else ""
        hint = f"; did you mean '{near}'?" if near else others
        return f"there is no model '{name}' in {', '.join(map(str, self.paths))}{hint}"

    def describe(self, name: str) -> ModelFiles:
        """What the directory of ``name`` holds.  Raises as :meth:`directory` does, and :class:`PollError` for a
        configuration that cannot be read."""
        return describe(name, self.directory(name), self.config_name)

    def fingerprint(self, name: str) -> Fingerprint:
        """Times and sizes of the files of ``name``; equal as long as nothing was changed."""
        return take_fingerprint(self.directory(name), self.config_name)


def describe(
    name: str, directory: Path, config_name: str | None = None, override: ModelConfig | None = None
) -> ModelFiles:
    """What ``directory`` holds for the model ``name``; ``override`` stands in for the configuration's file."""
    try:
        path = None if override is not None else config_path(directory, config_name)
        text = read_config(path) if path else ""
        config = pbtxt.parse(text, str(path)) if path else override or ModelConfig()
        versions = read_versions(directories_in(directory))
        return ModelFiles(
            name=name,
            directory=directory,
            config=config,
            config_path=path,
            config_text=text,
            versions=versions.found,
            artefacts=_artefacts(directory, versions.found),
            warnings=versions.warnings,
        )
    except ConchError as error:
        raise PollError.of(name, error) from error
    except OSError as error:
        raise PollError(name, f"Poll failed for model directory '{name}': {error}") from error


def config_path(directory: Path, config_name: str | None) -> Path | None:
    """The configuration's file, or None where the model has none."""
    named = [directory / "configs" / f"{config_name}.pbtxt"] if config_name else []
    return next((path for path in [*named, directory / CONFIG_FILE] if path.is_file()), None)


def read_config(path: Path) -> str:
    """The text of a configuration file; :class:`ConfigError` when it cannot be read as UTF-8."""
    try:
        return read_small(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"failed to read text proto from {path}: not UTF-8 at byte {error.start}", path=str(path)
        ) from error


def read_labels(directory: Path, filename: str) -> list[str]:
    """The lines of a label file of the model in ``directory``."""
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
