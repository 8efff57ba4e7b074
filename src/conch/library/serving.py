"""``conch.serve``: the command ``conch serve`` as a function."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from typing import Any

from conch import app, logs
from conch.announcing import announcer
from conch.errors import unsupported
from conch.library.flags import plan


def serve(
    model: str | os.PathLike[str] | None = None,
    /,
    *,
    model_repository: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    **flags: Any,
) -> int:
    """Serve models until SIGINT or SIGTERM, as ``conch serve`` does; returns its exit status.

    The arguments are those of :class:`conch.Server`; ports and logs are those of the command.  Raises ConchError when
    the server cannot start, and outside of the main thread, which alone gets signals.
    """
    wanted = plan(model, model_repository, flags, ports=True)
    if threading.current_thread() is not threading.main_thread():
        raise unsupported("conch.serve waits for signals, which only the main thread gets: use conch.Server here")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise unsupported("conch.serve runs an event loop of its own: use conch.AsyncServer on this one")
    with wanted.open() as (settings, name):
        try:
            return app.serve(settings, announcer(name) if name else None)
        finally:
            logs.reset()
