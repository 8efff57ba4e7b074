"""Reads statistics right after a response: Triton counts some time after it has responded, conch before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tests.conftest import Server
from tests.events import eventually
from tests.oracle import TritonServer

T = TypeVar("T")


def settled(server: Server, read: Callable[[], T]) -> T:
    """Return the result of ``read``; for Triton, once it is unchanged for 50 ms."""
    found = read()
    if isinstance(server, TritonServer):

        def unchanged() -> bool:
            nonlocal found
            time.sleep(0.05)
            former, found = found, read()
            return found == former

        eventually(unchanged, "the end of counting")
    return found
