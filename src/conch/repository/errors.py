"""Errors of models that cannot be read from their repository."""

from __future__ import annotations

import re

from conch.core.errors import ConchError

#: Matches an absolute path of several parts, but not one in a URL or an endpoint. The first alternatives match text
#: that stays unchanged: frames of a model's traceback, and the paths in Triton's messages about backends.
_PATHS = re.compile(
    r"""^[ ]{2}.+[(]\d+[)]:[ ].*$ | \b(?:searched:|escapes[ ]backend[ ]directory)(?:[ ]'[^'\n]*')+
    | (?<![\w./:~-]) (?P<path> / (?!v\d+/) [^\s'"`,;:()<>]+ / [^\s'"`,;:()<>]* )""",
    re.MULTILINE | re.VERBOSE,
)


def without_directories(text: str) -> str:
    """Shorten each absolute path in ``text`` to its last two parts, for clients of other processes.

    Traceback frames of a Python model and the directories searched for a backend stay as Triton sends them.
    """
    return _PATHS.sub(_shortened, text)


def _shortened(match: re.Match[str]) -> str:
    if match["path"] is None:
        return match[0]
    parts = match["path"].strip("/").split("/")
    return "/".join(parts[1:][-2:])


class PollError(ConchError):
    """A model that cannot be read: it is missing, not unique, or has a broken configuration.

    The message has the reason, for the operator; clients see Triton's fixed text. ``index_reason`` is the reason in the
    repository index (empty: none). ``passing`` means that copying the files failed, so a retry may succeed although the
    files are unchanged.
    """

    def __init__(self, name: str, message: str, *, index_reason: str = "", passing: bool = False) -> None:
        super().__init__(message, public=f"failed to load '{name}', failed to poll from model repository")
        self.name = name
        self.index_reason = index_reason
        self.passing = passing

    @classmethod
    def of(cls, name: str, cause: ConchError, *, passing: bool = False) -> PollError:
        """Return the error for a model with files or a configuration refused because of ``cause``."""
        return cls(name, f"Poll failed for model directory '{name}': {cause.message}", passing=passing)


class NotFoundError(PollError):
    """No repository contains the model."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"failed to poll model '{name}': model not found in any model repository.")


class NotUniqueError(PollError):
    """Several repositories contain the model."""

    def __init__(self, name: str) -> None:
        super().__init__(
            name,
            f"failed to poll model '{name}': not unique across all model repositories",
            index_reason="model appears in two or more repositories",
        )
