"""``TritonPythonModel.is_ready``: a model that decides itself whether it is ready is asked once a second.

The server is told when the answer changes, and before the first one that the model is not ready.  Runs in the worker of
a Python model, in threads of its own beside ``execute``.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from concurrent.futures import Future, TimeoutError
from typing import Any, Callable

from conch.backends.python.errors import PLACES, describe
from conch.backends.python.runtime import Runtime
from conch.errors import ConchError, internal
from conch.workers.child.tracebacks import log_frame

#: Time between two questions, and how long an answer may take (s).
PERIOD_SECONDS = 1.0
LIMIT_SECONDS = 5.0


class Readiness:
    """Asks ``is_ready``, for the first time before it is made; its coroutines run on ``loop``, if there is one."""

    def __init__(
        self, runtime: Runtime, is_ready: Callable[[], Any], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._runtime = runtime
        self._is_ready = is_ready
        self._loop = loop
        self._told: bool | None = None
        self._complaint = ""
        self._closed = threading.Event()
        self._asked = threading.Event()
        self._tell(False)
        threading.Thread(target=self._watch, name="conch-readiness", daemon=True).start()
        self._asked.wait()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            answer: Future[bool] = Future()
            threading.Thread(target=self._ask, args=(answer,), name="conch-is-ready", daemon=True).start()
            try:
                self._tell(answer.result(LIMIT_SECONDS))
                self._complaint = ""
            except TimeoutError:
                self._complain(internal(f"is_ready() has not returned within {LIMIT_SECONDS:g} s"))
                self._asked.set()
                answer.exception()  # no second question before it has
            except ConchError as error:
                self._complain(error)
            self._asked.set()
            self._closed.wait(PERIOD_SECONDS)

    def _ask(self, answer: Future[bool]) -> None:
        try:
            ready = self._is_ready()
            if inspect.isawaitable(ready):
                ready = self._awaited(ready)
            if not isinstance(ready, bool):
                raise internal("is_ready() must return a boolean value")
            answer.set_result(ready)
        except ConchError as error:
            answer.set_exception(error)
        except BaseException as error:
            failure = internal(describe(error))
            failure.__cause__ = error
            answer.set_exception(failure)

    def _awaited(self, ready: Any) -> Any:
        async def wait() -> Any:
            return await ready

        if self._loop is None:
            return asyncio.run(wait())
        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def _tell(self, ready: bool) -> None:
        if ready is not self._told and not self._closed.is_set():
            self._told = ready
            self._runtime.channel.send({"op": "model_ready", "ready": ready})

    def _complain(self, error: ConchError) -> None:
        """The model is not ready, for a reason that the log tells once."""
        self._tell(False)
        heading = f"model '{self._runtime.instance}' is not ready: {error.message.partition(PLACES)[0]}"
        if heading == self._complaint or self._closed.is_set():
            return
        self._complaint = heading
        if error.__cause__ is None:
            self._runtime.write_log("ERROR", os.path.basename(__file__), 0, heading)
        else:
            frame = log_frame(error.__cause__, heading)
            self._runtime.write_log("ERROR", frame["file"], frame["line"], frame["message"])
