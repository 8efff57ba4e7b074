"""Asks one server again and again whether it has the model ready.  Runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from conch.errors import ConchError
from conch.server.remote.transport import LostError, RemoteTransport, UnreachedError

LOG = logging.getLogger("conch")

#: How soon a server that was ready and is not any more is asked again (s); then less and less often.
_FIRST_DELAY: Final = 0.1
_MOST_DOUBLINGS: Final = 20


class HealthWatch:
    """Tells ``on_verdict`` after every question why the server cannot be used (empty where it can), and if it is gone.

    Asks every ``interval`` seconds, a server that is away a little sooner, and at once when :meth:`look` is called.
    """

    def __init__(self, transport: RemoteTransport, interval: float, on_verdict: Callable[[str, bool], None]) -> None:
        self._transport = transport
        self._interval = interval
        self._on_verdict = on_verdict
        self._looking = asyncio.Event()
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._run())
        transport.on_broken = self.look

    def look(self) -> None:
        """Ask now: something has happened."""
        self._looking.set()

    async def first(self) -> None:
        """Wait until the server has been asked once."""
        await asyncio.shield(self._first)

    def stop(self) -> None:
        self._task.cancel()
        if not self._first.done():
            self._first.set_result(None)

    async def _run(self) -> None:
        away = 0  # how often in a row the server could not be used
        while True:
            self._looking.clear()
            reason, gone = await self._ask()
            self._on_verdict(reason, gone)
            if not self._first.done():
                self._first.set_result(None)
            away = min(away + 1, _MOST_DOUBLINGS) if reason else 0
            delay = min(self._interval, _FIRST_DELAY * 2 ** (away - 1)) if away else self._interval
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._looking.wait()

    async def _ask(self) -> tuple[str, bool]:
        try:
            await self._transport.check()
        except (UnreachedError, LostError) as error:
            return error.message, True
        except ConchError as error:
            return error.message, False
        except Exception as error:
            LOG.exception("the server of a remote model could not be asked whether it is ready")
            return f"it could not be asked: {error!r}", False
        return "", False
