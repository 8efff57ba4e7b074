"""The interface of a store, which lists files and copies one, and the credentials of stores.

Each kind of store implements the interface in its own module. Credentials come from Triton's credentials file or the
environment. Messages never contain them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from conch.config.reading import read_small
from conch.core.errors import Code, ConchError, invalid, one_line
from conch.repository.stores.urls import StoreUrl

#: Called with the number of bytes received since the last call; raises to abort a copy that is no longer needed.
Arrived = Callable[[int], None]


@dataclass(frozen=True, slots=True, order=True)
class RemoteFile:
    """One file of a store.

    ``path`` is relative to the repository and uses slashes; a trailing slash marks a directory. ``stamp`` changes with
    the content (an ETag, a generation). ``modified`` is in seconds since 1970, 0 if unknown. ``digest`` is
    ``<algorithm>:<hexadecimal>`` of the content, empty if unknown.
    """

    path: str
    size: int
    stamp: str = ""
    modified: float = 0.0
    digest: str = ""

    @property
    def identity(self) -> str:
        """The digest, stamp or modification time: the best available sign that two files at one path are equal."""
        return self.digest or self.stamp or repr(self.modified)


class Store(Protocol):
    """A repository in a store. Calls block and are thread-safe.

    They raise the exceptions of the store's library; :meth:`explain` converts those into readable errors.
    """

    def find(self, below: str = "") -> list[RemoteFile]:
        """List all files below a directory of the repository; empty if it does not exist."""

    def fetch(self, file: RemoteFile, target: Path, arrived: Arrived) -> None:
        """Copy a file to ``target``; its parent directory exists."""

    def digest_holds(self, file: RemoteFile) -> bool:
        """Return whether a file's digest is reliable; called only if a copy's digest differs."""

    def explain(self, error: Exception) -> ConchError:
        """Describe ``error`` in one sentence without secrets: INVALID_ARG if retrying cannot help, else UNAVAILABLE."""


class Redacted:
    """Removes secrets from the messages of libraries."""

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        self._secrets = sorted((secret for secret in secrets if len(secret) > 3), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


#: Exception types for denied access and for missing objects, by name, so that their libraries need not be imported.
_DENIED = frozenset({
    "PermissionError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ClientAuthenticationError",
    "DefaultCredentialsError", "RefreshError", "CredentialRetrievalError", "TokenRetrievalError", "NoAuthTokenError",
    "GatedRepoError", "InvalidConfigError",
})  # fmt: skip
_MISSING = frozenset({"FileNotFoundError", "ResourceNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError"})
_MESSAGES_OF_DENIAL = ("forbidden", "invalid credentials", "unauthorized", "anonymous caller", "authenticationfailed")


def explained(repository: object, error: Exception, credentials: str, redacted: Redacted) -> ConchError:
    """Return the error for an exception raised while reading ``repository``.

    ``credentials`` names the settings to check.
    """
    if isinstance(error, ConchError):
        return error
    names = {kind.__name__ for cause in _chain(error) for kind in type(cause).__mro__}
    reason = redacted(one_line(error))
    if isinstance(error, TimeoutError) and not str(error):
        reason = "it sent no data before the timeout"
    if names & _DENIED or any(text in reason.lower() for text in _MESSAGES_OF_DENIAL):
        return invalid(f"model repository {repository} may not be read: {reason}; check {credentials}")
    if names & _MISSING:
        return invalid(f"model repository {repository} does not exist: {reason}")
    return ConchError(f"model repository {repository} cannot be read: {reason}", Code.UNAVAILABLE)


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return the error and its causes, at most five."""
    causes: list[BaseException] = []
    while error is not None and len(causes) < 5:
        causes.append(error)
        error = error.__cause__
    return causes


_FILE: Final = "TRITON_CLOUD_CREDENTIAL_PATH"
#: Environment variables with Triton's directories for copies, by scheme.
MOUNTS: Final = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}


def credential(url: StoreUrl, environment: Mapping[str, str]) -> Any:
    """Return the entry of the credentials file for ``url``, chosen by the longest name that is a prefix of the URL.

    Returns None if the environment names no such file, or for the Hub. Raises INVALID_ARG if the file is unreadable or
    has no matching entry.
    """
    named = environment.get(_FILE, "")
    if not named or url.scheme not in MOUNTS:
        return None
    try:
        document = json.loads(read_small(Path(named)))
    except OSError as error:
        raise invalid(f"{_FILE} names {named}, which cannot be read: {error.strerror}") from None
    except ValueError:  # its text may contain parts of the file
        raise invalid(f"{_FILE} names {named}, which is not JSON") from None
    entries = document.get(url.scheme, {}) if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        raise invalid(f'{_FILE} names {named}, which must hold an object such as {{"{url.scheme}": {{"": …}}}}')
    matching = [name for name in entries if url.text.startswith(name)]
    if not matching:
        raise invalid(f"{_FILE} names {named}, which has no entry for {url}")
    return entries[max(matching, key=len)]


def fields(entry: Any, url: StoreUrl, *names: str) -> dict[str, str]:
    """Return the non-empty strings of an entry of the file, by name. Raises INVALID_ARG for a malformed entry."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name, ""), str) for name in names):
        raise invalid(f"{_FILE}: the entry for {url} must be an object with {', '.join(names)}")
    return {name: entry[name] for name in names if entry.get(name)}
