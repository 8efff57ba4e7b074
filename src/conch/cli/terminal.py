"""Where commands write: to a terminal in its width, into a pipe or a file without wrapping and without colour."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

#: Wider than any line: programs that read a table want its rows whole.
_UNWRAPPED: Final = 10_000


def console(*, stderr: bool = False) -> Console:
    """A console on standard output or standard error, as its reader wants it."""
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        return Console(stderr=stderr)
    return Console(stderr=stderr, width=_UNWRAPPED, no_color=True, force_terminal=False)
