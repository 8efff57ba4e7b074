"""Tests of connections run on the server's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop; with asyncio's loop of Python 3.12.1 ``writelines`` never pauses who writes."""
    return {"uvloop": uvloop.new_event_loop}
