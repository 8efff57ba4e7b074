"""The codec: decodes large requests and encodes large responses in at most two helper processes.

A server has one codec; its front ends use it on the event loop. A process starts with the first piece of work. It ends
after a while without work, or after work that took much memory. It is killed if the work takes too long.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

from conch.core.errors import ConchError, internal, invalid, unavailable
from conch.core.tensors import Buffer
from conch.frontends.budget import ByteBudget
from conch.frontends.offloading import memory
from conch.frontends.offloading.documents import read_error
from conch.frontends.offloading.memory import Header, SharedMessage, split
from conch.machine.memory import resident_bytes
from conch.machine.processes import TICKS, activity
from conch.machine.threads import LastingExecutor
from conch.workers.host.spawn import SpawnedProcess

# There are two processes. The first takes the oldest work, so that no work waits forever. The second takes the smallest
# work that is not ``GIANT``, so that large work cannot delay all the rest.


#: Work of this size or more (bytes; for a compressed body, its maximum decompressed size) is left to the first process.
GIANT: Final = 8 << 20
#: Maximum queue length for each kind of work.
_MOST_GIANTS: Final = 32
_MOST_OTHERS: Final = 512


class Sized(Protocol):
    @property
    def size(self) -> int: ...


_Work = TypeVar("_Work", bound=Sized)


class CodecQueue(list[_Work]):
    """Work in order of arrival."""

    def put(self, work: _Work) -> None:
        """Queue work. Raises UNAVAILABLE if the queue is full."""
        giant = work.size >= GIANT
        if sum((queued.size >= GIANT) is giant for queued in self) >= (_MOST_GIANTS if giant else _MOST_OTHERS):
            raise unavailable("too many large requests wait to be decoded; try again later")
        self.append(work)

    def take(self, *, smallest: bool) -> _Work | None:
        """Return the oldest work, or the smallest that is not ``GIANT``; None if there is none."""
        if not smallest:
            return self.pop(0) if self else None
        chosen = min((queued for queued in self if queued.size < GIANT), key=lambda queued: queued.size, default=None)
        if chosen is not None:
            self.remove(chosen)
        return chosen


# Runs on the event loop, in the thread with which the process ends.


_PROGRAM = Path(__file__).with_name("program.py")
#: Messages larger than this (bytes) are written in a thread.
_LARGE = 1 << 20

#: Answers a question of the process, or raises to refuse the request.
OpenAiResponse = Callable[[Header], Header]


class CodecProcess:
    """One process, of whose end ``on_exit`` is told.  Raises OSError where it cannot be started."""

    def __init__(self, threads: Executor, on_exit: Callable[[CodecProcess], None]) -> None:
        self._threads = threads
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            with theirs:
                fd = theirs.fileno()
                popen = subprocess.Popen(
                    [sys.executable, "-P", str(_PROGRAM), str(fd)],
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(fd,),
                )
            self._process = SpawnedProcess(popen.pid, popen.wait, None, self._exited)
        except OSError:
            self._socket.close()
            raise
        self.pid = popen.pid
        self.ended = asyncio.Event()
        self._closed = False

    async def perform(
        self, header: Header, parts: list[Buffer], answer: OpenAiResponse | None
    ) -> tuple[Header, memoryview]:
        """Return the reply of the process to some work. Empties ``parts`` as soon as they are written.

        Raises EOFError if the process has ended, UNAVAILABLE if there is not enough memory, and the errors of
        ``answer``.
        """
        await self._send(header, parts)
        reply, body = await self._receive()
        if "ask" not in reply:
            return reply, body
        assert answer is not None
        try:
            told = answer(reply["ask"])
        except ConchError:
            await self._tell({"refused": True})
            await self._receive()
            raise
        await self._tell(told)
        return await self._receive()

    @property
    def resident(self) -> int:
        """The resident memory of the process (bytes), 0 if unknown."""
        return resident_bytes(self.pid)

    @property
    def processor_seconds(self) -> float:
        """The processor time of the process (s), 0 if unknown."""
        seen = activity(self.pid)
        return 0.0 if seen is None else seen.cpu / TICKS

    def close(self) -> None:
        """Let the process end when it has completed its work."""
        if not self._closed:
            self._closed = True
            self._socket.close()

    def kill(self) -> None:
        """End the process now; its work fails with EOFError."""
        self._process.kill()

    async def _send(self, header: Header, parts: list[Buffer]) -> None:
        write = partial(SharedMessage, header, parts)
        large = sum(map(len, parts)) > _LARGE
        message = await self._loop.run_in_executor(self._threads, write) if large else write()
        del write
        parts.clear()
        with message:
            try:
                message.send(self._socket)
            except OSError:
                raise EOFError("the codec process has ended") from None

    async def _tell(self, header: Header) -> None:
        """Answer a question of the process.

        If that fails, the process is abandoned, because it would take the next work for the answer.
        """
        try:
            await self._send(header, [])
        except ConchError as error:
            raise EOFError(f"the offloading process sent no response: {error}") from None

    async def _receive(self) -> tuple[Header, memoryview]:
        readable = self._loop.create_future()
        fd = self._socket.fileno()
        self._loop.add_reader(fd, _wake, readable)
        try:
            await readable
        finally:
            self._loop.remove_reader(fd)
        try:
            return memory.receive(self._socket)
        except OSError:
            raise EOFError("the codec process has ended") from None

    def _exited(self) -> None:
        self.ended.set()
        self._on_exit(self)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _environment() -> dict[str, str]:
    """Return this process's environment, with its search path, and with a single thread for linear algebra."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


LOG = logging.getLogger("conch")

#: Larger bodies and responses (bytes) go to a process: up to this size they take the event loop at most 20 ms, whatever
#: they contain (lists of empty lists take longest).
LARGE: Final = 256 << 10
#: How long an idle process is kept (s).
_IDLE_SECONDS: Final = 20.0
#: Interval at which a working process is checked (s).
_WATCH_SECONDS: Final = 0.1
#: A process whose memory has exceeded this (bytes) is replaced.
_KEPT_MEMORY: Final = 256 << 20
#: Default ratio of the wall-clock limit to the processor time limit, for a busy machine.
_BUSY: Final = 5
#: How long cancelled work may take to end (s): about as long as starting a process.
GRACE_SECONDS: Final = 0.5


@dataclass(eq=False)
class CodecWork:
    """A piece of work: the message for the process, its ``size`` for the queue, and the future of the reply."""

    header: Header
    parts: list[Buffer]
    size: int
    answer: OpenAiResponse | None
    reply: asyncio.Future[tuple[Header, list[memoryview]]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class _Lane:
    """A slot for a process: the process, its current work, and the timer that ends it when idle."""

    def __init__(self, smallest: bool) -> None:
        self.smallest = smallest
        self.process: CodecProcess | None = None
        self.work: CodecWork | None = None
        self.task: asyncio.Task[None] | None = None
        self.idle: asyncio.TimerHandle | None = None


class Codec:
    """Runs work in the codec processes.

    Each piece of work may use ``memory`` (bytes), ``seconds`` of processor time, and ``wall_seconds`` on a busy
    machine. ``budget`` counts the results.
    """

    def __init__(self, memory: int, seconds: float, budget: ByteBudget, *, wall_seconds: float = 0.0) -> None:
        self._budget = budget
        self._memory = memory
        self.seconds = seconds
        self.wall_seconds = wall_seconds or _BUSY * seconds
        self._waiting: CodecQueue[CodecWork] = CodecQueue()
        self._lanes = (_Lane(smallest=False), _Lane(smallest=True))
        self._running: set[CodecProcess] = set()
        self._threads = LastingExecutor(len(self._lanes), "conch-codec")
        self._closed = False

    async def run(
        self, header: Header, parts: list[Buffer], *, size: int | None = None, answer: OpenAiResponse | None = None
    ) -> tuple[Header, list[memoryview]]:
        """Return the result of ``header["work"]`` on ``parts``, which is emptied: a header and buffers.

        ``size`` (bytes) is the size for the queue, by default that of the parts. ``answer`` answers questions of the
        process. Cancelling the call cancels the work. Raises the error of an invalid request, INVALID_ARG for a request
        that takes too much memory or processor time, UNAVAILABLE if the queue is full or the machine is too busy.
        """
        if self._closed:
            raise unavailable("Server exiting")
        work = CodecWork(header, parts, sum(map(len, parts)) if size is None else size, answer)
        del parts
        self._waiting.put(work)
        self._dispatch()
        try:
            return await work.reply
        except asyncio.CancelledError:
            self._give_up(work)
            raise
        finally:
            del work  # an error refers to this frame, which would refer back to it

    async def close(self) -> None:
        """End the processes and return when they have ended; what still waits fails."""
        self._closed = True
        for work in self._waiting:
            if not work.reply.done():
                work.reply.set_exception(unavailable("Server exiting"))
        self._waiting.clear()
        running = list(self._running)
        for process in running:
            process.kill()
        await asyncio.gather(*[lane.task for lane in self._lanes if lane.task is not None])
        for lane in self._lanes:
            self._dismiss(lane)
        await asyncio.gather(*(process.ended.wait() for process in running))
        self._threads.shutdown()

    def _dispatch(self) -> None:
        for lane in self._lanes:
            if lane.work is None and (work := self._waiting.take(smallest=lane.smallest)) is not None:
                lane.work = work
                lane.task = asyncio.get_running_loop().create_task(self._perform(lane, work))

    async def _perform(self, lane: _Lane, work: CodecWork) -> None:
        """Run some work in a process, then dispatch the next."""
        result: tuple[Header, list[memoryview]] | None = None
        error: Exception | None = None
        try:
            result = await self._result(lane, work)
        except ConchError as failure:
            error = failure
        except Exception as failure:
            LOG.exception("a large request could not be decoded")
            error = internal(f"{type(failure).__name__}: {failure}")
        # Dispatch first: the caller that waits for the reply may add work.
        lane.work = lane.task = None
        if not self._closed:
            self._dispatch()
        if lane.work is None and lane.process is not None:
            lane.idle = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._dismiss, lane)
        if work.reply.done():
            return
        if error is not None:
            work.reply.set_exception(error.with_traceback(None))
        else:
            assert result is not None
            work.reply.set_result(result)

    async def _result(self, lane: _Lane, work: CodecWork) -> tuple[Header, list[memoryview]]:
        process = self._process(lane)
        watching = asyncio.get_running_loop().create_task(self._watch(process))
        try:
            reply, body = await process.perform(work.header, work.parts, work.answer)
        except EOFError:
            process.kill()
            self._dismiss(lane)
            if watching.done():
                raise watching.result() from None
            if self._closed:
                raise unavailable("Server exiting") from None
            raise internal("the process that decodes large requests has ended; try again") from None
        except ConchError:
            raise  # the process was told, or has not received anything
        except BaseException:
            process.kill()
            self._dismiss(lane)
            raise
        finally:
            watching.cancel()
        if reply["peak"] > _KEPT_MEMORY:
            self._dismiss(lane)
        if "traceback" in reply:
            LOG.error("a large request could not be decoded:\n%s", reply["traceback"])
        if "error" in reply:
            raise read_error(reply["error"])
        self._count(body)
        result: Header = reply["result"]
        return result, split(body, result.pop("parts"))

    def _count(self, body: memoryview) -> None:
        """Count the bytes of a result while any part of it is referenced.

        Raises UNAVAILABLE if the budget is exhausted.
        """
        if not self._budget.take(len(body)):
            self._budget.release(len(body))
            raise self._budget.refusal()
        weakref.finalize(body.obj, self._budget.release, len(body)).atexit = False

    async def _watch(self, process: CodecProcess) -> ConchError:
        """Kill a process that exceeds a limit; returns the error of the work.

        A limit of the operating system would not work: libraries reserve many times the memory that they use.
        """
        loop = asyncio.get_running_loop()
        until, before = loop.time() + self.wall_seconds, process.processor_seconds
        task = "decoding the request, or encoding its answer, takes more than"
        error: ConchError | None = None
        while error is None:
            if process.resident > self._memory:
                error = invalid(f"{task} {self._memory} bytes of memory. Use --codec-memory to increase the limit.")
            elif process.processor_seconds - before > self.seconds:
                error = invalid(
                    f"{task} {self.seconds:g} s of processor time. Use --codec-timeout-secs to increase the limit."
                )
            elif loop.time() > until:
                error = unavailable(f"the server is busy: {task} {self.wall_seconds:g} s")
            else:
                await asyncio.sleep(_WATCH_SECONDS)
        process.kill()
        return error

    def _process(self, lane: _Lane) -> CodecProcess:
        if self._closed:
            raise unavailable("Server exiting")
        if lane.idle is not None:
            lane.idle.cancel()
            lane.idle = None
        if lane.process is not None and lane.process.ended.is_set():
            self._dismiss(lane)
        if lane.process is None:
            try:
                lane.process = CodecProcess(self._threads, self._running.discard)
                self._running.add(lane.process)
            except OSError as error:
                raise unavailable(f"cannot start a process that decodes large requests: {error.strerror}") from None
        return lane.process

    def _dismiss(self, lane: _Lane) -> None:
        """Release a process, which then ends."""
        if lane.idle is not None:
            lane.idle.cancel()
            lane.idle = None
        if lane.process is not None:
            lane.process.close()
            lane.process = None

    def _give_up(self, work: CodecWork) -> None:
        """Cancel some work: it is not started, or gets a grace period to end."""
        if work in self._waiting:
            self._waiting.remove(work)
        for lane in self._lanes:
            if lane.work is work and lane.process is not None:
                asyncio.get_running_loop().call_later(GRACE_SECONDS, self._end, lane, work)

    def _end(self, lane: _Lane, work: CodecWork) -> None:
        if lane.work is work and lane.process is not None:
            lane.process.kill()
