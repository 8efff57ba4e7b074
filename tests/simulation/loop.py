"""An asyncio event loop with virtual time and a schedule drawn from a seed.

Which orders are permitted
--------------------------
The simulation may only produce orders that can occur in a server on asyncio or uvloop:

* Callbacks of ``call_soon`` run in the order in which they were scheduled. Both loops keep one first-in, first-out
  queue, so the simulation never reorders it. Tasks that wake each other keep their order for the same reason.
* I/O is polled between two rounds of that queue. The order of the events of one poll is free (epoll's is
  arbitrary), except that one descriptor is reported once and its bytes keep their order. Events may come before
  or after timers of the same round: asyncio handles I/O first, uvloop timers.
* The time of I/O is free: bytes take any time to arrive, may arrive in several parts, and a process may be reaped
  before or after its socket reports the end. Bytes of one socket never overtake each other.
* Timers run in the order of their deadlines. Deadlines are never equal, as on a real clock: every callback and every
  reading of the clock takes some time. The duration of callbacks is free, sometimes seconds, as on a busy machine.
  Therefore the order of timers set in different callbacks is free as far as these durations allow.
* A thread runs at any speed: its effects become visible between any two callbacks, and its completion is appended
  to the queue (``call_soon_threadsafe``) at that moment, also in the middle of a round. A pool starts its work in the
  order of submission, on all its threads. Here a thread's work runs in a greenlet: it is preempted only where it
  blocks, whereas a real thread may be preempted anywhere.
* No event is lost or invented: each event happens once.

All code outside the loop (threads, sockets, processes, other servers) calls :meth:`SimulatedLoop.later`. Its events
happen when they are due, also between two callbacks, and are not callbacks of the loop.
"""

from __future__ import annotations

import asyncio
import random
from asyncio.events import Handle
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Any

from tests.simulation.virtual_time import VirtualClock


class NothingHappens(Exception):
    """The loop would wait forever: nothing is ready, and no timer or event is left."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks on ``clock`` in an order drawn from ``random``; polls the descriptors created by :meth:`open`.

    ``slowness`` is the probability of a long callback (up to two seconds), as on a busy machine.
    """

    def __init__(self, clock: VirtualClock, random: random.Random, slowness: float = 0.0) -> None:
        super().__init__()
        self.clock = clock
        self.random = random
        self.slowness = slowness
        self.failures: list[str] = []
        self.callbacks = 0
        #: Additional time of each of the next calls in threads (s).
        self.slow_calls: list[float] = []
        #: Additional time to read the files of each model (s).
        self.hangs: dict[str, float] = {}
        #: The number of calls that run in threads.
        self.busy_threads = 0
        #: The network that ``create_server`` and ``create_connection`` use.
        self.network: Any = None
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._event_count = 0
        self._arrived: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._readers: dict[int, Handle] = {}
        self._writers: dict[int, Handle] = {}
        self._descriptors: dict[int, Any] = {}
        self._pools: dict[object, Any] = {}
        self.set_exception_handler(self._note_failure)

    # Time

    def time(self) -> float:
        self.clock.now_ns += 1_000
        return self.clock.now_ns / 1e9

    def later(self, seconds: float, event: Callable[[], object]) -> None:
        """Schedule an event outside the loop after ``seconds``."""
        self._event_count += 1
        heappush(self._events, (self.clock.now_ns + int(seconds * 1e9) + 1, self._event_count, event))

    def latency(self, typical: float = 0.0005) -> float:
        """Return a duration outside the loop (s): usually about ``typical``, sometimes a hundred times that."""
        draw = self.random.random()
        return typical * (draw * 2 if draw < 0.9 else draw * 10 if draw < 0.98 else draw * 100)

    def arrive(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Report an I/O event at the next poll; call from an event."""
        self._arrived.append((callback, arguments))

    # The round

    def _run_once(self) -> None:
        scheduled, ready, clock = self._scheduled, self._ready, self.clock
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heappop(scheduled)._scheduled = False
        self._happen()
        if not ready and not self._stopping and not self._readable_now() and not self._arrived:
            self._wait(scheduled)
        self._look(scheduled)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            self.callbacks += 1
            handle._run()
            draw = self.random.random()
            clock.now_ns += int(draw * 100_000) + 1_000
            if draw < self.slowness:
                clock.now_ns += int(self.random.random() ** 3 * 2e9)
            if self._events and self._events[0][0] <= clock.now_ns:
                self._happen()
        handle = None

    def _wait(self, scheduled: list[Any]) -> None:
        """Advance the time to the next event."""
        while scheduled and scheduled[0]._cancelled:
            heappop(scheduled)._scheduled = False
        timer = int(scheduled[0]._when * 1e9) + 1 if scheduled else None
        event = self._events[0][0] if self._events else None
        if timer is None and event is None:
            raise NothingHappens
        self.clock.advance_to(min(when for when in (timer, event) if when is not None))
        self._happen()

    def _happen(self) -> None:
        while self._events and self._events[0][0] <= self.clock.now_ns:
            heappop(self._events)[2]()

    def _readable_now(self) -> bool:
        return any(self._descriptors[fd].readable for fd in self._readers) or any(
            self._descriptors[fd].writable for fd in self._writers
        )

    def _look(self, scheduled: list[Any]) -> None:
        """Add the callbacks of I/O events and of timers that are due."""
        first = self.random.random() < 0.5
        if first:
            self._add_timers(scheduled)
        found = [Handle(callback, arguments, self) for callback, arguments in self._arrived]
        self._arrived.clear()
        found += [handle for fd, handle in self._readers.items() if self._descriptors[fd].readable]
        found += [handle for fd, handle in self._writers.items() if self._descriptors[fd].writable]
        if len(found) > 1:
            self.random.shuffle(found)
        self._ready.extend(found)
        if not first:
            self._add_timers(scheduled)

    def _add_timers(self, scheduled: list[Any]) -> None:
        now = self.clock.now_ns / 1e9
        while scheduled and scheduled[0]._when <= now:
            handle = heappop(scheduled)
            handle._scheduled = False
            self._ready.append(handle)

    # Descriptors

    def open(self, descriptor: Any) -> int:
        """Give a descriptor a number that no real one has; it has the attributes ``readable`` and ``writable``."""
        fd = 1_000_000 + len(self._descriptors)
        self._descriptors[fd] = descriptor
        return fd

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self.remove_reader(fd)
        self._readers[fd] = Handle(callback, args, self)

    def remove_reader(self, fd: Any) -> bool:
        return self._remove(self._readers, fd)

    def add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self.remove_writer(fd)
        self._writers[fd] = Handle(callback, args, self)

    def remove_writer(self, fd: Any) -> bool:
        return self._remove(self._writers, fd)

    @staticmethod
    def _remove(handles: dict[int, Handle], fd: int) -> bool:
        handle = handles.pop(fd, None)
        if handle is not None:
            handle.cancel()
        return handle is not None

    def left(self) -> list[str]:
        """Describe everything that still waits for I/O or a timer."""
        timers = [handle for handle in self._scheduled if not handle._cancelled]
        return [
            *(f"reader of descriptor {fd}: {handle!r}" for fd, handle in self._readers.items()),
            *(f"writer of descriptor {fd}: {handle!r}" for fd, handle in self._writers.items()),
            *(f"timer {handle!r}" for handle in timers),
        ]

    # Methods that BaseEventLoop leaves to its subclasses

    def _write_to_self(self) -> None:
        """Do nothing: no other thread could wake the loop."""

    def _process_events(self, event_list: Any) -> None:
        """Do nothing: :meth:`_look` adds events."""

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
        """Do nothing: signals are not simulated."""

    def remove_signal_handler(self, sig: int) -> bool:
        return False

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        from tests.simulation.threads import SimulatedPool

        if executor not in self._pools:
            self._pools[executor] = SimulatedPool(self, getattr(executor, "_max_workers", 6))
        future = self._pools[executor].submit(partial(func, *args))
        return asyncio.wrap_future(future, loop=self)

    def duration_of(self, call: Any) -> float:
        """Return the duration of a call in a thread (s)."""
        seconds = self.latency(0.0002) + (self.slow_calls.pop() if self.slow_calls else 0.0)
        while isinstance(call, partial):
            # ``asyncio.to_thread`` passes a partial of ``Context.run``, with the function and its arguments.
            function, *arguments = (call.func, *call.args)
            if getattr(function, "__name__", "") == "run" and arguments:
                function, *arguments = arguments
            if getattr(function, "__name__", "") == "describe" and arguments:
                return seconds + self.hangs.get(arguments[0], 0.0)
            call = function
        return seconds

    async def sock_recv(self, sock: Any, size: int) -> bytes:
        while not sock.readable:
            arrived = self.create_future()
            self.add_reader(sock.fileno(), lambda arrived=arrived: arrived.done() or arrived.set_result(None))
            try:
                await arrived
            finally:
                self.remove_reader(sock.fileno())
        return sock.recv(size)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        return self.network.listen(protocol_factory, host, port)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        return await self.network.connect(protocol_factory, host, port)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: the threads of the simulation end with it."""

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        exception = context.get("exception")
        where = context.get("task") or context.get("future") or context.get("handle")
        self.failures.append(f"{context.get('message')}: {exception!r} in {where!r}")
