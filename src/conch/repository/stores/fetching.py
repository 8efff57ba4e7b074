"""Decides which files of a model are needed, and has those copied that no copy has yet."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from conch.config import pbtxt
from conch.config.reading import read_small
from conch.config.schema import ModelConfig, is_ensemble
from conch.errors import ConchError, internal
from conch.repository.located import Inventory
from conch.repository.stores.copies import Copy, ModelCopies
from conch.repository.stores.listing import StoredModel
from conch.repository.stores.pool import DaemonPool
from conch.repository.stores.store import RemoteFile, Store
from conch.repository.stores.transfer import Transfer, in_units
from conch.repository.stores.urls import StoreUrl
from conch.repository.versions import read_versions, select_versions

LOG = logging.getLogger("conch")


class Fetcher:
    """Copies models of the repository at ``url`` into ``folder``; with ``whole``, all of their versions."""

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
        """A copy of a model, whether it was made now, and what the model has.  Call while ``copies`` are locked."""
        existing = list(copies.usable())
        config = self._config(model, copies, existing, config_name) if override is None else override
        versions = read_versions(model.directories).found
        directories = list(model.directories)
        if config is not None and is_ensemble(config) and not versions:
            # A store has no empty directories, and the version of an ensemble is one.
            versions, directories = (1,), [*directories, "1"]
        selected = set(versions) if self._whole else set[int]()
        if config is not None and not self._whole:
            selected = set(select_versions(config, versions).versions)
        left_out = {str(version) for version in versions if version not in selected}
        files = [file for file in model.files if file.path.partition("/")[0] not in left_out]
        empty = [file.path.rstrip("/") for file in model.listed if file.path.endswith("/")]
        needed = [one for one in (*directories, *empty) if one.partition("/")[0] not in left_out]
        found = next((one for one in existing if one.has_just(files, needed)), None)
        if found is not None:
            LOG.info("model '%s' of %s has been downloaded before, and has not changed", model.name, self._url)
        copy = found or copies.make(files, needed, partial(self._fill, model, files, existing))
        artefacts = model.names_in(min(map(str, versions))) if versions else frozenset[str]()
        return copy, found is None, Inventory(tuple(directories), artefacts, model.fingerprint(config_name))

    def _config(
        self, model: StoredModel, copies: ModelCopies, existing: list[Copy], config_name: str | None
    ) -> ModelConfig | None:
        """The configuration as it is written; None where it cannot be read, which whoever reads the copy reports."""
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
        """Put files into a directory: those that another copy has are linked, the others are downloaded."""
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
        what = f"model '{model.name}' from {self._url}"
        return Transfer(self._store, self._pool, model.name, what, files, folder, self._pauses)


def _in_copies(copies: list[Copy], file: RemoteFile) -> Path | None:
    return next((path for one in copies if (path := one.file(file)) is not None), None)


def _link(path: Path, target: Path) -> bool:
    """Give a file of another copy a second name; False where the file system has only one for each."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, target)
    except OSError:
        return False
    return True
