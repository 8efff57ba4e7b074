"""What is asked of a store: which files there are, and a copy of one.  Each kind of store has a module that answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from conch.errors import Code, ConchError, invalid, one_line

#: Called with the bytes that have arrived since the last call; raises where the copy is not wanted any more.
Arrived = Callable[[int], None]


@dataclass(frozen=True, slots=True, order=True)
class RemoteFile:
    """One file of a store.  ``path`` is below the repository, with slashes; one that ends with a slash is a directory.

    ``stamp`` is another one whenever the content is (an ETag, a generation).  ``modified`` is in seconds since 1970, 0
    where the store does not say.  ``digest`` is ``<algorithm>:<hexadecimal>`` of the content, empty where the store
    has none.
    """

    path: str
    size: int
    stamp: str = ""
    modified: float = 0.0
    digest: str = ""

    @property
    def identity(self) -> str:
        """What is equal for files of equal content at one path, as far as the store tells."""
        return self.digest or self.stamp or repr(self.modified)


class Store(Protocol):
    """A repository in a store.  Its calls block, and may be made by several threads; they raise what libraries raise,
    which :meth:`explain` makes an error for people."""

    def find(self, below: str = "") -> list[RemoteFile]:
        """All files below a directory of the repository; none where there is no such directory."""

    def fetch(self, file: RemoteFile, target: Path, arrived: Arrived) -> None:
        """Copy a file to ``target``, whose directory is there."""

    def digest_holds(self, file: RemoteFile) -> bool:
        """Whether a file's digest really is one: asked when a copy has another."""

    def explain(self, error: Exception) -> ConchError:
        """One sentence for ``error``, without secrets: INVALID_ARG for what asking again does not help, else
        UNAVAILABLE."""


class Redacted:
    """Removes secrets from texts of libraries."""

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        self._secrets = sorted((secret for secret in secrets if len(secret) > 3), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


#: Errors that say who asks may not, and those that say what is asked for is not there: by the names of their types, as
#: the libraries that have them are not imported for this.
_DENIED = frozenset({
    "PermissionError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ClientAuthenticationError",
    "DefaultCredentialsError", "RefreshError", "CredentialRetrievalError", "TokenRetrievalError", "NoAuthTokenError",
    "GatedRepoError", "InvalidConfigError",
})  # fmt: skip
_MISSING = frozenset({"FileNotFoundError", "ResourceNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError"})
_MESSAGES_OF_DENIAL = ("forbidden", "invalid credentials", "unauthorized", "anonymous caller", "authenticationfailed")


def explained(place: object, error: Exception, credentials: str, redacted: Redacted) -> ConchError:
    """The error for what a library raised while it read ``place``; ``credentials`` are what to check."""
    if isinstance(error, ConchError):
        return error
    names = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    reason = redacted(one_line(error))
    if isinstance(error, TimeoutError) and not str(error):
        reason = "it has sent nothing for too long"
    if names & _DENIED or any(text in reason.lower() for text in _MESSAGES_OF_DENIAL):
        return invalid(f"model repository {place} may not be read: {reason}; check {credentials}")
    if names & _MISSING:
        return invalid(f"model repository {place} does not exist: {reason}")
    return ConchError(f"model repository {place} cannot be read: {reason}", Code.UNAVAILABLE)


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and its causes, at most a few."""
    found: list[BaseException] = []
    while error is not None and len(found) < 5:
        found.append(error)
        error = error.__cause__
    return found
