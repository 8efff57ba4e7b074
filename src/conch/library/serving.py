"""``conch.serve``: the command ``conch serve`` as a function."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from conch.core.errors import unsupported
from conch.library import app
from conch.library.announcing import announcer
from conch.library.flags import plan


def serve(
    model: str | os.PathLike[str] | None = None,
    /,
    *,
    model_repository: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    **flags: Any,
) -> int:
    """Serve models until SIGINT or SIGTERM, as ``conch serve`` does; returns the exit status.

    The arguments are those of :class:`conch.Server`; the defaults of ports and logging are those of the command. The
    caller's signal handlers are restored afterwards. Raises ConchError if the server cannot start, and outside the main
    thread, because only the main thread receives signals.
    """
    serving_plan = plan(model, model_repository, flags, ports=True)
    if threading.current_thread() is not threading.main_thread():
        raise unsupported("conch.serve waits for signals, which only the main thread gets: use conch.Server here")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise unsupported("conch.serve runs its own event loop: use conch.AsyncServer in a running one")
    with _restored_signal_handlers(), serving_plan.open() as (settings, name):
        return app.serve(settings, announcer(name) if name else None)


@contextlib.contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """Restore the process's handlers of SIGINT and SIGTERM, which an event loop replaces with its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    descriptor = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None is a handler that was not installed from Python
                signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)
