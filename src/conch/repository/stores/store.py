"""The interface of a store: listing files and copying one. Each kind of store implements it in its own module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from conch.core.errors import Code, ConchError, invalid, one_line

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


def explained(place: object, error: Exception, credentials: str, redacted: Redacted) -> ConchError:
    """Return the error for an exception raised while reading ``place``; ``credentials`` names the settings to check."""
    if isinstance(error, ConchError):
        return error
    names = {kind.__name__ for cause in _chain(error) for kind in type(cause).__mro__}
    reason = redacted(one_line(error))
    if isinstance(error, TimeoutError) and not str(error):
        reason = "it has sent nothing for too long"
    if names & _DENIED or any(text in reason.lower() for text in _MESSAGES_OF_DENIAL):
        return invalid(f"model repository {place} may not be read: {reason}; check {credentials}")
    if names & _MISSING:
        return invalid(f"model repository {place} does not exist: {reason}")
    return ConchError(f"model repository {place} cannot be read: {reason}", Code.UNAVAILABLE)


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return the error and its causes, at most five."""
    causes: list[BaseException] = []
    while error is not None and len(causes) < 5:
        causes.append(error)
        error = error.__cause__
    return causes
