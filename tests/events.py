"""Events between tests and models, as files in a folder; waiting with a deadline, in threads and in event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: Timeout of what takes a moment on an idle machine (s): it tells a hang, not a busy machine.
TIMEOUT = 60.0


@dataclass(frozen=True)
class Events:
    """The folder where models write ``<name>.started`` and tests write ``<name>.go``."""

    folder: Path

    def wait(self, name: str, timeout: float = TIMEOUT) -> None:
        eventually((self.folder / name).exists, f"the event {name}", timeout)

    def happened(self, name: str) -> bool:
        return (self.folder / name).exists()

    def set(self, *names: str) -> None:
        for name in names:
            (self.folder / name).touch()


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until the condition holds; TimeoutError when it does not within ``TIMEOUT`` seconds."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.001)


def eventually(condition: Callable[[], object], what: str, timeout: float = TIMEOUT) -> None:
    """Return when the condition holds; fail when it does not within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {timeout:g} s")
        time.sleep(0.01)
