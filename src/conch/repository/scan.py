"""Model directories: which there are, and what each holds.

Owned by the server's lifecycle, which calls it in a thread because it reads disks; ``conch check``
uses it too.  Nothing is cached: every call looks again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from conch.config import pbtxt
from conch.config.complete import complete
from conch.config.parameters import nearest
from conch.config.problem import ConfigError
from conch.config.reading import read_small
from conch.config.remote import ONLY_VERSION, REMOTE
from conch.config.schema import ModelConfig
from conch.errors import ConchError, internal, invalid
from conch.repository.backends import ENVIRONMENT_ARCHIVE, USUAL_PLACES, BackendPlaces
from conch.repository.errors import NotFoundError, NotUniqueError, PollError
from conch.repository.fingerprint import Fingerprint, take_fingerprint
from conch.repository.listing import directories_in
from conch.repository.located import Located
from conch.repository.names import is_directory_name
from conch.repository.naming import Naming, qualified
from conch.repository.roots import DirectoryRoot, Place, Root, root_of
from conch.repository.stores.pool import DaemonPool
from conch.repository.stores.root import StoreRoot
from conch.repository.versions import read_versions

CONFIG_FILE = "config.pbtxt"

#: How many models a message lists.
_NAMED = 5

LOG = logging.getLogger("conch")

#: How many models are downloaded at the same time; each has several files at a time.
_DOWNLOADED = 4


@dataclass(frozen=True)
class ModelFiles:
    """What a model directory holds.

    ``config`` is the configuration as written (empty without a file) and ``config_path`` its
    file; ``versions`` are all version directories, ascending, and 1 for a remote model without any; ``artefacts`` are
    the names in the alphabetically first of them; ``warnings`` are lines for the log.  ``backend_directory`` is that of
    the Python-based backend that runs the model, None for any other; ``namespace`` its repository, where names may be
    ambiguous.  ``fingerprint`` is known of what was read from a listing; ``copy`` keeps a copy of what a store has:
    whoever uses the files refers to them.
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


class ModelRepository:
    """One or several places with models, seen as one: directories, and repositories in object stores.

    ``config_name`` picks ``configs/<config_name>.pbtxt`` over ``config.pbtxt`` where a model has it.  ``backends``
    says where Python-based backends are.  ``given`` are the directories of models elsewhere, by name; who adds one
    there takes it away again.  With ``namespacing``, models in several places may have one name, and ``naming``
    makes the keys by which they are known: wherever a ``name`` is wanted here, it is a key.

    Copies of models in stores are made in ``cache``, or where it is empty in the user's cache; with ``whole`` they have
    all versions.  Raises INVALID_ARG for a directory that is no repository; stores are asked when they are looked at.
    """

    def __init__(
        self,
        paths: Sequence[Place],
        config_name: str | None = None,
        backends: BackendPlaces = USUAL_PLACES,
        *,
        namespacing: bool = False,
        cache: str = "",
        whole: bool = False,
    ) -> None:
        self.paths = paths
        self.config_name = config_name
        self.backends = backends
        self.namespacing = namespacing
        self.given: dict[str, Path] = {}
        roots = [root_of(place, cache, whole=whole) for place in paths]
        self.roots: Sequence[Root] = list({str(root): root for root in roots}.values())
        self.naming = Naming([str(root) for root in self.roots] if namespacing else [])
        stores = any(isinstance(root, StoreRoot) for root in self.roots)
        self._threads = DaemonPool("model", _DOWNLOADED) if stores else None

    def open(self) -> None:
        """Look at every place for the first time; raises UNAVAILABLE or INVALID_ARG for a store that cannot be read."""
        for root in self.roots:
            if isinstance(root, StoreRoot):
                LOG.info("reading model repository %s; copies of its models are in %s", root, root.folder)
                root.names()

    def names(self) -> list[str]:
        """Every model's name once, in order; also those that two places have.

        With namespacing, by place and then by name.  Of a store that cannot be read, they are those of the last look;
        raises UNAVAILABLE or INVALID_ARG where there has been none.
        """
        if self.namespacing:
            found = [(root, name) for root in self.roots for name in sorted(root.names())]
            return [*(qualified(str(root), name) for root, name in found), *sorted(self.given)]
        return sorted({*self.given, *(name for root in self.roots for name in root.names())})

    def fingerprints(self) -> dict[str, Fingerprint | None]:
        """What changes with the files of each model, by key; None for one that cannot be read, or is not unique."""
        found: dict[str, Fingerprint | None] = {}
        for root in self.roots:
            for name, fingerprint in sorted(root.fingerprints(self.config_name).items()):
                key = qualified(str(root), name) if self.namespacing else name
                found[key] = None if key in found else fingerprint
        for name, directory in self.given.items():
            found[name] = None if name in found else self._fingerprint(directory)
        return found

    def _fingerprint(self, directory: Path) -> Fingerprint | None:
        try:
            return take_fingerprint(directory, self.config_name)
        except OSError:
            return None

    def unnameable(self) -> list[Path]:
        """The directories whose names are no UTF-8, under which no client could ask for a model; they are left out."""
        return [path for root in self.roots if isinstance(root, DirectoryRoot) for path in root.unnameable()]

    def directory(self, name: str) -> Path:
        """The one directory of ``name``; of a model in a store that of a copy, which is made where there is none.

        Raises :class:`PollError` when there is none or more than one; a name that is no directory name is not there.
        """
        return self._located(name).directory

    def check_unique(self, name: str) -> None:
        """Raise as :meth:`directory` does; nothing is copied."""
        self._root(name)

    def _root(self, name: str) -> Root | None:
        """The one place with the model ``name``; None for one that is given."""
        namespace, plain = self.naming.namespace(name), self.naming.name(name)
        roots = [root for root in self.roots if not self.namespacing or str(root) == namespace]
        found: list[Root | None] = [root for root in roots if is_directory_name(plain) and root.has(plain)]
        if name in self.given:
            found.append(None)
        if not found:
            raise NotFoundError(name)
        if len(found) > 1:
            raise NotUniqueError(name)
        return found[0]

    def _located(self, name: str, override: ModelConfig | None = None) -> Located:
        root = self._root(name)
        if root is None:
            return Located(self.given[name])
        return root.locate(self.naming.name(name), self.config_name, override)

    def keys(self, name: str) -> list[str]:
        """The keys of the models of a name, whose directories are there."""
        found = []
        for key in self.naming.keys(name):
            with suppress(PollError):
                self._root(key)
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
        names = sorted({*self.given, *(one for root in self.roots for one in root.known())})
        near = nearest(name, names, 0.6)
        others = f"; its models are {', '.join(names[:_NAMED])}{' …' if len(names) > _NAMED else ''}" if names else ""
        hint = f"; did you mean '{near}'?" if near else others
        return f"there is no model '{name}' in {', '.join(map(str, self.paths))}{hint}"

    def describe(self, name: str, override: ModelConfig | None = None) -> ModelFiles:
        """What the directory of ``name`` holds; ``override`` stands in for the configuration's file.

        Raises as :meth:`directory` does, and :class:`PollError` for a configuration that cannot be read.
        """
        naming = self.naming
        try:
            located = self._located(name, override)
        except PollError:
            raise
        except ConchError as error:
            raise PollError.of(naming.name(name), error, passing=True) from error
        try:
            return describe(
                naming.name(name),
                located.directory,
                self.config_name,
                override,
                backends=self.backends,
                namespace=naming.namespace(name),
                located=located,
            )
        except PollError as error:
            error.log = self.shown(error.log)
            raise

    async def described(self, name: str, override: ModelConfig | None = None) -> ModelFiles:
        """As :meth:`describe`, in a thread: in one of its own where models have to be downloaded, which takes long."""
        if self._threads is None:
            return await asyncio.to_thread(self.describe, name, override)
        return await asyncio.wrap_future(self._threads.submit(partial(self.describe, name, override)))

    def fingerprint(self, name: str) -> Fingerprint:
        """Times and sizes of the files of ``name``; equal as long as nothing was changed."""
        root = self._root(name)
        if root is None:
            return take_fingerprint(self.given[name], self.config_name)
        return root.fingerprint(self.naming.name(name), self.config_name)

    def shown(self, text: str) -> str:
        """A text in which models in stores have their URLs, and not the paths of their copies."""
        for root in self.roots:
            text = root.shown(text)
        return text

    def close(self) -> None:
        """Let those go who wait for stores; models that run keep their files."""
        for root in self.roots:
            root.close()
        if self._threads is not None:
            self._threads.close()


def describe(
    name: str,
    directory: Path,
    config_name: str | None = None,
    override: ModelConfig | None = None,
    backends: BackendPlaces = USUAL_PLACES,
    namespace: str = "",
    located: Located | None = None,
) -> ModelFiles:
    """What ``directory`` holds for the model ``name``; ``override`` stands in for the configuration's file.

    ``located`` says more of a directory that lacks some of what the repository has.
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
            fingerprint=inventory.fingerprint if inventory is not None else None,
            copy=located.copy if located is not None else None,
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
