"""The models of all repositories: which there are, and where each is.

Owned by the server's lifecycle, which calls it in a thread because it reads disks; ``conch check``
uses it too.  Nothing is cached: every call looks again.
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
from conch.errors import ConchError, did_you_mean
from conch.repository.backends import USUAL_PLACES, BackendDirectories
from conch.repository.errors import NotFoundError, NotUniqueError, PollError
from conch.repository.fingerprint import Fingerprint, take_fingerprint
from conch.repository.located import Located
from conch.repository.model_files import ModelFiles, describe
from conch.repository.names import is_directory_name
from conch.repository.naming import Naming, qualified
from conch.repository.roots import DirectoryRoot, Place, Root, root_of
from conch.repository.stores.pool import DaemonPool, SharedCalls
from conch.repository.stores.root import StoreRoot

LOG = logging.getLogger("conch")

#: How many models a message lists.
_NAMED = 5
#: How many models are read concurrently; models in stores are downloaded, several files at a time each.
_DESCRIBED = 4
#: How many other operations on the repository locations run concurrently.
_LOOKS = 8
#: The timeout of listing the models if an earlier listing exists (s).
_LISTING_SECONDS = 5.0

T = TypeVar("T")


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
        backends: BackendDirectories = USUAL_PLACES,
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
        # Separate from all other threads and from each other, because a store or network file system may hang.
        self._descriptions = DaemonPool("model", _DESCRIBED)
        self._shared_descriptions = SharedCalls(self._descriptions)
        self._looks = DaemonPool("repository", _LOOKS)
        self._listings = SharedCalls(self._looks)
        self._listed: list[str] | None = None

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
        others = f"its models are {', '.join(names[:_NAMED])}{' …' if len(names) > _NAMED else ''}" if names else ""
        hint = did_you_mean(name, names, others)
        return f"there is no model '{name}' in {', '.join(map(str, self.paths))}{'; ' + hint if hint else ''}"

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
        """Run :meth:`describe` in a thread, because downloading a model may take long.

        Only one thread reads a model at a time, so a model whose files hang leaves the other threads to other models.
        """
        call = partial(self.describe, name, override)
        if override is not None:
            return await _result(self._descriptions.submit(call))
        return await _result(self._shared_descriptions.submit(name, call), shared=True)

    async def aside(self, look: Callable[[], T]) -> T:
        """Run another method of this object in a thread."""
        return await _result(self._looks.submit(look))

    async def listed(self) -> list[str]:
        """Run :meth:`names` once for all concurrent callers.

        If that takes too long and an earlier listing exists, returns the earlier one.
        """
        look = asyncio.wrap_future(self._listings.submit("", self.names))
        look.add_done_callback(_retrieve)
        await asyncio.wait([look], timeout=None if self._listed is None else _LISTING_SECONDS)
        if look.done():
            self._listed = look.result()
        assert self._listed is not None
        return self._listed

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
        self._descriptions.close()
        self._looks.close()


async def _result(future: Future[T], *, shared: bool = False) -> T:
    """Wait for a thread; cancelling the caller does not cancel a ``shared`` call, and leaves no error to be logged."""
    look = asyncio.wrap_future(future)
    look.add_done_callback(_retrieve)
    if shared:
        look = asyncio.shield(look)
        look.add_done_callback(_retrieve)
    return await look


def _retrieve(look: asyncio.Future[Any]) -> None:
    """Retrieve the error of a look that no caller may await any more."""
    if not look.cancelled():
        look.exception()
