"""Interrupted commands: signals that end a command as Ctrl+C does, so that it can clean up, and its exit status."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: The exit status that shells report for a program ended by Ctrl+C.
INTERRUPTED: Final = 130
#: Sent by ``kill``, ``timeout`` and a closed terminal.
_ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP in a context; signals ignored before, as by ``nohup``, stay so."""
    before = {number: signal.getsignal(number) for number in _ENDINGS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
