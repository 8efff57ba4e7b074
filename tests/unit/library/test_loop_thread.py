"""Threads that wait for the loop, and are interrupted."""

from __future__ import annotations

from typing import Any

import pytest

from conch.library.loop_thread import LoopThread


async def nothing() -> None:
    """End at once."""


def test_a_thread_interrupted_before_its_call_reached_the_loop_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread()

    def interrupted(coroutine: Any, future: Any) -> None:
        coroutine.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(thread, "_submit", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(nothing())
    finally:
        thread.close()


def test_a_timeout_of_the_coroutine_is_told_from_the_wait() -> None:
    async def late() -> None:
        raise TimeoutError("too late")

    thread = LoopThread()
    try:
        with pytest.raises(TimeoutError, match="too late"):
            thread.run(late())
    finally:
        thread.close()
