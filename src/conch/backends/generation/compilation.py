"""Compiles the structures of requests outside the engine's thread, so that other requests do not wait.

Each service has one queue. One thread compiles the structures, one at a time; another enforces the timeouts. Libraries
cannot be interrupted: a structure that takes too long is refused while it still compiles, and is not compiled again.
Timeouts are in processor time, which, unlike elapsed time, does not depend on the other load of the machine.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from conch.backends.base.arrays import failure
from conch.backends.generation.engine import GenerationEngine
from conch.core.errors import Code, ConchError, invalid, unavailable
from conch.core.sampling.structures import Structure
from conch.machine.facts import usable_cores

_THREADS: Final = Path("/proc/self/task")
#: Low bits of Linux's clock id for a thread's processor time (``CPUCLOCK_SCHED``, per thread); the high bits hold the
#: inverted thread id.
_THREAD_CLOCK: Final = 6


class ThreadGroup:
    """The threads of this process with the name ``name`` (at most 15 characters).

    A thread joins temporarily. Threads that it starts in that time stay in the group, because on Linux a new thread
    inherits the name of its parent.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Add the calling thread to the group."""
        file = _THREADS / str(threading.get_native_id()) / "comm"
        before = _name(file)
        _rename(file, self._name)
        try:
            yield
        finally:
            _rename(file, before)

    def seconds(self) -> float:
        """Return the processor time of the group (s), including all threads of the process that have ended.

        Ended threads are mostly those that a library started. Only differences are meaningful. Without Linux's
        ``/proc``, returns the processor time of the calling thread.
        """
        group = others = 0.0
        try:
            threads = [int(name) for name in os.listdir(_THREADS)]
        except OSError:
            return time.thread_time()
        for thread in threads:
            try:
                used = time.clock_gettime(~thread << 3 | _THREAD_CLOCK)
            except OSError:
                continue  # ended
            if _name(_THREADS / str(thread) / "comm") == self._name:
                group += used
            else:
                others += used
        # The second value exceeds the first only by the time of ended threads.
        return max(group, time.process_time() - others)


def _name(file: Path) -> str:
    try:
        return file.read_text().rstrip("\n")
    except OSError:
        return ""


def _rename(file: Path, name: str) -> None:
    with suppress(OSError):  # not on this system
        file.write_text(name)


#: Default timeout of compiling a structure on an otherwise idle machine (s).
COMPILE_SECONDS: Final = 5.0
#: Timeout of a request that waits for its structure, queueing included (s), and maximum length of the queue.
WAIT_SECONDS: Final = 60.0
MOST_WAITING: Final = 64
#: Name of the compiling threads, for ``ThreadGroup``.
COMPILING: Final = "conch-grammars"
#: Interval between checks of the timeouts (s).
_LOOK_SECONDS: Final = 0.1
#: Number of refused structures that are remembered, and of compiled ones; and the total length of the latter's texts
#: (characters), to which their memory is roughly proportional.
_REMEMBERED: Final = 64
_REMEMBERED_LENGTH: Final = 1 << 20

#: Called once, in any thread, with the compiled structure or the error.
OnCompiled = Callable[[Any, ConchError | None], None]


@dataclass(slots=True)
class _Compilation:
    """A structure and its waiting requests with their deadlines; ``refusal`` is set when it exceeds its time limit."""

    structure: Structure
    waiting: list[tuple[float, OnCompiled]] = field(default_factory=list)
    refusal: ConchError | None = None


class Compilations:
    """The queue of structures that an engine compiles.

    ``seconds`` limits each structure to the processor time that all cores have in that time. ``processor_time`` returns
    the processor time of the compiling threads; ``clock`` is the clock of the deadlines.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        seconds: float = COMPILE_SECONDS,
        *,
        wait_seconds: float = WAIT_SECONDS,
        clock: Callable[[], float] = monotonic,
        processor_time: Callable[[], float] | None = None,
    ) -> None:
        self._engine = engine
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._group = ThreadGroup(COMPILING)
        self._processor_time = processor_time or self._group.seconds
        self._max_seconds = seconds * usable_cores()
        self._changed = threading.Condition()
        #: In arrival order; the first structure is being compiled if ``_current`` equals it.
        self._pending: OrderedDict[Structure, _Compilation] = OrderedDict()
        self._current: Structure | None = None
        self._current_start = 0.0
        self._refused: OrderedDict[Structure, ConchError] = OrderedDict()
        #: The least recently used structure first.
        self._known: OrderedDict[Structure, Any] = OrderedDict()
        self._threads: list[threading.Thread] = []

    def add(self, structure: Structure, on_compiled: OnCompiled) -> None:
        """Queue a structure; identical structures are compiled once for all waiting requests.

        Calls ``on_compiled`` at once if the structure was compiled or refused lately. Calls it with UNAVAILABLE if too
        many structures wait or the machine is too busy, and with INVALID_ARG if the structure does not compile or takes
        too much processor time.
        """
        compiled = None
        with self._changed:
            error = self._refused.get(structure)
            pending = self._pending.get(structure)
            if structure in self._known:
                self._known.move_to_end(structure)
                compiled = self._known[structure]
            elif error is None and pending is not None:
                error = pending.refusal
            elif error is None:
                if len(self._pending) < MOST_WAITING:
                    pending = self._pending[structure] = _Compilation(structure)
                else:
                    error = unavailable(f"{MOST_WAITING} structures of other requests wait to be compiled")
            if compiled is None and error is None and pending is not None:
                pending.waiting.append((self._clock() + self._wait_seconds, on_compiled))
                self._start()
                self._changed.notify_all()
                return
        on_compiled(compiled, error)

    def look(self) -> None:
        """Refuse the current structure if it takes too long, and requests whose deadline has passed."""
        with self._changed:
            ended: list[tuple[OnCompiled, ConchError]] = []
            compilation = self._pending.get(self._current) if self._current is not None else None
            if compilation is not None and self._processor_time() - self._current_start > self._max_seconds:
                compilation.refusal = self._remember(compilation.structure, self._too_much(compilation.structure))
                ended += [(on_compiled, compilation.refusal) for _, on_compiled in compilation.waiting]
                compilation.waiting = []
            now = self._clock()
            for other in self._pending.values():
                late = [on_compiled for deadline, on_compiled in other.waiting if deadline <= now]
                if late:
                    other.waiting = [(deadline, wait) for deadline, wait in other.waiting if deadline > now]
                    ended += [(on_compiled, self._late()) for on_compiled in late]
        for on_compiled, error in ended:
            on_compiled(None, error)

    def _too_much(self, structure: Structure) -> ConchError:
        return invalid(
            f"the {structure.kind} that output must fit does not compile within {self._max_seconds:g} s of "
            f"processor time (parameter 'structured_output_timeout')"
        )

    def _late(self) -> ConchError:
        return unavailable(
            f"the server is busy: structures are being compiled, and this one has waited for {self._wait_seconds:g} s"
        )

    def _keep(self, structure: Structure, compiled: Any) -> None:
        """Keep a compiled structure for later requests; sequences copy it before they change it."""
        self._known[structure] = compiled
        while len(self._known) > _REMEMBERED or sum(len(known.text) for known in self._known) > _REMEMBERED_LENGTH:
            self._known.popitem(last=False)

    def _remember(self, structure: Structure, error: ConchError) -> ConchError:
        self._refused[structure] = error
        if len(self._refused) > _REMEMBERED:
            self._refused.popitem(last=False)
        return error

    def _start(self) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=target, name=name, daemon=True)
                for target, name in ((self._run, COMPILING), (self._watch, f"{COMPILING}-watch"))
            ]
            for thread in self._threads:
                thread.start()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
            self.look()
            sleep(_LOOK_SECONDS)

    def _run(self) -> None:
        with self._group.joined():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._pending)
                    compilation = next(iter(self._pending.values()))
                    self._current, self._current_start = compilation.structure, self._processor_time()
                compiled, error = self._compiled(compilation) if compilation.waiting else (None, None)
                with self._changed:
                    del self._pending[compilation.structure]
                    self._current = None
                    if error is not None and error.code is Code.INVALID_ARG:
                        self._remember(compilation.structure, error)
                    elif compiled is not None and compilation.refusal is None:
                        self._keep(compilation.structure, compiled)
                for _, on_compiled in compilation.waiting:
                    on_compiled(compiled, error)

    def _compiled(self, compilation: _Compilation) -> tuple[Any, ConchError | None]:
        try:
            return self._engine.compile(compilation.structure), None
        except Exception as raised:  # from a library, about this structure
            return None, failure(raised)
