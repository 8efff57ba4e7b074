"""A repository in a store, as the server sees it: names and fingerprints from listings, models copied when needed.

Its methods block, and may be called by any thread.  What serves goes on when the store cannot be read: its models are
then those of the last listing.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final

from conch.config.schema import ModelConfig
from conch.errors import ConchError, internal, one_line, unavailable
from conch.repository.errors import NotFoundError
from conch.repository.fingerprint import Fingerprint
from conch.repository.located import Located
from conch.repository.stores import keys
from conch.repository.stores.copies import ModelCopies, tidy
from conch.repository.stores.fetching import Fetcher
from conch.repository.stores.listing import StoredModel, check_repository, models_in, nothing_there
from conch.repository.stores.opening import open_store
from conch.repository.stores.pool import DaemonPool, SharedCalls
from conch.repository.stores.store import RemoteFile, Store
from conch.repository.stores.transfer import PAUSES
from conch.repository.stores.urls import StoreUrl

LOG = logging.getLogger("conch")

#: Files that are copied at a time, of all models of a repository.
_PARALLEL: Final = 4
#: How long a store that did not respond is left alone, while requests can be served from the last listing (s).
_RESPITE: Final = 15.0
#: The timeout of a listing (s).
_LISTING_SECONDS: Final = 30.0
#: How often a model is copied again that changed while it was copied.
_ATTEMPTS: Final = 3


class StoreRoot:
    """The repository at ``url``, of which copies are kept in ``cache``.

    With ``whole``, a copy has all versions of a model, and not just those that its version policy selects.
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
        timeout: float = _LISTING_SECONDS,
    ) -> None:
        self.url = url
        self.folder = cache / _folder_name(url)
        self._whole = whole
        self._opener = opener
        self._pauses = pauses
        self._clock = clock
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._timeout = timeout
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

    # Looking

    def names(self) -> list[str]:
        """The names of the models, in order; those of the last listing while the store has just failed to answer."""
        if self._models is not None and self._unreadable and self._clock() - self._failed < _RESPITE:
            return self.known()
        return list(self._look())

    def known(self) -> list[str]:
        """The names of the last listing, without asking for another one."""
        return list(self._models or {})

    def fingerprints(self, config_name: str | None) -> dict[str, Fingerprint | None]:
        """What changes with the files of each model."""
        return {name: model.fingerprint(config_name) for name, model in self._look().items()}

    def fingerprint(self, name: str, config_name: str | None) -> Fingerprint:
        """What changes with the files of one model.  Raises UNAVAILABLE or INVALID_ARG where it cannot be read."""
        return self._model(name).fingerprint(config_name)

    def has(self, name: str) -> bool:
        """Whether there is such a model, or was when the store could be read last."""
        if self._models is not None and self._clock() - self._hung < _RESPITE:
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
        """A text in which the paths of copies are what they are copies of."""
        place = re.escape(str(self.folder)) + r"/([^/]+)/(?:\d+|new)/\1(?=/|\b)"
        return re.sub(place, lambda match: f"{self.url}/{match[1]}", text)

    def _look(self) -> dict[str, StoredModel]:
        """List the repository; what it was before where that fails.  Raises where it has never been listed."""
        try:
            files = self._list("")
            models = models_in(files)
            if self._models is None:
                check_repository(self.url, files, models)
            elif not files:
                raise nothing_there(self.url)
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
        """Say that the repository cannot be read, until it can be, once for each reason."""
        if error.message != self._unreadable and not self._lookups.closed.is_set():
            LOG.warning("%s; models go on serving", error.message)
        self._unreadable, self._failed = error.message, self._clock()

    def _model(self, name: str) -> StoredModel:
        found = models_in(self._list(name)).get(name)
        if found is None:
            raise NotFoundError(name)
        return found

    def _list(self, below: str) -> list[RemoteFile]:
        """The files below a directory of the repository, with paths below the repository."""
        listing = self._listings.submit(below, partial(self._find, below))
        try:
            found = listing.result(self._timeout)
        except TimeoutError:
            self._hung = self._clock()
            raise unavailable(
                f"model repository {self.url} cannot be read: it has not answered within {self._timeout:g} s"
            ) from None
        files, refused = keys.usable(found)
        keys.warn(self.url, refused, self._warned)
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
                except Exception as error:  # of whichever library; without its text, which may have a secret
                    raise unavailable(f"model repository {self.url} cannot be opened: {type(error).__name__}") from None
            return self._store

    # Copying

    def locate(self, name: str, config_name: str | None, override: ModelConfig | None) -> Located:
        """A copy of a model, made where there is none: of the versions that ``override``, or else its configuration,
        selects.

        Raises NotFoundError, UNAVAILABLE or INVALID_ARG where it cannot be read, INTERNAL where it cannot be written.
        """
        copies = ModelCopies(self.folder / name, self._transfers.closed)
        model = self._model(name)
        fetcher = Fetcher(self.url, self.folder, self._opened(), self._transfers, self._pauses, whole=self._whole)
        try:
            for _ in range(_ATTEMPTS):
                with copies.locked():
                    copy, made, inventory = fetcher.copy(model, copies, config_name, override)
                    if not made or self._model(name) == model:
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
        """Give up what is being read and copied; copies that are in use stay."""
        self._lookups.close()
        self._transfers.close()


def _folder_name(url: StoreUrl) -> str:
    """A name for the copies of a repository, which tells people which it is."""
    digest = hashlib.blake2b(url.text.encode(), digest_size=6).hexdigest()
    return f"{url.scheme}-{url.bucket.replace('/', '--')[:80]}-{digest}"
