"""Keeps libraries that talk from the console, and turns what they raise into one sentence."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Final

from conch.errors import ConchError

#: Longer than this, a library's message is cut: it goes into one line of a report.
LONGEST_REASON: Final = 240
COLOUR: Final = re.compile("\x1b\\[[0-9;]*m")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence prints, progress bars, log records below errors and warnings inside the block (for all threads)."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def reason(error: BaseException) -> str:
    """Why a step failed: the message of our own errors, the first line of what a library's began with."""
    while error.__cause__ is not None and not isinstance(error, ConchError):
        error = error.__cause__
    if isinstance(error, ConchError):
        return error.message
    lines = [line.strip() for line in COLOUR.sub("", str(error)).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"
