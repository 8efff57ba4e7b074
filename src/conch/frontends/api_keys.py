"""API keys: read from a file and the environment, and checked for each request that is not a health check.

The name of a key identifies its client in the access log, and owns the responses that it stores.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

from conch.core.errors import ConchError, invalid, why_unreadable
from conch.core.variables import API_KEY

LOG = logging.getLogger("conch")
#: The minimum time between two checks whether the file has changed (s).
LOOK_SECONDS: Final = 1.0
#: The name of the key in the environment.
_NAME_OF_VARIABLE: Final = "default"
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
#: Characters that an HTTP header can have.
_KEY: Final = re.compile(r"[!-~]+")
_BEARER: Final = b"bearer "
#: The error for a request without a valid key.
REFUSAL: Final = "This server requires an API key, as 'Authorization: Bearer <key>'; it is missing or unknown"


class ApiKeys:
    """Names and keys; without any, no key is required. Only digests of the keys are kept."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        """Take names by key."""
        self._names = _digests(keys or {})
        self._file: _KeyFile | None = None

    @classmethod
    def read(cls, path: str, environment: Mapping[str, str]) -> ApiKeys:
        """Read the keys of a file, if ``path`` is not empty, and of the environment.

        A line of the file is ``name=key``, a comment that begins with ``#``, or empty; a name may have several keys.
        A file that changes is read again. Raises INVALID_ARG for another line, a key that has two names, and a file or
        variable without a key.
        """
        given = environment.get(API_KEY)
        if given is not None and not _KEY.fullmatch(given):
            raise invalid(f"{API_KEY} must be a key, of printable ASCII characters without spaces")
        variable = {} if given is None else {given: _NAME_OF_VARIABLE}
        if not path:
            return cls(variable)
        file = _KeyFile(Path(path), variable)
        keys = cls(file.read())
        keys._file = file
        return keys

    def __bool__(self) -> bool:
        return bool(self._names)

    def name_in(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the name of the key in the headers of an HTTP request, with lower-case names; see :meth:`name_of`."""
        return self.name_of(headers.get(b"authorization", b""), headers.get(b"x-api-key", b""))

    def name_of(self, authorization: bytes, key: bytes = b"") -> str:
        """Return the name of the key of a request, empty if it has none that is known.

        The key is in the header ``authorization`` as a bearer token, or else ``key``. The time does not depend on which
        key is given.
        """
        if authorization[: len(_BEARER)].lower() == _BEARER:
            key = authorization[len(_BEARER) :].strip()
        if self._file is not None and (changed := self._file.changed()) is not None:
            self._names = _digests(changed)
        digest = _digest(key)
        matches = [name for name, known in self._names if hmac.compare_digest(known, digest)]
        return matches[0] if matches else ""


class _KeyFile:
    """A file of keys, which is read again when it has changed. ``further`` are names of other keys, by key."""

    def __init__(self, path: Path, further: Mapping[str, str]) -> None:
        self._path, self._further = path, further
        self._next_look = 0.0
        self._stamp = self._look()

    def read(self) -> dict[str, str]:
        """Return the names by key. Raises INVALID_ARG if the file cannot be read or is invalid."""
        path, keys = self._path, dict[str, str]()
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise invalid(f"--api-key-file: {path} cannot be read: {why_unreadable(error)}") from None
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            name, _, key = line.partition("=")
            if not (_NAME.fullmatch(name) and _KEY.fullmatch(key)):
                raise invalid(f"--api-key-file: line {number} of {path} is not '<name>=<key>'")
            if keys.setdefault(key, name) != name:
                raise invalid(f"--api-key-file: line {number} of {path} has the key of another name")
        if not keys:
            raise invalid(f"--api-key-file: {path} has no keys")
        return {**self._further, **keys}

    def changed(self) -> dict[str, str] | None:
        """Return the names by key if the file has changed; None if not, and if it is invalid, which is logged."""
        if time.monotonic() < self._next_look:
            return None
        stamp = self._look()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            keys = self.read()
        except ConchError as error:
            LOG.error("%s; the keys stay as they were", error.message)
            return None
        LOG.info("--api-key-file: the keys of %s have changed", self._path)
        return keys

    def _look(self) -> tuple[int, ...]:
        """Return what changes with the content of the file."""
        self._next_look = time.monotonic() + LOOK_SECONDS
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_ino, status.st_size


def _digests(keys: Mapping[str, str]) -> list[tuple[str, bytes]]:
    return [(name, _digest(key.encode())) for key, name in keys.items()]


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


#: No key is required.
NO_KEYS: Final = ApiKeys()
