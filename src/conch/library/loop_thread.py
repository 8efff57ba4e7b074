"""An event loop in its own thread, for callers without one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, Final, TypeVar

from conch.core.errors import internal, unavailable
from conch.library.app import loop_factory
from conch.machine.threads import LastingExecutor

T = TypeVar("T")

#: The time between two checks for signals (s).
_SIGNAL_SECONDS: Final = 1.0


class LoopThread:
    """Runs coroutines for other threads until ``close``, also while the process exits.

    The thread is a daemon: it does not keep the process from exiting. Raises INTERNAL if it cannot be started, for
    example if the process has no file descriptors left for the loop.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open = True
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="conch-server", daemon=True)
        try:
            self._thread.start()
            started.result()
        except (OSError, RuntimeError) as error:
            raise internal(f"a thread with an event loop cannot be started: {error}") from error

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one in which the thread runs."""
        return os.getpid() != self._pid

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``coroutine``; an exception in the waiting thread, such as Ctrl+C, cancels it.

        Raises UNAVAILABLE after ``close``, and in a forked process, where the thread does not exist.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError("a server's own thread cannot wait for the server")
        future: Future[T] = Future()
        try:
            self._submit(coroutine, future)
            return _result(future)
        except CancelledError:
            raise unavailable("the server is closed") from None
        except BaseException:
            if not future.done():
                self._loop.call_soon_threadsafe(self._cancel, future)
                wait([future])  # returns once the coroutine has cleaned up
            raise

    def _submit(self, coroutine: Coroutine[Any, Any, T], future: Future[T]) -> None:
        with self._lock:
            if self._open and not self.is_forked:
                self._loop.call_soon_threadsafe(self._begin, coroutine, future)
                return
        coroutine.close()
        future.cancel()
        if self.is_forked:
            raise unavailable(f"the server belongs to process {self._pid}, but this process is a fork of it")
        raise unavailable("the server is closed")

    def close(self) -> None:
        """Cancel the running coroutines and end the thread; does nothing in a fork or when called again."""
        if self.is_forked:
            return
        with self._lock:
            if self._open:
                self._open = False
                self._loop.call_soon_threadsafe(self._stop.set)
        if not self.is_current:
            self._thread.join()

    def _run(self, started: Future[None]) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._until_closed(started))
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            elif threading.main_thread().is_alive():  # otherwise Python 3.12 cannot close an executor
                raise

    async def _until_closed(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(LastingExecutor())
        self._stop = asyncio.Event()
        self._tasks: dict[Future[Any], asyncio.Task[Any]] = {}
        started.set_result(None)
        await self._stop.wait()

    def _begin(self, coroutine: Coroutine[Any, Any, T], future: Future[T]) -> None:
        task = self._tasks[future] = self._loop.create_task(coroutine)
        task.add_done_callback(partial(self._ended, future))

    def _cancel(self, future: Future[Any]) -> None:
        task = self._tasks.get(future)
        if task is not None:
            task.cancel()
        elif future.cancel():  # interrupted before the loop received its coroutine
            future.set_running_or_notify_cancel()

    def _ended(self, future: Future[T], task: asyncio.Task[T]) -> None:
        del self._tasks[future]
        if task.cancelled():
            future.cancel()
            future.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


def _result(future: Future[T]) -> T:
    """Wait for ``future`` in short steps: Python does not interrupt a wait for a signal that arrived just before it."""
    while True:
        try:
            return future.result(_SIGNAL_SECONDS)
        except TimeoutError:
            if future.done():
                return future.result()
