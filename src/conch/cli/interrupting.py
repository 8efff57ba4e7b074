"""What ends a command that has something to put away: Ctrl+C, and signals that say the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: What ``kill``, ``timeout`` and a closed terminal send.
_ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP raise KeyboardInterrupt; one that is ignored, as under ``nohup``, stays so."""
    before = {number: signal.getsignal(number) for number in _ENDINGS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
