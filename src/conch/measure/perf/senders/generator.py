"""Starts the processes that send requests, each with its own event loop, connections and share of the load.

The measuring process uses :class:`Generators`, which starts the processes, distributes the load and collects the
records. ``_main`` runs in each process.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from random import randrange
from time import monotonic_ns, process_time
from typing import Any, Final

import numpy as np

from conch.core.errors import internal
from conch.measure.perf.requests.payload import Payloads, SequencePlan, SequenceSource
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.channels.grpc import GrpcChannel, Rpc, StreamChannel
from conch.measure.perf.senders.channels.http import EventChannel, HttpChannel, ReadEvent
from conch.measure.perf.senders.load import ClosedLoad, OpenLoad, Schedule, Sending, share_of
from conch.measure.perf.senders.records import (
    CallChannel,
    Collected,
    Judge,
    RecordBuffer,
    Unfinished,
    join_events,
    read_events,
    read_records,
)

_CTRL_C: Final = {signal.SIGINT}
#: The timeout for a process to end (s).
_END_SECONDS: Final = 5.0


class PipedProcesses:
    """Processes with a pipe each, at whose end they exit; SIGINT is blocked in them from their first instruction.

    If a process ignored the signal itself, a signal during its imports would end it with a traceback.
    """

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []

    def start(self, main: Callable[..., None], *arguments: Any) -> Connection:
        """Call ``main`` in a new process, with one end of a pipe and ``arguments``; return the other end."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=main, args=(theirs, *arguments), daemon=True)
        resource_tracker.ensure_running()  # it would unblock the signal if it were started below
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _CTRL_C)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.pipes.append(ours)
        self._processes.append(process)
        return ours

    def close(self) -> None:
        """Close the pipes, and kill the processes that do not exit."""
        for pipe in self.pipes:
            pipe.close()
        for process in self._processes:
            process.join(_END_SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()


#: Timeout of a sending process for a reply (s); it replies between requests.
_TIMEOUT: Final = 30.0
#: The number of the first request is random and below this bound.
_NUMBERS: Final = 1_000_000
_DIED: Final = "a process that sends requests has died"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests to send, and their destination.

    ``sent`` describes the payloads. ``method`` is the method of gRPC calls, None for HTTP; ``streams`` keeps gRPC calls
    open from request to request.

    ``read`` parses responses that are text, or streams of text; it is None for other responses, which are only examined
    if ``judge`` validates them. ``decoupled`` is whether a request in a stream may have several responses.
    ``sequences`` groups the payloads into sequences, None for stateless models. ``timeout`` is the limit for a request
    (s).
    """

    address: Address
    payloads: Payloads
    method: Rpc | None = None
    streams: bool = False
    decoupled: bool = False
    read: ReadEvent | None = None
    judge: Judge | None = None
    sequences: SequencePlan | None = None
    timeout: float = 600.0
    sent: str = ""

    @property
    def generates(self) -> bool:
        """Whether a response arrives in parts with meaningful timestamps."""
        return self.read is not None or self.decoupled

    def connect(self, loop: asyncio.AbstractEventLoop) -> CallChannel:
        """Return a channel to the server."""
        if self.method is not None:
            if self.streams:
                return StreamChannel(loop, self.address, self.method, self.judge, decoupled=self.decoupled)
            return GrpcChannel(loop, self.address, self.method, self.judge)
        if self.read is not None:
            return EventChannel(loop, self.address, self.read)
        return HttpChannel(loop, self.address, self.judge)


class Generators:
    """The ``count`` sending processes; the slots of callers are numbered across all of them."""

    def __init__(self, traffic: Traffic, count: int) -> None:
        self._processes = PipedProcesses()
        self._pipes = self._processes.pipes
        #: The number of unread replies of each process.
        self._unread = [0] * count
        # Random, so that texts differ from those of earlier senders.
        first = randrange(_NUMBERS)
        for number in range(count):
            self._processes.start(_main, traffic, number, count, first)
        self._query_all("ready")

    def __enter__(self) -> Generators:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def run_closed(self, concurrency: int, requests: int = 0) -> None:
        """Set the number of callers, evenly distributed over the processes, and the number of requests (0: no limit).

        Each process gets a number of requests in proportion to its callers: a process without callers would never send
        its part.
        """
        started = 0
        for number, pipe in enumerate(self._pipes):
            callers = self._share(concurrency, number)
            part = requests * (started + callers) // concurrency - requests * started // concurrency
            started += callers
            self._send(pipe, "closed", callers, part if requests else None)

    def run_open(self, schedule: Schedule, start: int, max_calls: int, requests: int = 0) -> None:
        """Start requests at the times of ``schedule`` from ``start`` on (ns, monotonic), ``max_calls`` at a time.

        ``requests`` limits the number of requests in all (0: no limit).
        """
        for number, pipe in enumerate(self._pipes):
            share = max(1, self._share(max_calls, number))
            self._send(pipe, "open", schedule, start, share, self._share(requests, number) if requests else None)

    def progress(self) -> int:
        """Return the number of requests completed since :meth:`collect`."""
        return sum(self._query_all("progress"))

    def _share(self, count: int, number: int) -> int:
        return count // len(self._pipes) + (number < count % len(self._pipes))

    def pause(self) -> None:
        """Start no more requests."""
        for pipe in self._pipes:
            self._send(pipe, "pause")

    def collect(self) -> Collected:
        """Return the records since the last call; raises INTERNAL if a process has died."""
        replies = self._query_all("collect")
        records = [read_records(reply["rows"]) for reply in replies]
        events = join_events(zip(records, (read_events(reply["events"]) for reply in replies), strict=True))
        errors: Counter[str] = Counter()
        for reply in replies:
            errors.update(reply["errors"])
        left = [part for reply in replies for part in reply["unfinished"]]
        return Collected(
            np.concatenate(records), events,
            Unfinished(
                sum(part.count for part in left), min((part.first_due for part in left if part.count), default=0)
            ),
            errors,
            max(reply["busy"] for reply in replies),
        )  # fmt: skip

    def close(self) -> None:
        """End the processes and their requests."""
        self._processes.close()

    def _query_all(self, question: str) -> list[Any]:
        for number, pipe in enumerate(self._pipes):
            self._unread[number] += 1
            self._send(pipe, question)
        return [self._last_reply(number) for number in range(len(self._pipes))]

    def _last_reply(self, number: int) -> Any:
        """Return the reply to the last question; Ctrl+C may have left the reply to an earlier one unread."""
        reply = None
        while self._unread[number]:
            reply = self._receive(self._pipes[number])
            self._unread[number] -= 1
        return reply

    def _receive(self, pipe: Connection) -> Any:
        if not pipe.poll(_TIMEOUT):
            raise internal(f"a process that sends requests has not responded for {_TIMEOUT:g} s")
        try:
            return pipe.recv()
        except (EOFError, OSError):
            raise internal(_DIED) from None

    def _send(self, pipe: Connection, *what: Any) -> None:
        try:
            pipe.send(what)
        except OSError:
            raise internal(_DIED) from None


def _main(pipe: Connection, traffic: Traffic, number: int, count: int, first: int) -> None:
    """Run a share of the load as the pipe commands, until the pipe is closed."""
    import uvloop

    # Ctrl+C is for the measuring process, which shows its results and then ends this process. Signals to the whole
    # process group, such as those of `timeout`, are ignored too: this process ends with its pipe in any case.
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)
    # Each caller has an HTTP connection, and the default limit of shells is 1024 files.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    # Pauses of the garbage collector would be counted as latency of the server.
    gc.freeze()
    gc.disable()
    sender = _Sender(loop, traffic, number, count, first)

    def execute() -> None:
        try:
            while pipe.poll():
                reply = sender.execute(*pipe.recv())
                if reply is not None:
                    pipe.send(reply)
        except (EOFError, OSError):
            loop.stop()

    loop.add_reader(pipe.fileno(), execute)
    os.set_blocking(pipe.fileno(), True)  # uvloop made it non-blocking, and a reply may exceed the buffer of the pipe
    try:
        loop.run_forever()
    finally:
        os._exit(0)


class _Sender:
    """The loads and records of one sending process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, traffic: Traffic, number: int, count: int, first: int) -> None:
        self._number, self._count = number, count
        self._records = RecordBuffer()
        connect = partial(traffic.connect, loop)
        self._sending = Sending(
            loop, connect, traffic.payloads, self._records, traffic.timeout, itertools.count(first + number, count)
        )
        self._sequences = traffic.sequences
        self._closed: ClosedLoad | None = None
        self._open: OpenLoad | None = None
        self._last_collection = (monotonic_ns(), process_time())

    def execute(self, what: str, *arguments: Any) -> Any:
        """Execute a command of the measuring process; return the reply, None if there is none."""
        match what:
            case "ready":
                return True
            case "closed":
                self._closed_load().run(*arguments)
            case "open":
                schedule, start, max_calls, requests = arguments
                moments = share_of(schedule, start, self._number, self._count)
                self._open_load(max_calls).run(moments if requests is None else islice(moments, requests))
            case "pause":
                if self._closed is not None:
                    self._closed.run(0)
                if self._open is not None:
                    self._open.stop()
            case "progress":
                return self._records.count
            case "collect":
                return self._collect()
        return None

    def _closed_load(self) -> ClosedLoad:
        if self._closed is None:
            self._closed = ClosedLoad(self._sending, self._sequence_source(), self._number * 100_000)
        return self._closed

    def _open_load(self, max_calls: int) -> OpenLoad:
        if self._open is None:
            self._open = OpenLoad(self._sending, self._sequence_source(), max_calls)
        return self._open

    def _sequence_source(self) -> SequenceSource | None:
        return SequenceSource(self._sequences, self._number, self._count) if self._sequences is not None else None

    def _loads(self) -> list[ClosedLoad | OpenLoad]:
        return [load for load in (self._closed, self._open) if load is not None]

    def _collect(self) -> dict[str, Any]:
        rows, events = self._records.take()
        loads = self._loads()
        errors: Counter[str] = Counter()
        for load in loads:
            errors.update(load.errors)
            load.errors = {}
        before, self._last_collection = self._last_collection, (monotonic_ns(), process_time())
        wall = (self._last_collection[0] - before[0]) / 1e9
        return {
            "rows": rows, "events": events, "errors": errors,
            "unfinished": [load.unfinished() for load in loads],
            "busy": (self._last_collection[1] - before[1]) / wall if wall > 0 else 0.0,
        }  # fmt: skip
