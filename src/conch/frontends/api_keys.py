"""API keys: read from a file and the environment, and checked for each request that is not a health check.

The name of a key identifies its client in the access log, and owns the responses that it stores.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

from conch.core.errors import invalid, one_line
from conch.core.variables import API_KEY

#: The name of the key in the environment.
_NAME_OF_VARIABLE: Final = "default"
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
#: Characters that an HTTP header can have.
_KEY: Final = re.compile(r"[!-~]+")
_BEARER: Final = b"bearer "
#: What a request without a valid key is told.
REFUSAL: Final = "This server requires an API key, as 'Authorization: Bearer <key>'; it is missing or unknown"


class ApiKeys:
    """Names and keys; without any, no key is required. Only digests of the keys are kept."""

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._names = [(name, _digest(key.encode())) for name, key in keys]

    @classmethod
    def read(cls, path: str, environment: Mapping[str, str]) -> ApiKeys:
        """Read the keys of a file, if ``path`` is not empty, and of the environment.

        A line of the file is ``name=key``, a comment that begins with ``#``, or empty; a name may have several keys.
        Raises INVALID_ARG for another line, a key that has two names, and a file or variable without a key.
        """
        keys: dict[str, str] = {}
        if path:
            try:
                lines = Path(path).read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise invalid(f"--api-key-file: {path} cannot be read: {one_line(error)}") from None
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
        given = environment.get(API_KEY)
        if given is not None:
            if not _KEY.fullmatch(given):
                raise invalid(f"{API_KEY} must be a key, of printable ASCII characters without spaces")
            keys.setdefault(given, _NAME_OF_VARIABLE)
        return cls((name, key) for key, name in keys.items())

    def __bool__(self) -> bool:
        return bool(self._names)

    def name_of(self, authorization: bytes, key: bytes = b"") -> str:
        """Return the name of the key of a request, empty if it has none that is known.

        The key is in the header ``authorization`` as a bearer token, or else ``key``. The time does not depend on which
        key is given.
        """
        if authorization[: len(_BEARER)].lower() == _BEARER:
            key = authorization[len(_BEARER) :].strip()
        digest = _digest(key)
        matches = [name for name, known in self._names if hmac.compare_digest(known, digest)]
        return matches[0] if matches else ""


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


#: No key is required.
NO_KEYS: Final = ApiKeys()
