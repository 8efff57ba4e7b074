"""Runs functions of ``work.py``: at once for small bodies, in at most two processes for large ones.

A server has one ``Offloader``; its front ends use it on the event loop. A process starts with the first large body. It
ends after a while without work, or after work that took much memory. It is killed if the work takes too long.
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
from mmap import mmap
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple, Unpack

from conch.core.errors import ConchError, cancelled, error_text, internal, invalid, unavailable
from conch.core.inference import InferRequest
from conch.core.tensors import Buffer, WireTensor
from conch.core.validation import has_strings
from conch.frontends.budget import ByteBudget
from conch.frontends.offloading import messages
from conch.frontends.offloading.messages import Header, Packing, SharedMessage, unpack
from conch.frontends.offloading.work import strings
from conch.machine.memory import resident_bytes
from conch.machine.processes import TICKS, activity
from conch.machine.threads import LastingExecutor
from conch.workers.host.spawn import SpawnedProcess

LOG = logging.getLogger("conch")
Ts = TypeVarTuple("Ts")
T = TypeVar("T")

#: Larger bodies and responses (bytes) go to a process. Up to this size, they take the event loop at most 20 ms;
#: lists of empty lists take longest.
LARGE_BYTES: Final = 256 << 10
#: Work of this size or more (bytes; for a compressed body, its maximum decompressed size) is left to the first process.
HUGE_BYTES: Final = 8 << 20
#: Maximum queue length for each kind of work.
_MAX_QUEUED_HUGE: Final = 32
_MAX_QUEUED_OTHERS: Final = 512
#: Maximum number of BYTES elements counted on the event loop.
_MAX_COUNTED_STRINGS: Final = 20_000
#: Messages larger than this (bytes) are written in a thread.
_LARGE_MESSAGE: Final = 1 << 20
#: The time for which an idle process is kept (s).
_IDLE_SECONDS: Final = 20.0
#: Interval at which a working process is checked (s).
_CHECK_SECONDS: Final = 0.1
#: A process whose memory has exceeded this (bytes) is replaced.
_KEPT_MEMORY: Final = 256 << 20
#: Default ratio of the wall-clock limit to the processor time limit, for a busy machine.
_BUSY: Final = 5
#: The timeout for cancelled work to end (s): about the time to start a process.
GRACE_SECONDS: Final = 0.5


def has_many_strings(tensor: WireTensor) -> bool:
    """Whether checking an input takes long: the check reads each element of BYTES data that is not counted."""
    return (
        tensor.datatype == "BYTES"
        and tensor.elements is None
        and len(tensor.data) > LARGE_BYTES
        and has_strings(tensor.data, _MAX_COUNTED_STRINGS)
    )


class Sized(Protocol):
    @property
    def size(self) -> int: ...


_Sized = TypeVar("_Sized", bound=Sized)


class OffloadQueue(list[_Sized]):
    """Work in order of arrival.

    There are two processes. The first takes the oldest work, so that no work waits forever. The second takes the
    smallest work below ``HUGE_BYTES``, so that large work cannot delay all the rest.
    """

    def put(self, work: _Sized) -> None:
        """Queue work. Raises UNAVAILABLE if the queue is full."""
        huge = work.size >= HUGE_BYTES
        if sum((queued.size >= HUGE_BYTES) is huge for queued in self) >= (
            _MAX_QUEUED_HUGE if huge else _MAX_QUEUED_OTHERS
        ):
            raise unavailable("too many large requests wait to be decoded; try again later")
        self.append(work)

    def take(self, *, smallest: bool) -> _Sized | None:
        """Return the oldest work, or the smallest below ``HUGE_BYTES``; None if there is none."""
        if not smallest:
            return self.pop(0) if self else None
        chosen = min(
            (queued for queued in self if queued.size < HUGE_BYTES), key=lambda queued: queued.size, default=None
        )
        if chosen is not None:
            self.remove(chosen)
        return chosen


@dataclass(eq=False, slots=True)
class OffloadedCall:
    """A call of ``function``: its packed arguments, its ``size`` for the queue, and the future of the result."""

    function: str
    arguments: Any
    packing: Packing
    size: int
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class OffloadingProcess:
    """A process that does one piece of work at a time.

    ``usable`` is False after it has been closed or killed, or has exited; ``on_exit`` is called when it has ended.
    Raises OSError if it cannot be started.
    """

    def __init__(self, threads: Executor, on_exit: Callable[[OffloadingProcess], None]) -> None:
        self._threads = threads
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            with theirs:
                fd = theirs.fileno()
                program = f"from conch.frontends.offloading.work import main; main({fd})"
                popen = subprocess.Popen(
                    [sys.executable, "-P", "-c", program],
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
        self.usable = True

    async def perform(
        self, work: OffloadedCall, check: Callable[[], ConchError | None]
    ) -> tuple[Header, list[memoryview], mmap]:
        """Return the reply of the process. Drops the arguments as soon as they are written.

        Calls ``check`` at intervals; if it returns an error, kills the process and raises the error. Raises EOFError if
        the process has ended, UNAVAILABLE if there is not enough memory, the errors of the work's callables, and
        CANCELLED if the process asks for a call after the caller has gone.
        """
        await self._send({"function": work.function, "arguments": work.arguments}, work.packing.parts)
        reply = await self._receive(check)
        while "ask" in reply[0]:
            packing = Packing(work.packing.callables)
            try:
                if work.result.done():
                    raise cancelled()  # the caller is gone and would not release a model that a callable holds
                result = packing.pack(work.packing.callables[reply[0]["ask"]](reply[0]["argument"]))
            except ConchError:
                await self._reply({"refused": True})
                await self._receive(check)
                raise
            await self._reply({"result": result}, packing.parts)
            reply = await self._receive(check)
        return reply

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
        self.usable = False
        self._socket.close()

    def kill(self) -> None:
        """End the process now; its work fails with EOFError."""
        self.usable = False
        self._process.kill()

    async def _send(self, header: Header, parts: list[Buffer]) -> None:
        if sum(map(len, parts)) > _LARGE_MESSAGE:
            message = await self._loop.run_in_executor(self._threads, SharedMessage, header, parts)
        else:
            message = SharedMessage(header, parts)
        parts.clear()
        with message:
            try:
                message.send(self._socket)
            except OSError:
                raise EOFError("the process has ended") from None

    async def _reply(self, header: Header, parts: list[Buffer] | None = None) -> None:
        """Reply to a question of the process.

        If that fails, the process is abandoned, because it would take the next work for the reply.
        """
        try:
            await self._send(header, parts or [])
        except ConchError as error:
            raise EOFError(f"the process got no response: {error}") from None

    async def _receive(self, check: Callable[[], ConchError | None]) -> tuple[Header, list[memoryview], mmap]:
        readable = self._loop.create_future()
        fd = self._socket.fileno()
        self._loop.add_reader(fd, _wake, readable)
        try:
            while not (await asyncio.wait([readable], timeout=_CHECK_SECONDS))[0]:
                if (error := check()) is not None:
                    self.kill()
                    raise error
        finally:
            self._loop.remove_reader(fd)
        try:
            return messages.receive(self._socket)
        except OSError:
            raise EOFError("the process has ended") from None

    def _exited(self) -> None:
        self.usable = False
        self.ended.set()
        self._on_exit(self)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _environment() -> dict[str, str]:
    """Return this process's environment, with its search path, and with a single thread for linear algebra."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class _ProcessSlot:
    """A slot for a process: the process, its current work, and the timer that ends it when idle."""

    def __init__(self, smallest: bool) -> None:
        self.smallest = smallest
        self.process: OffloadingProcess | None = None
        self.work: OffloadedCall | None = None
        self.task: asyncio.Task[None] | None = None
        self.idle: asyncio.TimerHandle | None = None


class Offloader:
    """Calls functions of ``work.py`` here or in its processes.

    Each call may use ``memory`` (bytes), ``seconds`` of processor time, and ``wall_seconds`` on a busy machine, in a
    process. ``budget`` counts the results of processes.
    """

    def __init__(self, memory: int, seconds: float, budget: ByteBudget, *, wall_seconds: float = 0.0) -> None:
        self._budget = budget
        self._memory = memory
        self.seconds = seconds
        self.wall_seconds = wall_seconds or _BUSY * seconds
        self._waiting: OffloadQueue[OffloadedCall] = OffloadQueue()
        self._slots = (_ProcessSlot(smallest=False), _ProcessSlot(smallest=True))
        self._running: set[OffloadingProcess] = set()
        self._threads = LastingExecutor(len(self._slots), "conch-offloading")
        self._closed = False

    async def run(self, size: int, function: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
        """Return ``function(*arguments)``: called here without waiting up to ``LARGE_BYTES``, otherwise in a process.

        ``size`` is the size (bytes) of what is decoded or encoded; for a compressed body, its maximum decompressed
        size. A process returns views instead of bytes. Cancelling the call cancels the work. Raises the errors of the
        function; for a large body also INVALID_ARG if it takes too much memory or processor time, UNAVAILABLE if the
        queue is full or the machine is too busy.
        """
        if size <= LARGE_BYTES:
            return function(*arguments)
        if self._closed:
            raise unavailable("Server exiting")
        packing = Packing()
        work = OffloadedCall(function.__name__, packing.pack(list(arguments)), packing, size)
        del arguments, packing
        self._waiting.put(work)
        self._start_work()
        try:
            result: T = await work.result
            return result
        except asyncio.CancelledError:
            self._cancel(work)
            raise
        finally:
            del work  # an error refers to this frame, which would refer back to it

    async def count_strings(self, request: InferRequest) -> None:
        """Count the elements of the BYTES inputs that validation would take long to count."""
        tensors = list(filter(has_many_strings, request.inputs.values()))
        size = sum(len(tensor.data) for tensor in tensors)
        counts = await self.run(size, strings, request.model_name, request.id, tensors)
        for tensor, count in zip(tensors, counts, strict=True):
            tensor.elements = count

    async def close(self) -> None:
        """End the processes and return when they have ended; what still waits fails."""
        self._closed = True
        for work in self._waiting:
            if not work.result.done():
                work.result.set_exception(unavailable("Server exiting"))
        self._waiting.clear()
        running = list(self._running)
        for process in running:
            process.kill()
        await asyncio.gather(*[slot.task for slot in self._slots if slot.task is not None])
        for slot in self._slots:
            self._dismiss(slot)
        await asyncio.gather(*(process.ended.wait() for process in running))
        self._threads.shutdown()

    def _start_work(self) -> None:
        for slot in self._slots:
            if slot.task is None and (work := self._waiting.take(smallest=slot.smallest)) is not None:
                slot.work = work
                slot.task = asyncio.get_running_loop().create_task(self._do_work(slot))

    async def _do_work(self, slot: _ProcessSlot) -> None:
        """Do the work of a lane, and the following work while there is some."""
        while slot.work is not None:
            await self._perform(slot, slot.work)
            slot.work = None if self._closed else self._waiting.take(smallest=slot.smallest)
        slot.task = None
        if slot.process is not None:
            slot.idle = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._dismiss, slot)

    async def _perform(self, slot: _ProcessSlot, work: OffloadedCall) -> None:
        """Do some work in the process of a lane, and set its result or its error."""
        try:
            result = await self._result(slot, work)
        except ConchError as failure:
            error: ConchError = failure
        except Exception as failure:
            LOG.exception("a large request could not be decoded")
            error = internal(error_text(failure))
        else:
            if not work.result.done():
                work.result.set_result(result)
            return
        if not work.result.done():
            work.result.set_exception(error.with_traceback(None))

    async def _result(self, slot: _ProcessSlot, work: OffloadedCall) -> Any:
        process = self._process(slot)
        try:
            reply, parts, memory = await process.perform(work, self._limits(process))
        except EOFError:
            process.kill()
            if self._closed:
                raise unavailable("Server exiting") from None
            raise internal("the process that decodes large requests has ended; try again") from None
        except ConchError:
            raise  # the process was killed or has been notified, or has received nothing
        except BaseException:
            process.kill()
            raise
        if reply["peak"] > _KEPT_MEMORY:
            process.close()
        if "traceback" in reply:
            LOG.error("a large request could not be decoded:\n%s", reply["traceback"])
        if "error" in reply:
            raise unpack(reply["error"], parts)
        self._count(memory, sum(map(len, parts)))
        return unpack(reply["result"], parts)

    def _limits(self, process: OffloadingProcess) -> Callable[[], ConchError | None]:
        """Return a function that returns the error of work that exceeds a limit from now on.

        A limit of the operating system would not work: libraries reserve many times the memory that they use.
        """
        clock = asyncio.get_running_loop().time
        until, before = clock() + self.wall_seconds, process.processor_seconds
        task = "decoding the request, or encoding its response, takes more than"

        def check() -> ConchError | None:
            if process.resident > self._memory:
                return invalid(f"{task} {self._memory} bytes of memory. Use --offload-memory to increase the limit.")
            if process.processor_seconds - before > self.seconds:
                return invalid(
                    f"{task} {self.seconds:g} s of processor time. Use --offload-timeout-secs to increase the limit."
                )
            if clock() > until:
                return unavailable(f"the server is busy: {task} {self.wall_seconds:g} s")
            return None

        return check

    def _count(self, memory: mmap, size: int) -> None:
        """Count the bytes of a result while any part of it is referenced.

        Raises UNAVAILABLE if the budget is exhausted.
        """
        if not self._budget.take(size):
            self._budget.release(size)
            raise self._budget.refusal()
        weakref.finalize(memory, self._budget.release, size).atexit = False

    def _process(self, slot: _ProcessSlot) -> OffloadingProcess:
        if self._closed:
            raise unavailable("Server exiting")
        if slot.idle is not None:
            slot.idle.cancel()
            slot.idle = None
        if slot.process is not None and not slot.process.usable:
            self._dismiss(slot)
        if slot.process is None:
            try:
                slot.process = OffloadingProcess(self._threads, self._running.discard)
                self._running.add(slot.process)
            except OSError as error:
                raise unavailable(f"cannot start a process that decodes large requests: {error.strerror}") from None
        return slot.process

    def _dismiss(self, slot: _ProcessSlot) -> None:
        """Release a process, which then ends."""
        if slot.idle is not None:
            slot.idle.cancel()
            slot.idle = None
        if slot.process is not None:
            slot.process.close()
            slot.process = None

    def _cancel(self, work: OffloadedCall) -> None:
        """Cancel some work: it is not started, or gets a grace period to end."""
        if work in self._waiting:
            self._waiting.remove(work)
        for slot in self._slots:
            if slot.work is work:
                asyncio.get_running_loop().call_later(GRACE_SECONDS, self._end, slot, work)

    def _end(self, slot: _ProcessSlot, work: OffloadedCall) -> None:
        if slot.work is work and slot.process is not None:
            slot.process.kill()
