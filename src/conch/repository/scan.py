"""Model directories: which there are, and what each holds.

Owned by the server's lifecycle, which calls it in a thread because it reads disks; ``conch check``
uses it too.  Nothing is cached: every call looks again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from conch.config import pbtxt
from conch.config.complete import complete
from conch.config.parameters import nearest
from conch.config.problem import ConfigError
from conch.config.reading import read_small
from conch.config.schema import ModelConfig
from conch.errors import ConchError, internal, invalid
from conch.repository.backends import ENVIRONMENT_ARCHIVE, USUAL_PLACES, BackendPlaces
from conch.repository.errors import NotFoundError, NotUniqueError, PollError
from conch.repository.fingerprint import Fingerprint, take_fingerprint
from conch.repository.listing import directories_in, is_directory
from conch.repository.names import is_directory_name, is_utf8
from conch.repository.naming import Naming, qualified
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
    alphabetically first of them; ``warnings`` are lines for the log.  ``backend_directory`` is that of the Python-based
    backend that runs the model, None for any other; ``namespace`` its repository, where names may be ambiguous.
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

    @property
    def key(self) -> str:
        """What the server knows the model by."""
        return qualified(self.namespace, self.name)

    def version_directory(self, version: int) -> Path:
        return self.directory / str(version)

    def completed(self, gpus: Sequence[int], written: ModelConfig | None = None) -> ModelConfig:
        """The configuration with what was left out, or another one, ``written``; raises as ``config.complete`` does."""
        python_based = self.backend_directory is not None
        config = self.config if written is None else written
        return complete(config, self.name, self.artefacts, gpus=gpus, python_based=python_based)

    def backend_environment(self) -> str:
        """The archive with the environment of the model's Python-based backend, empty where there is none."""
        archive = self.backend_directory and self.backend_directory / ENVIRONMENT_ARCHIVE
        return str(archive) if archive is not None and archive.exists() else ""

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

    ``config_name`` picks ``configs/<config_name>.pbtxt`` over ``config.pbtxt`` where a model has it.  ``backends``
    says where Python-based backends are.  ``given`` are the directories of models elsewhere, by name; who adds one
    there takes it away again.  With ``namespacing``, models in several repositories may have one name, and ``naming``
    makes the keys by which they are known: wherever a ``name`` is wanted here, it is a key.
    """

    paths: Sequence[Path]
    config_name: str | None = None
    backends: BackendPlaces = USUAL_PLACES
    namespacing: bool = False
    naming: Naming = field(init=False, repr=False, compare=False, default_factory=Naming)
    given: dict[str, Path] = field(init=False, repr=False, compare=False, default_factory=dict)
    _roots: list[Path] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        for path in self.paths:
            problem = repository_problem(path)
            if problem is not None:
                raise invalid(f"{problem.message} ({problem.hint})")
            if path.resolve() not in self._roots:
                self._roots.append(path.resolve())
        if self.namespacing:
            object.__setattr__(self, "naming", Naming(self._roots))

    def names(self) -> list[str]:
        """Every model directory's name once, in order; also those that two repositories have.

        With namespacing, by repository and then by name.
        """
        if self.namespacing:
            found = [(root, name) for root in self._roots for name in sorted(directories_in(root)) if is_utf8(name)]
            return [*(qualified(str(root), name) for root, name in found), *sorted(self.given)]
        return sorted({*self.given, *(name for root in self._roots for name in directories_in(root) if is_utf8(name))})

    def unnameable(self) -> list[Path]:
        """The directories whose names are no UTF-8, under which no client could ask for a model; they are left out."""
        return [root / name for root in self._roots for name in directories_in(root) if not is_utf8(name)]

    def directory(self, name: str) -> Path:
        """The one directory of ``name``.

        Raises :class:`PollError` when there is none or more than one; a name that is no directory name is not there.
        """
        namespace, plain = self.naming.namespace(name), self.naming.name(name)
        roots = [root for root in self._roots if not self.namespacing or str(root) == namespace]
        found = [root / plain for root in roots if is_directory_name(plain) and is_directory(root / plain)]
        if name in self.given:
            found.append(self.given[name])
        if not found:
            raise NotFoundError(name)
        if len(found) > 1:
            raise NotUniqueError(name)
        return found[0]

    def keys(self, name: str) -> list[str]:
        """The keys of the models of a name, whose directories are there."""
        found = []
        for key in self.naming.keys(name):
            with suppress(PollError):
                self.directory(key)
                found.append(key)
        return found

    def keys_of(self, names: Iterable[str]) -> list[str]:
        """The keys of the models of several names; a name is its own where there is no directory."""
        return [key for name in names for key in self.keys(name) or [name]]

    def members(self, config: ModelConfig, ensemble: str) -> dict[str, str]:
        """The keys of the models that the steps of an ensemble name, by name: those of its own repository first.

        What is nowhere, or in several others, has a key that no model has.
        """
        if not self.namespacing:
            return {step.model_name: step.model_name for step in config.ensemble_scheduling.step}
        own = self.naming.namespace(ensemble)
        members = {}
        for step in config.ensemble_scheduling.step:
            keys, at_home = self.keys(step.model_name), qualified(own, step.model_name)
            named = qualified(step.model_namespace, step.model_name)
            chosen = next((key for key in (at_home, named) if key in keys), None)
            members[step.model_name] = chosen or (keys[0] if len(keys) == 1 else at_home)
        return members

    def no_such_model(self, name: str) -> str:
        """The words that say where there is no ``name``, and which model was probably meant or which there are."""
        names = [self.naming.name(key) for key in self.names()]
        near = nearest(name, names, 0.6)
        others = f"; its models are {', '.join(names[:_NAMED])}{' …' if len(names) > _NAMED else ''}" if names else ""
        hint = f"; did you mean '{near}'?" if near else others
        return f"there is no model '{name}' in {', '.join(map(str, self.paths))}{hint}"

    def describe(self, name: str) -> ModelFiles:
        """What the directory of ``name`` holds.  Raises as :meth:`directory` does, and :class:`PollError` for a
        configuration that cannot be read."""
        naming, directory = self.naming, self.directory(name)
        return describe(
            naming.name(name), directory, self.config_name, backends=self.backends, namespace=naming.namespace(name)
        )

    def fingerprint(self, name: str) -> Fingerprint:
        """Times and sizes of the files of ``name``; equal as long as nothing was changed."""
        return take_fingerprint(self.directory(name), self.config_name)


def describe(
    name: str,
    directory: Path,
    config_name: str | None = None,
    override: ModelConfig | None = None,
    backends: BackendPlaces = USUAL_PLACES,
    namespace: str = "",
) -> ModelFiles:
    """What ``directory`` holds for the model ``name``; ``override`` stands in for the configuration's file."""
    try:
        path = None if override is not None else config_path(directory, config_name)
        text = read_config(path) if path else ""
        config = pbtxt.parse(text, str(path)) if path else override or ModelConfig()
        versions = read_versions(directories_in(directory))
        artefacts = _artefacts(directory, versions.found)
        return ModelFiles(
            name=name,
            directory=directory,
            config=config,
            config_path=path,
            config_text=text,
            versions=versions.found,
            artefacts=artefacts,
            warnings=versions.warnings,
            backend_directory=backends.directory_of(config, name, artefacts),
            namespace=namespace,
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
