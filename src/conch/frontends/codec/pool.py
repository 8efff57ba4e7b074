"""The codec: large requests are decoded and large answers encoded in at most two processes beside the server.

One belongs to a server and is used by its front ends, on the event loop.  A process is started for the first piece of
work and ends when there has been none for a while, or when one took much memory; it is killed when one takes too long.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from dataclasses import dataclass, field
from typing import Final

from conch.errors import ConchError, internal, invalid, unavailable
from conch.frontends.budget import ByteBudget
from conch.frontends.codec.documents import read_error
from conch.frontends.codec.memory import Header, split
from conch.frontends.codec.process import Answer, CodecProcess
from conch.frontends.codec.waiting import CodecQueue
from conch.tensors import Buffer
from conch.threads import LastingExecutor

LOG = logging.getLogger("conch")

#: Bodies and answers of more bytes than this are decoded and encoded by a process: up to here it takes the event loop
#: 20 ms at most, whatever they contain (lists of empty lists take longest).
LARGE: Final = 256 << 10
#: How long a process without work is kept (s).
_IDLE_SECONDS: Final = 20.0
#: How often one that works is looked after (s).
_WATCH_SECONDS: Final = 0.1
#: One that has had more memory than this (bytes) is not kept.
_KEPT_MEMORY: Final = 256 << 20
#: By default, how many times as long a piece of work may take on a busy machine as the processor time that it may take.
_BUSY: Final = 5
#: How long what nobody waits for any more may take to end (s): starting a process takes about as long.
_GRACE_SECONDS: Final = 0.5


@dataclass(eq=False)
class CodecWork:
    """A piece of work: what a process is sent, its ``size`` for the queue, and the future that gets the reply."""

    header: Header
    parts: list[Buffer]
    size: int
    answer: Answer | None
    reply: asyncio.Future[tuple[Header, list[memoryview]]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class _Lane:
    """A place for a process: the process, what it does, and when it is given up for lack of work."""

    def __init__(self, smallest: bool) -> None:
        self.smallest = smallest
        self.process: CodecProcess | None = None
        self.work: CodecWork | None = None
        self.task: asyncio.Task[None] | None = None
        self.idle: asyncio.TimerHandle | None = None


class Codec:
    """Each piece of work is limited to ``memory`` (bytes), ``seconds`` of processor time, and ``wall_seconds`` on a
    busy machine; ``budget`` counts its results."""

    def __init__(self, memory: int, seconds: float, budget: ByteBudget, *, wall_seconds: float = 0.0) -> None:
        self._budget = budget
        self._memory = memory
        self.seconds = seconds
        self.wall_seconds = wall_seconds or _BUSY * seconds
        self._waiting: CodecQueue[CodecWork] = CodecQueue()
        self._lanes = (_Lane(smallest=False), _Lane(smallest=True))
        self._threads = LastingExecutor(len(self._lanes), "conch-codec")
        self._closed = False

    async def run(
        self, header: Header, parts: list[Buffer], *, size: int | None = None, answer: Answer | None = None
    ) -> tuple[Header, list[memoryview]]:
        """The result of ``header["work"]`` on ``parts``, which is emptied: a header, and buffers.

        ``size`` (bytes) is how large the work counts, that of the parts unless given; ``answer`` answers what the
        process asks.  A caller that is cancelled gives the work up.  Raises the error of a request that is wrong,
        INVALID_ARG for one that takes too much memory or processor time, UNAVAILABLE where too many wait or the machine
        is too busy.
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
            del work  # an error refers to this frame, and would be referred to by it

    async def close(self) -> None:
        """End the processes; what still waits fails."""
        self._closed = True
        for work in self._waiting:
            if not work.reply.done():
                work.reply.set_exception(unavailable("Server exiting"))
        self._waiting.clear()
        for lane in self._lanes:
            if lane.task is not None and lane.process is not None:
                lane.process.kill()
        await asyncio.gather(*[lane.task for lane in self._lanes if lane.task is not None])
        for lane in self._lanes:
            self._dismiss(lane)
        self._threads.shutdown(wait=False)

    def _dispatch(self) -> None:
        for lane in self._lanes:
            if lane.work is None and (work := self._waiting.take(smallest=lane.smallest)) is not None:
                lane.work = work
                lane.task = asyncio.get_running_loop().create_task(self._perform(lane, work))

    async def _perform(self, lane: _Lane, work: CodecWork) -> None:
        """Have a process do some work, and go on with the next."""
        result: tuple[Header, list[memoryview]] | None = None
        error: Exception | None = None
        try:
            result = await self._result(lane, work)
        except ConchError as failure:
            error = failure
        except Exception as failure:
            LOG.exception("a large request could not be decoded")
            error = internal(f"{type(failure).__name__}: {failure}")
        # Dispatching first: whoever waits for the reply may have work of its own.
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
            raise  # the process was told, or has not been sent anything
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
        """Count the bytes of a result for as long as somebody has a part of it.  Raises UNAVAILABLE for too many."""
        if not self._budget.take(len(body)):
            self._budget.release(len(body))
            raise self._budget.refusal()
        weakref.finalize(body.obj, self._budget.release, len(body)).atexit = False

    async def _watch(self, process: CodecProcess) -> ConchError:
        """Kill a process that takes too much; returns what the work fails with.

        A limit of the system's would not do: libraries reserve many times the memory that they come to use.
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
        if lane.process is not None and lane.process.exited:
            self._dismiss(lane)
        if lane.process is None:
            try:
                lane.process = CodecProcess(self._threads)
            except OSError as error:
                raise unavailable(f"cannot start a process that decodes large requests: {error.strerror}") from None
        return lane.process

    def _dismiss(self, lane: _Lane) -> None:
        """Let a process go: it ends by itself."""
        if lane.idle is not None:
            lane.idle.cancel()
            lane.idle = None
        if lane.process is not None:
            lane.process.close()
            lane.process = None

    def _give_up(self, work: CodecWork) -> None:
        """Nobody waits for some work any more: it is not begun, or has a moment to end."""
        if work in self._waiting:
            self._waiting.remove(work)
        for lane in self._lanes:
            if lane.work is work and lane.process is not None:
                asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._end, lane, work)

    def _end(self, lane: _Lane, work: CodecWork) -> None:
        if lane.work is work and lane.process is not None:
            lane.process.kill()
