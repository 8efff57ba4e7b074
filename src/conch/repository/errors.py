"""Why a model could not be taken from its repository."""

from __future__ import annotations

import re

from conch.errors import Code, ConchError

#: An absolute path of several parts, not one of a URL or an endpoint.  Before it, what stays as it is: a frame of a
#: model's traceback, and the parts of Triton's sentences on backends that have paths.
_PATHS = re.compile(
    r"""^[ ]{2}.+[(]\d+[)]:[ ].*$ | \b(?:searched:|escapes[ ]backend[ ]directory)(?:[ ]'[^'\n]*')+
    | (?<![\w./:~-]) (?P<path> / (?!v\d+/) [^\s'"`,;:()<>]+ / [^\s'"`,;:()<>]* )""",
    re.MULTILINE | re.VERBOSE,
)


def without_directories(text: str) -> str:
    """Shorten the absolute paths in a reason to their last two parts, for clients of other processes.

    Frames of a Python model's traceback, and where a backend was searched, stay as Triton sends them.
    """
    return _PATHS.sub(_shortened, text)


def _shortened(found: re.Match[str]) -> str:
    if found["path"] is None:
        return found[0]
    parts = found["path"].strip("/").split("/")
    return "/".join(parts[1:][-2:])


class PollError(ConchError):
    """A model that cannot be read: not there, not unique, or with a broken configuration.

    The client sees a fixed text; ``log`` is the line for the server's log and ``index_reason``
    what the repository index says about the model (empty: nothing).  ``passing``: its files could not be copied, which
    may be otherwise another time although they are the same.
    """

    def __init__(self, name: str, log: str, *, index_reason: str = "", passing: bool = False) -> None:
        super().__init__(f"failed to load '{name}', failed to poll from model repository", Code.INTERNAL)
        self.name = name
        self.log = log
        self.index_reason = index_reason
        self.passing = passing

    @classmethod
    def of(cls, name: str, cause: ConchError, *, passing: bool = False) -> PollError:
        """The error for a model whose files or configuration are refused because of ``cause``."""
        return cls(name, f"Poll failed for model directory '{name}': {cause.message}", passing=passing)


class NotFoundError(PollError):
    """No repository has a directory of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"failed to poll model '{name}': model not found in any model repository.")


class NotUniqueError(PollError):
    """Two or more repositories have a directory of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            name,
            f"failed to poll model '{name}': not unique across all model repositories",
            index_reason="model appears in two or more repositories",
        )
