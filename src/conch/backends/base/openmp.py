"""Which threads of a worker compute with OpenMP, as PyTorch and llama.cpp do. Runs in workers.

GNU's OpenMP keeps a pool of threads for each thread that has called it, as long as that thread lives. When all pools
together have more threads than the process has cores, threads that wait for each other sleep at once instead of
spinning: on two cores, a step of 8 ms then takes 28 ms. Therefore only one thread of each instance computes with
several threads, and the main thread's pool ends after the load (``workers/child/worker.py``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Returned = TypeVar("Returned")


class ComputeThreads:
    """One thread for each of ``instances``, which computes with ``threads`` threads of OpenMP."""

    def __init__(self, instances: int, threads: int) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(instances, "conch-compute")

    def call(self, function: Callable[..., Returned], *arguments: Any) -> Returned:
        """Return the result of ``function``, called by one of the threads."""
        return self._executor.submit(self._run, function, arguments).result()

    def _run(self, function: Callable[..., Returned], arguments: tuple[Any, ...]) -> Returned:
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(self._threads)
        return function(*arguments)


def call_in_thread(function: Callable[..., Returned], *arguments: Any) -> Returned:
    """Return the result of ``function``, called by a thread that then ends, and its pool with it."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *arguments).result()


_of_thread = threading.local()


def use_one_thread() -> None:
    """Let PyTorch compute in the calling thread alone, if it has been imported."""
    torch = sys.modules.get("torch")
    if torch is not None and not hasattr(_of_thread, "limited"):
        # The first of these calls sets the number of the process.
        torch.get_num_threads()
        torch.set_num_threads(1)
        _of_thread.limited = True
