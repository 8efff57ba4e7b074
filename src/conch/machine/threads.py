"""Thread pools for blocking calls and for computations."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: At least two, so that a short computation does not wait for a long one.
_COMPUTING: Final = max(2, min(8, os.cpu_count() or 1))


class LastingExecutor(ThreadPoolExecutor):
    """A ``ThreadPoolExecutor`` that runs calls in the submitting thread while the process exits.

    Python shuts down all thread pools before it joins other threads and runs exit handlers, and both may still use a
    server.
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


async def compute(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a long ``call`` that does not block in a thread, such as decompressing, hashing or reading ``/proc``.

    Its threads are separate from asyncio's, which wait for disks, so that a hanging network file system blocks only
    loads.
    """
    return await asyncio.get_running_loop().run_in_executor(_pool, partial(call, *args, **kwargs))


def _start() -> None:
    """Create the pool, which starts threads on demand. Also called in a fork, which has no threads of its parent."""
    global _pool
    _pool = LastingExecutor(_COMPUTING, "computing")


_pool: LastingExecutor
_start()
os.register_at_fork(after_in_child=_start)
