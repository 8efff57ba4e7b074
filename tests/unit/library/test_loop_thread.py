"""Threads that wait for the loop, are interrupted, have none, or outlive the main thread."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys

import pytest

import conch
from conch.core.errors import Code, ConchError
from conch.library import loop_thread
from conch.library.loop_thread import LoopThread


async def nothing() -> None:
    """End at once."""


def test_a_thread_interrupted_before_its_call_reached_the_loop_does_not_wait() -> None:
    class Interrupted(LoopThread):
        interrupt = True

        @property
        def is_forked(self) -> bool:
            if self.interrupt:
                self.interrupt = False
                raise KeyboardInterrupt
            return super().is_forked

    thread, call = Interrupted(), nothing()
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(call)
    finally:
        call.close()
        thread.close()


def test_a_timeout_of_the_coroutine_is_distinguished_from_the_wait() -> None:
    async def late() -> None:
        raise TimeoutError("too late")

    thread = LoopThread()
    try:
        with pytest.raises(TimeoutError, match="too late"):
            thread.run(late())
    finally:
        thread.close()


def test_a_loop_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loop() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(loop_thread, "loop_factory", lambda: no_loop)
    with pytest.raises(ConchError, match=r"an event loop cannot be started: .*Too many open files") as caught:
        conch.Server(model_repository="models").start()
    assert caught.value.code is Code.INTERNAL


AT_EXIT = """
import asyncio, atexit
from conch.library.loop_thread import LoopThread

thread = LoopThread()

async def call():
    print(await asyncio.to_thread(str, "called"), flush=True)
    try:
        await asyncio.to_thread(int, "x")
    except ValueError:
        print("raised", flush=True)

def end():
    thread.run(call())
    thread.close()

atexit.register(end)
"""


def test_calls_are_made_while_the_process_ends() -> None:
    result = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("called\nraised\n", "")
