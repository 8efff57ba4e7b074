"""Measures the stages of a request with a clock around conch's functions.

Only this module names the wrapped functions. A missing function raises AttributeError when the server starts, so that
a refactoring cannot silently make the figures wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

Moments = dict[str, int]


class Recorder:
    """The times of the current request's stages (``perf_counter_ns``), and in ``all`` those of every earlier request.

    Assumes one request at a time. The clock costs about half a microsecond per stage.
    """

    def __init__(self) -> None:
        self.moments: Moments = {}
        self.all: list[Moments] = []

    def mark(self, stage: str) -> None:
        self.moments[stage] = perf_counter_ns()

    def end(self) -> None:
        """Complete the current request."""
        self.all.append(self.moments)
        self.moments = {}

    def around(self, owner: Any, name: str, before: str = "", after: str = "", end: bool = False) -> None:
        """Record a stage when a function of ``owner`` is entered or left; ``end``: leaving it completes the request."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def measured(*arguments: Any, **options: Any) -> Any:
            if before:
                self.mark(before)
            result = function(*arguments, **options)
            if after:
                self.mark(after)
            if end:
                self.end()
            return result

        setattr(owner, name, measured)


def record_server(protocol: str = "http") -> Recorder:
    """Wrap the stages of the server process: read, submitted, batched, encoded, sent, answered, decoded, written."""
    from conch.frontends.http.server import HttpConnection
    from conch.http2 import Http2Connection
    from conch.server.execution.dispatch import Dispatcher
    from conch.server.model import Model
    from conch.workers.child.channel import Endpoint
    from conch.workers.host.link import Link

    recorder = Recorder()
    recorder.around(HttpConnection if protocol == "http" else Http2Connection, "data_received", before="read")
    recorder.around(Model, "infer", after="submitted")
    recorder.around(Dispatcher, "_dispatch", before="batched")
    recorder.around(Endpoint, "encode", after="encoded")
    recorder.around(Link, "send", after="sent")
    recorder.around(Link, "_readable", before="answered", after="written", end=True)
    recorder.around(Model, "_ended", after="decoded")
    return recorder
