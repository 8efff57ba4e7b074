"""Threads for calls that may wait."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class LastingExecutor(ThreadPoolExecutor):
    """A ``ThreadPoolExecutor`` that also makes calls while the process ends, in the thread that submits them.

    Python ends all pools of threads before it waits for other threads and calls exit handlers, and both may still use
    a server.
    """

    def submit(self, call: Callable[..., T], /, *arguments: Any, **options: Any) -> Future[T]:
        try:
            return super().submit(call, *arguments, **options)
        except RuntimeError:
            future: Future[T] = Future()
            try:
                future.set_result(call(*arguments, **options))
            except BaseException as error:
                future.set_exception(error)
            return future
