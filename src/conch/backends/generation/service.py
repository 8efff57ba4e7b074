"""The thread that runs an engine: requests come and go between its steps.

The thread that reads the server's frames submits and cancels; this one makes all calls to the engine and sends what
each step brought, for all requests in one frame.  A step that fails ends the worker: its requests fail, and the server
starts another.
"""

from __future__ import annotations

import heapq
import os
import threading
import traceback
from collections.abc import Callable
from itertools import count
from queue import Empty, SimpleQueue
from time import monotonic_ns, sleep
from typing import Any, Final

from conch.backends.generation.engine import EngineRequest as Prompt
from conch.backends.generation.engine import GenerationEngine, Progress
from conch.backends.generation.job import Job
from conch.backends.generation.reports import Report
from conch.backends.native.arrays import Request, Result, failure
from conch.errors import ConchError, cancelled, internal, unavailable
from conch.workers.child.channel import Channel
from conch.workers.child.packing import Packer

#: How long a step waits for the reading thread at most.
LET_IN_NS: Final = 10_000_000
#: Status of a worker whose engine is broken.
BROKEN: Final = 70

Pack = Callable[[Request, Result | ConchError, Packer], dict[str, Any]]


class GenerationService:
    """Runs the jobs of a worker.

    ``pack`` makes a response's part of a frame.  With ``reserve`` a job starts once the KV cache has room for all that
    it may become, so that no running sequence is ever put back; otherwise as soon as the engine takes it.
    ``arriving`` tells whether the reading thread has something to do.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        channel: Channel,
        pack: Pack,
        *,
        reserve: bool = False,
        arriving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._pack = pack
        self._arriving = arriving
        self._reserve = reserve and engine.cache_tokens > 0
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._numbers = count(1)
        self._orders = count(1)
        self._jobs: dict[int, Job] = {}  # by serial number
        self._waiting: list[tuple[int, int, Job]] = []
        self._owners: dict[int, tuple[Job, int]] = {}  # by engine's sequence: the number of its first continuation
        self._timed: dict[int, Job] = {}  # that must begin before their deadline
        self._reserved = 0
        self._report = Report()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="conch-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Have a job run; from the reading thread."""
        self._commands.put(lambda: self._take(job))

    def cancel(self, serial: int) -> None:
        """Give a request up; without effect when it has ended.  From the reading thread."""
        self._commands.put(lambda: self._cancel(serial))

    def stop(self, seconds: float = 5.0) -> None:
        """End what is under way, close the engine and wait for that."""
        self._commands.put(self._stop)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                self._refuse_late()
                self._admit()
                self._deal_with(self._engine.step())
            self._engine.close()
        except BaseException as error:
            self._break(error)

    def _obey(self) -> None:
        """Carry out what the reading thread asked for; waits for that while there is nothing else to do.

        An engine may keep the interpreter for the whole of a step, so what has arrived is let in before.
        """
        until = 0
        while True:
            try:
                self._commands.get(block=self._idle)()
            except Empty:
                until = until or monotonic_ns() + LET_IN_NS
                if monotonic_ns() >= until or not self._arriving():
                    return
                sleep(0.0002)

    @property
    def _idle(self) -> bool:
        return not (self._engine.busy or self._waiting or self._report.changed or self._stopping)

    def _take(self, job: Job) -> None:
        job.order = next(self._orders)
        self._jobs[job.request.serial] = job
        if job.deadline:
            self._timed[job.request.serial] = job
        if job.reply.stops:
            for other in list(self._jobs.values()):
                if other.request.id == job.reply.stops and other is not job:
                    self._finish(other)
        if job.reply.prompts:
            heapq.heappush(self._waiting, (job.priority, job.order, job))
        else:
            self._respond(job)

    def _cancel(self, serial: int) -> None:
        job = self._jobs.get(serial)
        if job is not None:
            self._end(job, cancelled("Request was cancelled"), "abort")

    def _stop(self) -> None:
        self._stopping = True
        for job in list(self._jobs.values()):
            self._end(job, cancelled("Request was cancelled"), "abort")
        self._send()

    def _refuse_late(self) -> None:
        """End the jobs that have waited too long for their first token."""
        if self._timed:
            now = monotonic_ns()
            self._timed = {serial: job for serial, job in self._timed.items() if serial in self._jobs and not job.first}
            for job in [job for job in self._timed.values() if now >= job.deadline]:
                self._end(job, unavailable("Request timeout expired"), "abort")

    def _admit(self) -> None:
        """Give the engine the jobs that it has room for, the most important and then the oldest first."""
        while self._waiting:
            job = self._waiting[0][2]
            if job.request.serial not in self._jobs:  # cancelled
                heapq.heappop(self._waiting)
                continue
            needed = self._needed(job)
            if self._reserve and self._reserved and self._reserved + needed > self._engine.cache_tokens:
                return
            heapq.heappop(self._waiting)
            self._reserved += needed
            self._add(job)

    def _needed(self, job: Job) -> int:
        """Tokens of KV cache, in whole blocks, that a job may come to take."""
        block = self._engine.block_tokens
        return sum(
            -(-(len(prompt) + sampling.max_tokens) // block) * block * sampling.beam_width
            for prompt, sampling in job.reply.prompts
        )

    def _add(self, job: Job) -> None:
        job.added = monotonic_ns()
        first = 0
        try:
            for prompt, sampling in job.reply.prompts:
                number = next(self._numbers)
                self._engine.add(Prompt(number, prompt, sampling, job.priority))
                self._owners[number] = job, first
                job.running[number] = set(range(first, first + sampling.n))
                first += sampling.n
        except Exception as error:  # what an engine cannot take is the request's own
            self._end(job, failure(error), "error")

    def _deal_with(self, steps: list[Progress]) -> None:
        now = monotonic_ns()
        touched: dict[Job, None] = {}
        for step in steps:
            job, first = self._owners.get(step.id, (None, 0))
            if job is None:
                continue
            if step.error is not None:
                self._end(job, step.error, "error")
                touched.pop(job, None)
                continue
            try:
                self._progress(job, first + step.beam, step, now)
            except Exception as error:  # a tokenizer's, say: this request's own
                self._end(job, failure(error), "error")
                touched.pop(job, None)
                continue
            touched[job] = None
        for job in touched:
            self._respond(job)
        if steps or self._report.changed:
            self._send()

    def _progress(self, job: Job, index: int, step: Progress, now: int) -> None:
        if index not in job.running.get(step.id, ()):
            return
        if step.tokens:
            fresh = len(step.tokens)
            job.generated += fresh
            self._report.tokens(job, fresh, now)
        reason = job.reply.take(index, step)
        if reason:
            job.reasons.append(reason)
            still = job.running[step.id]
            still.remove(index)
            if not still:
                del job.running[step.id], self._owners[step.id]
                if not step.finish:
                    self._engine.cancel(step.id)

    def _respond(self, job: Job) -> None:
        final = job.ended
        results = job.reply.responses(final)
        for position, result in enumerate(results, 1):
            self._report.respond(job, result, final and position == len(results))
        if final:
            self._forget(job)

    def _finish(self, job: Job) -> None:
        """End a job with what it has."""
        self._leave(job, "abort")
        self._respond(job)

    def _end(self, job: Job, error: ConchError, reason: str) -> None:
        """End a job with an error."""
        self._leave(job, reason)
        self._report.respond(job, error, True)
        self._forget(job)

    def _leave(self, job: Job, reason: str) -> None:
        """Take a job's sequences out of the batch."""
        job.reasons.extend([reason] * max(sum(len(still) for still in job.running.values()), 1))
        for number in job.running:
            self._engine.cancel(number)
            self._owners.pop(number, None)
        job.running.clear()

    def _forget(self, job: Job) -> None:
        del self._jobs[job.request.serial]
        if job.added:
            self._reserved -= self._needed(job)
        self._report.end(job)

    def _send(self) -> None:
        """Send what has happened since the last frame."""
        packer = Packer()
        waiting = sum(len(job.reply.prompts) for _, _, job in self._waiting if job.request.serial in self._jobs)
        frame = self._report.frame(self._engine, waiting, lambda request, result: self._pack(request, result, packer))
        self._channel.send(frame, packer)

    def _break(self, error: BaseException) -> None:
        """The engine cannot go on: fail what is under way and end the worker."""
        traceback.print_exception(error)
        failed = failure(error)
        failed = internal(f"engine '{self._engine.name}' failed: {failed.message}")
        for job in list(self._jobs.values()):
            job.running.clear()
            job.reasons.append("error")
            self._report.respond(job, failed, True)
            self._forget(job)
        try:
            self._send()
        finally:
            os._exit(BROKEN)
