"""A repository in a store: names and fingerprints come from listings, and models are copied when needed.

A listing determines which models exist, their files and versions, and whether they are valid. Methods block, and any
thread may call them. If the store cannot be read, loaded models continue to serve, and the last listing applies.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Final

from conch.config import pbtxt
from conch.config.reading import read_small
from conch.config.schema import ModelConfig, is_ensemble
from conch.core.errors import ConchError, internal, invalid, one_line, unavailable
from conch.repository.errors import NotFoundError
from conch.repository.fingerprint import Fingerprint, counts, fingerprint_of
from conch.repository.model_files import Inventory, Located
from conch.repository.names import is_directory_name, is_utf8
from conch.repository.stores.copies import PAUSES, Copy, ModelCopies, Transfer, in_units, tidy
from conch.repository.stores.pool import DaemonPool, SharedCalls
from conch.repository.stores.store import RemoteFile, Store
from conch.repository.stores.urls import StoreUrl
from conch.repository.versions import read_versions, select_versions

_WEIGHTS = (".safetensors", ".gguf", ".onnx")


@dataclass(frozen=True)
class StoredModel:
    """The files of one model, with paths relative to its directory; paths that end with a slash are directories."""

    name: str
    listed: tuple[RemoteFile, ...]

    @property
    def files(self) -> list[RemoteFile]:
        return [file for file in self.listed if not file.path.endswith("/")]

    @cached_property
    def directories(self) -> list[str]:
        """The directories in the model's directory, without hidden ones."""
        names = {file.path.partition("/")[0] for file in self.listed if "/" in file.path}
        return sorted(name for name in names if is_directory_name(name))

    def names_in(self, directory: str) -> frozenset[str]:
        """Return the names of the entries in a directory of the model."""
        inside = (
            file.path.removeprefix(f"{directory}/") for file in self.listed if file.path.startswith(f"{directory}/")
        )
        return frozenset(path.partition("/")[0] for path in inside if path)

    def find(self, path: str) -> RemoteFile | None:
        return next((file for file in self.listed if file.path == path), None)

    def fingerprint(self, config_name: str | None) -> Fingerprint:
        """Return a fingerprint that changes whenever the files change."""
        stamps = ((file.path, _number(file.identity), file.size) for file in self.files if counts(file.path))
        return fingerprint_of(stamps, self.directories, config_name)


def models_in(files: Iterable[RemoteFile]) -> dict[str, StoredModel]:
    """Return the models in a listing, by name."""
    files_of: dict[str, list[RemoteFile]] = {}
    for file in files:
        name, inside, path = file.path.partition("/")
        if inside and is_directory_name(name):
            files_of.setdefault(name, []).append(replace(file, path=path) if path else replace(file, path="./"))
    return {
        name: StoredModel(name, tuple(file for file in files_of[name] if file.path != "./"))
        for name in sorted(files_of)
    }


def check_repository(url: StoreUrl, files: Sequence[RemoteFile], models: Mapping[str, StoredModel]) -> None:
    """Raise INVALID_ARG, with a hint that suggests the right URL, if a listing is not a model repository."""
    if not files:
        raise empty_repository_error(url)
    if any(_is_model(model) for model in models.values()):
        return
    loose = {file.path for file in files if "/" not in file.path}
    if "config.pbtxt" in loose or (models and all(name.isdigit() for name in models)):
        raise invalid(
            f"model repository {url} is a model, not a repository of models: use {url.text.rpartition('/')[0]}"
        )
    if loose & {"config.json", "modules.json"} or any(name.endswith(_WEIGHTS) for name in loose):
        whole = url.scheme == "hf" and not url.prefix
        revision = f" --revision={url.revision}" if url.revision else ""
        hint = f"serve it with 'conch serve {url.bucket}{revision}'" if whole else "use a directory of models"
        raise invalid(f"model repository {url} is a checkpoint, not a repository of models: {hint}")
    for name, model in models.items():
        if any(_is_model(stored) for stored in models_in(model.listed).values()):
            raise invalid(
                f"model repository {url} is not a repository of models, but {name} in it is: use {url}/{name}"
            )


def empty_repository_error(url: StoreUrl) -> ConchError:
    """Return the error for a repository without files; stores do not distinguish it from a missing repository."""
    return invalid(f"model repository {url} does not exist: the store has no files there")


def _is_model(model: StoredModel) -> bool:
    return model.find("config.pbtxt") is not None or any(name.isdigit() for name in model.directories)


def _number(identity: str) -> int:
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "big")


LOG = logging.getLogger("conch")

#: Limits of file systems (bytes).
_LONGEST_NAME: Final = 255
_LONGEST_PATH: Final = 1024
#: Maximum number of invalid names that are logged one by one.
_NAMED: Final = 5


def usable(files: Iterable[RemoteFile]) -> tuple[list[RemoteFile], list[str]]:
    """Return the files with valid local names, sorted, and an error text for each other file."""
    good: dict[str, RemoteFile] = {}
    refused: list[str] = []
    directories: set[str] = set()
    for file in sorted(files):
        problem = _problem(file.path)
        if problem:
            refused.append(f"{file.path!r:.200} {problem}")
            continue
        good[file.path] = file
        parts = file.path.rstrip("/").split("/")
        directories.update("/".join(parts[:count]) for count in range(1, len(parts)))
    both = [good.pop(path) for path in sorted(directories & good.keys())]
    # Some tools mark directories by empty objects with the directory's name.
    refused += [f"{file.path!r:.200} is also the name of a directory" for file in both if file.size]
    return list(good.values()), refused


def warn(repository: object, refused: Iterable[str], known: set[str]) -> None:
    """Log each new error text once; ``known`` contains those already logged and is updated."""
    new = [problem for problem in refused if problem not in known]
    known.update(new)
    for problem in new[:_NAMED]:
        LOG.warning("model repository %s: %s, and is skipped", repository, problem)
    if len(new) > _NAMED:
        LOG.warning("model repository %s: %d more such names are skipped", repository, len(new) - _NAMED)


def _problem(path: str) -> str:
    """Return the error text for an invalid file name; empty if the path is valid."""
    parts = path.removesuffix("/").split("/")
    if not all(parts):
        return "has an empty name between slashes"
    if any(part in (".", "..") for part in parts):
        return "contains '.' or '..'"
    if "\\" in path or not path.isprintable() or not is_utf8(path):
        return "has a character that is not allowed in file names"
    if len(path.encode()) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in parts):
        return "is too long for a file's name"
    return ""


#: Opens a repository with the credentials of an environment.
Open = Callable[[StoreUrl, Mapping[str, str]], Store]

_MODULES: Final = {
    "s3": ("conch.repository.stores.filesystem", "open_s3"),
    "gs": ("conch.repository.stores.filesystem", "open_gs"),
    "as": ("conch.repository.stores.filesystem", "open_azure"),
    "hf": ("conch.repository.stores.hub", "open_hub"),
}


def open_store(url: StoreUrl, environment: Mapping[str, str] = os.environ) -> Store:
    """Open the store at ``url``. Raises UNSUPPORTED without the extra, INVALID_ARG for unusable credentials."""
    module, function = _MODULES[url.scheme]
    opener: Open = getattr(import_module(module), function)
    return opener(url, environment)


class Fetcher:
    """Copies models of the repository at ``url`` to ``folder``; with ``whole``, all of their versions."""

    def __init__(
        self,
        url: StoreUrl,
        folder: Path,
        store: Store,
        pool: DaemonPool,
        pauses: tuple[float, ...],
        *,
        whole: bool = False,
    ) -> None:
        self._url = url
        self._folder = folder
        self._store = store
        self._pool = pool
        self._pauses = pauses
        self._whole = whole

    def copy(
        self, model: StoredModel, copies: ModelCopies, config_name: str | None, override: ModelConfig | None
    ) -> tuple[Copy, bool, Inventory]:
        """Return a copy of a model, whether it is new, and the model's inventory. Call while ``copies`` are locked."""
        existing = list(copies.usable())
        config = self._config(model, copies, existing, config_name) if override is None else override
        versions = read_versions(model.directories).found
        directories = list(model.directories)
        if config is not None and is_ensemble(config) and not versions:
            # Stores have no empty directories, but an ensemble's version is an empty directory.
            versions, directories = (1,), [*directories, "1"]
        selected = set(versions) if self._whole else set[int]()
        if config is not None and not self._whole:
            selected = set(select_versions(config, versions).versions)
        left_out = {str(version) for version in versions if version not in selected}
        files = [file for file in model.files if file.path.partition("/")[0] not in left_out]
        empty = [file.path.rstrip("/") for file in model.listed if file.path.endswith("/")]
        needed = [directory for directory in (*directories, *empty) if directory.partition("/")[0] not in left_out]
        existing_copy = next((candidate for candidate in existing if candidate.has_just(files, needed)), None)
        if existing_copy is not None:
            LOG.info("model '%s' of %s is unchanged since its last download", model.name, self._url)
        copy = existing_copy or copies.make(files, needed, partial(self._fill, model, files, existing))
        artefacts = model.names_in(min(map(str, versions))) if versions else frozenset[str]()
        return copy, existing_copy is None, Inventory(tuple(directories), artefacts, model.fingerprint(config_name))

    def _config(
        self, model: StoredModel, copies: ModelCopies, existing: list[Copy], config_name: str | None
    ) -> ModelConfig | None:
        """Return the configuration as written, or None if it is unreadable; reading the copy reports the error."""
        named = [f"configs/{config_name}.pbtxt"] if config_name else []
        file = next(filter(None, map(model.find, [*named, "config.pbtxt"])), None)
        if file is None:
            return ModelConfig()
        path = _in_copies(existing, file)
        if path is None:
            transfer = self._transfer(model, [file], copies.scratch())
            path = self._pool.run(partial(transfer.fetch, file))
        with suppress(ConchError, OSError, UnicodeDecodeError):
            return pbtxt.parse(read_small(path).decode("utf-8"), str(path))
        return None

    def _fill(self, model: StoredModel, files: list[RemoteFile], existing: list[Copy], directory: Path) -> None:
        """Fill a directory: link files that another copy has, and download the others."""
        missing = []
        for file in files:
            path = _in_copies(existing, file)
            if path is None or not _link(path, directory / file.path):
                missing.append(file)
        if not missing:
            return
        needed, free = sum(file.size for file in missing), shutil.disk_usage(directory).free
        if needed > free:
            raise internal(
                f"{self._url}/{model.name} needs {in_units(needed)} in {self._folder}, where {in_units(free)} are free"
            )
        self._transfer(model, missing, directory).run()

    def _transfer(self, model: StoredModel, files: list[RemoteFile], folder: Path) -> Transfer:
        description = f"model '{model.name}' from {self._url}"
        return Transfer(self._store, self._pool, model.name, description, files, folder, self._pauses)


def _in_copies(copies: list[Copy], file: RemoteFile) -> Path | None:
    return next((path for copy in copies if (path := copy.file(file)) is not None), None)


def _link(path: Path, target: Path) -> bool:
    """Hard-link a file of another copy; returns False if the file system does not support it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, target)
    except OSError:
        return False
    return True


#: The maximum number of concurrent downloads, for all models of a repository.
_PARALLEL: Final = 4
#: Delay before a failed store is contacted again (s); the last listing is used until then.
_RETRY_SECONDS: Final = 15.0
#: The timeout of a listing (s).
_LISTING_SECONDS: Final = 30.0
#: The maximum number of attempts to copy a model that changes while it is copied.
_ATTEMPTS: Final = 3


class StoreRoot:
    """The repository at ``url``, with copies of its models in ``cache``.

    With ``whole``, a copy contains all versions of a model instead of only the versions that its policy selects.
    """

    def __init__(
        self,
        url: StoreUrl,
        cache: Path,
        *,
        whole: bool = False,
        opener: Callable[[StoreUrl], Store] = open_store,
        pauses: tuple[float, ...] = PAUSES,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.url = url
        self.folder = cache / _folder_name(url)
        self._whole = whole
        self._opener = opener
        self._pauses = pauses
        self._clock = clock
        self._store: Store | None = None
        self._lock = threading.Lock()
        #: The timeout of a listing (s).
        self.timeout = _LISTING_SECONDS
        self._lookups = DaemonPool("listing", 4)
        self._listings = SharedCalls(self._lookups)
        self._transfers = DaemonPool("download", _PARALLEL)
        self._models: dict[str, StoredModel] | None = None
        self._unreadable, self._failed = "", 0.0
        #: The time of the last listing timeout.
        self._hung = float("-inf")
        self._warned: set[str] = set()

    def __str__(self) -> str:
        return str(self.url)

    def names(self) -> list[str]:
        """Return the sorted names of the models.

        For ``_RETRY_SECONDS`` seconds after the store failed, uses the last listing.
        """
        if self._models is not None and self._unreadable and self._clock() - self._failed < _RETRY_SECONDS:
            return self.known()
        return list(self._refresh())

    def known(self) -> list[str]:
        """Return the names in the last listing, without contacting the store."""
        return list(self._models or {})

    def fingerprints(self, config_name: str | None) -> dict[str, Fingerprint | None]:
        """Return the fingerprint of each model."""
        return {name: model.fingerprint(config_name) for name, model in self._refresh().items()}

    def fingerprint(self, name: str, config_name: str | None) -> Fingerprint:
        """Return the fingerprint of a model. Raises UNAVAILABLE or INVALID_ARG if it cannot be read."""
        return self._model(name).fingerprint(config_name)

    def has(self, name: str) -> bool:
        """Return whether the model exists, or did at the last listing if the store cannot be read."""
        if self._models is not None and self._clock() - self._hung < _RETRY_SECONDS:
            return name in self._models
        try:
            self._model(name)
        except NotFoundError:
            return False
        except ConchError as error:
            if self._models is None:
                raise
            self._warn(error)
            return name in self._models
        return True

    def shown(self, text: str) -> str:
        """Replace the paths of copies in ``text`` with the URLs of their models."""
        pattern = re.escape(str(self.folder)) + r"/([^/]+)/(?:\d+|new)/\1(?=/|\b)"
        return re.sub(pattern, lambda match: f"{self.url}/{match[1]}", text)

    def _refresh(self) -> dict[str, StoredModel]:
        """List the repository; returns the last listing if that fails, and raises without one."""
        try:
            files = self._list("")
            models = models_in(files)
            if self._models is None:
                check_repository(self.url, files, models)
            elif not files:
                raise empty_repository_error(self.url)
        except ConchError as error:
            if self._models is None:
                raise
            self._warn(error)
            return self._models
        if self._unreadable:
            LOG.info("model repository %s can be read again", self.url)
        self._unreadable = ""
        first, self._models = self._models is None, models
        if first:
            self._tidy()
        return models

    def _warn(self, error: ConchError) -> None:
        """Log that the repository cannot be read, once for each reason until it is readable again."""
        if error.message != self._unreadable and not self._lookups.closed.is_set():
            LOG.warning("%s; models continue to serve", error.message)
        self._unreadable, self._failed = error.message, self._clock()

    def _model(self, name: str) -> StoredModel:
        stored = models_in(self._list(name)).get(name)
        if stored is None:
            raise NotFoundError(name)
        return stored

    def _list(self, below: str) -> list[RemoteFile]:
        """List the files below a directory of the repository, with paths relative to the repository."""
        listing = self._listings.submit(below, partial(self._find, below))
        try:
            listed = listing.result(self.timeout)
        except TimeoutError:
            self._hung = self._clock()
            raise unavailable(
                f"model repository {self.url} cannot be read: it has not responded within {self.timeout:g} s"
            ) from None
        files, refused = usable(listed)
        warn(self.url, refused, self._warned)
        return files

    def _find(self, below: str) -> list[RemoteFile]:
        store = self._opened()
        try:
            return store.find(below)
        except Exception as error:
            raise store.explain(error) from error

    def _opened(self) -> Store:
        with self._lock:
            if self._store is None:
                try:
                    self._store = self._opener(self.url)
                except ConchError:
                    raise
                except Exception as error:  # an error of any library; its text may contain a secret
                    raise unavailable(f"model repository {self.url} cannot be opened: {type(error).__name__}") from None
            return self._store

    def locate(self, name: str, config_name: str | None, override: ModelConfig | None) -> Located:
        """Return a copy of a model with the versions that ``override`` or its configuration selects.

        Makes the copy if necessary. Raises NotFoundError, UNAVAILABLE or INVALID_ARG if the model cannot be read, and
        INTERNAL if the copy cannot be written.
        """
        copies = ModelCopies(self.folder / name, self._transfers.closed)
        model = self._model(name)
        fetcher = Fetcher(self.url, self.folder, self._opened(), self._transfers, self._pauses, whole=self._whole)
        try:
            for _ in range(_ATTEMPTS):
                with copies.locked():
                    copy, is_new, inventory = fetcher.copy(model, copies, config_name, override)
                    if not is_new or self._model(name) == model:
                        copies.prefer(copy)
                        return Located(copy.directory, inventory, copy)
                    copies.discard(copy)
                LOG.warning("model '%s' of %s has changed while it was downloaded", name, self.url)
                model = self._model(name)
        except OSError as error:
            raise internal(f"no copy of {self.url}/{name} can be made in {self.folder}: {one_line(error)}") from error
        raise unavailable(f"{self.url}/{name} changed while it was downloaded, {_ATTEMPTS} times in a row")

    def _tidy(self) -> None:
        with suppress(OSError):
            for folder in self.folder.iterdir():
                tidy(folder, gone=folder.name not in (self._models or {}))

    def close(self) -> None:
        """Abort listings and downloads; copies in use stay."""
        self._lookups.close()
        self._transfers.close()


def _folder_name(url: StoreUrl) -> str:
    """Return a readable and unique folder name for the copies of a repository."""
    digest = hashlib.blake2b(url.text.encode(), digest_size=6).hexdigest()
    return f"{url.scheme}-{url.bucket.replace('/', '--')[:80]}-{digest}"
