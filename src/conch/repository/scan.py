"""Finds the models of all repositories and their locations.

The server's lifecycle owns it and calls it in a thread because it reads disks; ``conch check`` uses it too.
Directories are not cached: every call reads them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from conch.config.schema import ModelConfig
from conch.core.errors import ConchError, did_you_mean
from conch.repository.backends import DEFAULT_BACKEND_DIRECTORIES, BackendDirectories
from conch.repository.errors import NotFoundError, NotUniqueError, PollError
from conch.repository.fingerprint import Fingerprint, take_fingerprint
from conch.repository.model_files import Located, ModelFiles, describe
from conch.repository.names import Naming, is_directory_name, qualified
from conch.repository.roots import DirectoryRoot, RepositoryLocation, Root, root_of
from conch.repository.stores.pool import DaemonPool, SharedCalls
from conch.repository.stores.root import StoreRoot

LOG = logging.getLogger("conch")

#: The maximum number of models that a message lists.
_NAMED = 5
#: The maximum number of models that are read concurrently. Each model in a store downloads several files at a time.
_DESCRIBED = 4
#: The maximum number of other concurrent operations on the repository locations.
_LOOKS = 8
#: The timeout of listing the models if an earlier listing exists (s).
LISTING_SECONDS = 5.0

T = TypeVar("T")


class ModelRepository:
    """All repository locations as one repository: directories, and repositories in object stores.

    ``config_name`` selects ``configs/<config_name>.pbtxt`` instead of ``config.pbtxt`` for models that have it.
    ``backends`` are the directories of Python-based backends. ``registered`` maps names to model directories elsewhere;
    the code that adds an entry removes it. With ``namespacing``, models in several locations may have the same name;
    ``naming`` makes their keys, and every parameter ``name`` of this class is a key.

    Models in stores are copied to ``cache``, or to the user's cache if it is empty; with ``whole``, copies contain all
    versions. Raises INVALID_ARG for a directory that is not a repository. Stores are not contacted before first use.
    """

    def __init__(
        self,
        paths: Sequence[RepositoryLocation],
        config_name: str | None = None,
        backends: BackendDirectories = DEFAULT_BACKEND_DIRECTORIES,
        *,
        namespacing: bool = False,
        cache: str = "",
        whole: bool = False,
    ) -> None:
        self.paths = paths
        self.config_name = config_name
        self.backends = backends
        self.namespacing = namespacing
        self.registered: dict[str, Path] = {}
        roots = [root_of(location, cache, whole=whole) for location in paths]
        self.roots: Sequence[Root] = list({str(root): root for root in roots}.values())
        self.naming = Naming([str(root) for root in self.roots] if namespacing else [])
        # These pools share no threads with each other or with other code, because a store or network file system may
        # hang.
        self._descriptions = DaemonPool("model", _DESCRIBED)
        self._shared_descriptions = SharedCalls(self._descriptions)
        self._readers = DaemonPool("repository", _LOOKS)
        self._listings = SharedCalls(self._readers)
        self._listed: list[str] | None = None

    def open(self) -> None:
        """Read every store for the first time; raises UNAVAILABLE or INVALID_ARG for an unreadable store."""
        for root in self.roots:
            if isinstance(root, StoreRoot):
                LOG.info("reading model repository %s; copies of its models are in %s", root, root.folder)
                root.names()

    def names(self) -> list[str]:
        """Return the name of each model once, sorted, including names that are not unique.

        With namespacing, returns keys, sorted by location and then by name. For an unreadable store, uses the names in
        the last listing; raises UNAVAILABLE or INVALID_ARG without one.
        """
        if self.namespacing:
            located = [(root, name) for root in self.roots for name in sorted(root.names())]
            return [*(qualified(str(root), name) for root, name in located), *sorted(self.registered)]
        return sorted({*self.registered, *(name for root in self.roots for name in root.names())})

    def fingerprints(self) -> dict[str, Fingerprint | None]:
        """Return the fingerprint of each model, by key; None for a model that is unreadable or not unique."""
        fingerprints: dict[str, Fingerprint | None] = {}
        for root in self.roots:
            for name, fingerprint in sorted(root.fingerprints(self.config_name).items()):
                key = qualified(str(root), name) if self.namespacing else name
                fingerprints[key] = None if key in fingerprints else fingerprint
        for name, directory in self.registered.items():
            fingerprints[name] = None if name in fingerprints else self._fingerprint(directory)
        return fingerprints

    def _fingerprint(self, directory: Path) -> Fingerprint | None:
        try:
            return take_fingerprint(directory, self.config_name)
        except OSError:
            return None

    def unnameable(self) -> list[Path]:
        """Return the directories with names that are not UTF-8; they are ignored, because no client can name them."""
        return [path for root in self.roots if isinstance(root, DirectoryRoot) for path in root.unnameable()]

    def directory(self, name: str) -> Path:
        """Return the directory of model ``name``; copies a model in a store first, if necessary.

        Raises :class:`PollError` if the model is missing or not unique; an invalid directory name counts as missing.
        """
        return self._located(name).directory

    def check_unique(self, name: str) -> None:
        """Raise as :meth:`directory` does, without copying."""
        self._root(name)

    def _root(self, name: str) -> Root | None:
        """Return the location with the model ``name``; None for a model in ``registered``."""
        namespace, plain = self.naming.namespace(name), self.naming.name(name)
        roots = [root for root in self.roots if not self.namespacing or str(root) == namespace]
        holders: list[Root | None] = [root for root in roots if is_directory_name(plain) and root.has(plain)]
        if name in self.registered:
            holders.append(None)
        if not holders:
            raise NotFoundError(name)
        if len(holders) > 1:
            raise NotUniqueError(name)
        return holders[0]

    def _located(self, name: str, override: ModelConfig | None = None) -> Located:
        root = self._root(name)
        if root is None:
            return Located(self.registered[name])
        return root.locate(self.naming.name(name), self.config_name, override)

    def keys(self, name: str) -> list[str]:
        """Return the keys of the existing models of a name."""
        keys = []
        for key in self.naming.keys(name):
            with suppress(PollError):
                self._root(key)
                keys.append(key)
        return keys

    def keys_of(self, names: Iterable[str]) -> list[str]:
        """Return the keys of the models of several names; a name without a directory is its own key."""
        return [key for name in names for key in self.keys(name) or [name]]

    def step_keys(self, config: ModelConfig, ensemble: str) -> dict[str, str]:
        """Return the keys of an ensemble's steps by model name.

        A model of the ensemble's own repository takes precedence. A step that is missing, or ambiguous among other
        repositories, gets a key that matches no model.
        """
        if not self.namespacing:
            return {step.model_name: step.model_name for step in config.ensemble_scheduling.step}
        own = self.naming.namespace(ensemble)
        step_keys = {}
        for step in config.ensemble_scheduling.step:
            keys, at_home = self.keys(step.model_name), qualified(own, step.model_name)
            named = qualified(step.model_namespace, step.model_name)
            chosen = next((key for key in (at_home, named) if key in keys), None)
            step_keys[step.model_name] = chosen or (keys[0] if len(keys) == 1 else at_home)
        return step_keys

    def no_such_model(self, name: str) -> str:
        """Return an error text for a missing model, with the nearest name or a list of the models."""
        names = sorted({*self.registered, *(model for root in self.roots for model in root.known())})
        others = f"its models are {', '.join(names[:_NAMED])}{' …' if len(names) > _NAMED else ''}" if names else ""
        hint = did_you_mean(name, names, others)
        return f"there is no model '{name}' in {', '.join(map(str, self.paths))}{'; ' + hint if hint else ''}"

    def describe(self, name: str, override: ModelConfig | None = None) -> ModelFiles:
        """Read the directory of ``name``; ``override`` replaces the configuration file.

        Raises as :meth:`directory` does, and :class:`PollError` for an unreadable configuration.
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
                # Before the files are read: a later change must not look like one that has been read.
                fingerprint=self._fingerprint(located.directory) if located.inventory is None else None,
            )
        except PollError as error:
            error.args = (self.shown(error.message),)
            raise

    async def described(self, name: str, override: ModelConfig | None = None) -> ModelFiles:
        """Run :meth:`describe` in a thread, because downloading a model may take long.

        Only one thread at a time reads a given model, so a model with files that hang does not block other models.
        """
        call = partial(self.describe, name, override)
        if override is not None:
            return await _result(self._descriptions.submit(call))
        return await _result(self._shared_descriptions.submit(name, call), shared=True)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run a call that reads the repository in a thread."""
        return await _result(self._readers.submit(call))

    async def listed(self) -> list[str]:
        """Run :meth:`names` once for all concurrent callers.

        Returns the earlier listing, if there is one, after ``LISTING_SECONDS``.
        """
        listing = asyncio.wrap_future(self._listings.submit("", self.names))
        listing.add_done_callback(_retrieve)
        await asyncio.wait([listing], timeout=None if self._listed is None else LISTING_SECONDS)
        if listing.done():
            self._listed = listing.result()
        assert self._listed is not None
        return self._listed

    def fingerprint(self, name: str) -> Fingerprint:
        """Return the times and sizes of the files of ``name``; equal while the files are unchanged."""
        root = self._root(name)
        if root is None:
            return take_fingerprint(self.registered[name], self.config_name)
        return root.fingerprint(self.naming.name(name), self.config_name)

    def shown(self, text: str) -> str:
        """Replace the paths of copies in ``text`` with the URLs of their models."""
        for root in self.roots:
            text = root.shown(text)
        return text

    def close(self) -> None:
        """Abort calls that wait for stores; running models keep their files."""
        for root in self.roots:
            root.close()
        self._descriptions.close()
        self._readers.close()


async def _result(future: Future[T], *, shared: bool = False) -> T:
    """Return the result of a thread's call.

    Cancelling the caller does not cancel a ``shared`` call. An error that no caller retrieves is not logged.
    """
    result = asyncio.wrap_future(future)
    result.add_done_callback(_retrieve)
    if shared:
        result = asyncio.shield(result)
        result.add_done_callback(_retrieve)
    return await result


def _retrieve(result: asyncio.Future[Any]) -> None:
    """Retrieve the error of a call that may have no caller left, so that asyncio does not log it."""
    if not result.cancelled():
        result.exception()
