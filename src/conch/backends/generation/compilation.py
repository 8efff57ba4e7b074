"""Compiles the structures of requests beside the engine, so that no other request waits for that.

Belongs to a service; one thread for all structures, one after the other.  What takes too long is refused while it goes
on: libraries cannot be interrupted, but neither the engine nor requests without a structure need this thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from conch.backends.generation.engine import GenerationEngine
from conch.backends.native.arrays import failure
from conch.errors import ConchError, invalid, unavailable
from conch.sampling.structures import Structure

#: How long a structure may take to compile (s), unless the model says otherwise.
COMPILE_SECONDS: Final = 5.0

#: Called once, in any thread, with the compiled structure or why there is none.
OnCompiled = Callable[[Any, ConchError | None], None]


class _Compilation:
    """One structure: it ends when it is compiled, when it fails or when its time is up, whatever comes first."""

    def __init__(self, structure: Structure, seconds: float, on_compiled: OnCompiled) -> None:
        self.structure = structure
        self.begun = False
        self._seconds = seconds
        self._on_compiled: OnCompiled | None = on_compiled
        self._ending = threading.Lock()
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    @property
    def ended(self) -> bool:
        return self._on_compiled is None

    def end(self, compiled: Any, error: ConchError | None) -> None:
        with self._ending:
            on_compiled, self._on_compiled = self._on_compiled, None
        self._timer.cancel()
        if on_compiled is not None:
            on_compiled(compiled, error)

    def _expire(self) -> None:
        limit = f"within {self._seconds:g} s (parameter 'structured_output_timeout')"
        if self.begun:
            self.end(None, invalid(f"the {self.structure.kind} that output must fit does not compile {limit}"))
        else:
            self.end(
                None, unavailable(f"structures of other requests are being compiled; this one has not been {limit}")
            )


class Compilations:
    """The structures that an engine is to compile; ``seconds`` bounds the time of each, with its time in the queue."""

    def __init__(self, engine: GenerationEngine, seconds: float = COMPILE_SECONDS) -> None:
        self._engine = engine
        self._seconds = seconds
        self._queue: SimpleQueue[_Compilation] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, structure: Structure, on_compiled: OnCompiled) -> None:
        """Compile a structure as soon as those before it are."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="conch-structures", daemon=True)
            self._thread.start()
        self._queue.put(_Compilation(structure, self._seconds, on_compiled))

    def _run(self) -> None:
        while True:
            compilation = self._queue.get()
            if compilation.ended:
                continue
            compilation.begun = True
            try:
                compiled, error = self._engine.compile(compilation.structure), None
            except Exception as raised:  # a library's, about this structure
                compiled, error = None, failure(raised)
            compilation.end(compiled, error)
