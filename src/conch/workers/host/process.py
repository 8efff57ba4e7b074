"""The server's side of a worker process: sends it batches, passes on its responses, notices its end.

Runs on the event loop of the server.  A ``WorkerProcess`` knows nothing of schedulers: it is given batches and calls
back.  Every request given to it ends, whenever the process does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any

from conch import logs
from conch.errors import Code, ConchError, internal, unavailable
from conch.inference import InferRequest, InferResponse
from conch.workers.child.channel import Frame
from conch.workers.child.heartbeat import SIZE, HeartbeatSample, read_heartbeat
from conch.workers.child.packing import Packer, Unpacker
from conch.workers.host.execution import Execution, description, response_of, responses_of, take_times
from conch.workers.host.link import Link
from conch.workers.host.liveness import (
    DEFAULT_WORKER_TIMEOUTS,
    Cause,
    Kill,
    LivenessSample,
    Verdict,
    WorkerTimeouts,
    not_ended,
    unhealthy,
)
from conch.workers.host.model_calls import ANSWERS, ModelCalls
from conch.workers.host.preparation import Preparation
from conch.workers.host.spawn import ChildProcess, Spawn, spawn

# Belongs to a ``WorkerProcess``; on the event loop.


class Expiries:
    """The timers of the requests that have not been dropped yet."""

    def __init__(self) -> None:
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def add(self, request: InferRequest, cancel: Callable[[InferRequest], None]) -> None:
        """Answer a request that expires when its time is over.

        Its place is free when the worker has given it up, which ``cancel`` asks of it.
        """
        seconds = (request.expires - monotonic_ns()) / 1e9
        self._timers[request.serial] = asyncio.get_running_loop().call_later(seconds, _expire, request, cancel)

    def drop(self, request: InferRequest) -> None:
        """The worker is done with a request, whose time may be hours: no timer is kept for it."""
        timer = self._timers.pop(request.serial, None)
        if timer is not None:
            timer.cancel()


def _expire(request: InferRequest, cancel: Callable[[InferRequest], None]) -> None:
    if not request.finished:
        cancel(request)
        request.fail(unavailable("Request timeout expired"))


# Belongs to a ``WorkerProcess``; on the event loop.


class WorkerLog:
    """The log lines of one worker."""

    def __init__(self) -> None:
        self._lines = 0
        self._prompting = False

    def line(self, text: str, name: str, pid: int) -> None:
        """Log a line that the model, or a program that it started, wrote to standard output or error."""
        self._lines += 1
        logs.emit_from_worker("INFO", "output", self._lines, text, name, pid)

    def message(self, header: dict[str, Any], said: set[str], name: str, pid: int) -> None:
        """Log a message, unless it is for ``once`` and among those that workers of the model have ``said``."""
        text = header["message"]
        if header.get("once"):
            if text in said:
                return
            said.add(text)
        logs.emit_from_worker(header["level"], header["file"], header["line"], text, name, pid)

    def at_prompt(self, opened: bool) -> None:
        """Keep the log's lines while a debugger's prompt is open at the terminal, and write them when it closes."""
        if opened == self._prompting:
            return
        self._prompting = opened
        if opened:
            logs.hold()
        else:
            logs.release()


LOG = logging.getLogger("conch")

#: How long the end of a killed process is waited for (s); one that waits for a disk does not end before it has that.
KILL_SECONDS = 2.0


class WorkerProcess:
    """One worker, from its start to its end.

    ``on_exit`` is called once when the process has ended, after its requests have been failed, unless :meth:`stop`
    was called before.
    """

    def __init__(self, name: str, spawn: Spawn = spawn, timeouts: WorkerTimeouts = DEFAULT_WORKER_TIMEOUTS) -> None:
        self.name = name
        #: The model that it runs, for metrics.
        self.model = ""
        self.timeouts = timeouts
        self._spawn = spawn
        self.on_exit: Callable[[WorkerProcess], None] | None = None
        #: Called with every response that a response sender gave, before the request gets it.
        self.on_response_sent: Callable[[InferRequest, InferResponse], None] | None = None
        #: Called when requests have been prepared and their lengths are known.
        self.on_prepared: Callable[[], None] | None = None
        #: Called after each step of a worker that generates: what it has under way and has done since the last one.
        self.on_progress: Callable[[Mapping[str, Any]], None] | None = None
        #: How many requests a worker that generates takes at a time; 0 for any other.
        self.slots = 0
        #: Whether requests keep their inputs while they run, since the model may reschedule them.
        self.reschedules = False
        #: What its model runs with, by name (``engine``, ``precision`` …), once it has started.
        self.runtime_facts: dict[str, str] = {}
        #: What its model's answers depend on outside of the version's directory, once it has started.
        self.dependencies: list[tuple[str, str]] = []
        #: What has been logged for the model once and for all; its workers share it.
        self.said: set[str] = set()
        self._worker_log = WorkerLog()
        self.alive = False
        #: Whether its model is being loaded, from the first frame to the end of its warm-up.
        self.loading = False
        #: What the watch found at its last look.
        self.verdict = Verdict()
        #: Called when the server kills the worker for something.
        self.on_kill: Callable[[WorkerProcess, Cause], None] | None = None
        self._killed: Kill | None = None
        self._heartbeat: memoryview | None = None
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, InferRequest] = {}
        #: What its model asks of the server; nothing is answered until somebody says who does.
        self.calls = ModelCalls(lambda header, packer: self._link.send(header, packer), self._running)
        self._expiries = Expiries()
        self._executions: dict[int, Execution] = {}
        self._batches = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._stopping = False
        self._idle: asyncio.Event | None = None  # only while somebody waits for it
        self._ended = asyncio.Event()
        self._link: Link
        self._preparation: Preparation
        self._process: ChildProcess

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The status of a process that has ended; negative for a signal."""
        return self._process.exit_status

    @property
    def shared_bytes(self) -> int:
        """The size of the memory that the server and the worker share for tensors."""
        return self._link.shared_bytes if self.alive else 0

    @property
    def sample(self) -> LivenessSample:
        """What tells whether the worker runs; read several times a second."""
        heartbeat = read_heartbeat(self._heartbeat) if self._heartbeat is not None else HeartbeatSample()
        # One that generates has its requests for as long as they generate: the steps of its engine are watched instead.
        execution = 0 if self.slots else next(iter(self._executions), 0)
        return LivenessSample(heartbeat, execution, self.loading, self.calls.busy)

    @property
    def idle(self) -> bool:
        """Whether no request is with the worker."""
        return not self._running and not self._executions

    def start(self, init: dict[str, Any], *, python: str, environment: dict[str, str]) -> None:
        """Start the process with the frame ``init``; call from the main thread, whose end it does not survive.

        Raises OSError when that is not possible.
        """
        self._process, connection = self._spawn(python, environment, self._exited, self._printed)
        self.alive = True
        self._link = Link(connection, self._received, self._hung_up)
        self._preparation = Preparation(self._link.send)
        self._link.send({"op": "init", **init})

    async def ask(self, header: dict[str, Any]) -> dict[str, Any]:
        """Send a frame and wait for its answer; a ``failed`` answer and the worker's death are raised."""
        if not self.alive:
            raise self._unhealthy()
        self._answer = self._loop.create_future()
        self._link.send(header)
        answer = await self._answer
        if answer["op"] == "failed":
            code, message, public = answer["error"]
            raise ConchError(message, Code[code], public=public)
        return answer

    def execute(self, requests: Sequence[InferRequest], on_done: Callable[[Execution], None]) -> None:
        """Run a batch; ``on_done`` is called once, before the requests get the responses that came with it.

        Each request ends with its final response, which a response sender may give later.
        """
        execution = Execution(requests, on_done)
        if not self.alive:
            self._fail_execution(execution, self._unhealthy())
            return
        self._batches += 1
        self._executions[self._batches] = execution
        packer = Packer()
        described = []
        for request in requests:
            request.times.started = execution.started
            request.on_cancel = self.cancel
            self._running[request.serial] = request
            if request.expires:
                self._expiries.add(request, self.cancel)
            if request.holder is self and self._preparation.take(request):
                request.holder = None
                described.append({"serial": request.serial})
            else:
                if request.holder is not None:
                    request.holder.drop(request)  # another worker prepared it
                fields = description(request, packer)
                if self.slots:
                    fields["arrived"], fields["deadline"] = request.times.arrived, request.deadline
                    fields["priority"] = request.priority
                described.append(fields)
            if not self.reschedules:
                request.inputs = {}  # they go to the worker, however long that will take
        try:
            self._link.send({"op": "execute", "batch": self._batches, "requests": described}, packer)
        except (ConchError, OSError) as error:  # no memory to share, no descriptor left
            del self._executions[self._batches]
            failure = internal(f"the request could not be passed to its worker: {error}")
            # Not from here: its end makes the caller run the next batch, which may fail as well.
            self._loop.call_soon(self._fail_execution, execution, failure)

    def prepare(self, requests: Sequence[InferRequest]) -> None:
        """Have the worker decode requests that wait, so that it knows how long they are and starts them sooner.

        A request that ends before it runs is dropped there too.
        """
        if self.alive:
            self._preparation.add(requests, self)

    def drop(self, request: InferRequest) -> None:
        """Have the worker forget a request that it prepared and that will not run here."""
        request.holder = None
        if self.alive:
            self._preparation.drop(request)

    def cancel(self, request: InferRequest) -> None:
        """Tell the model that nobody waits for this request any more."""
        if self.alive and request.serial in self._running:
            self._link.send({"op": "cancel", "serial": request.serial})

    def set_log(self, log: dict[str, Any]) -> None:
        """Tell the model's logger which levels are wanted now."""
        if self.alive:
            self._link.send({"op": "log", "log": log})

    async def finish(self) -> None:
        """Wait until no request is with the worker, within the timeout of an unload."""
        if not self.idle:
            self._idle = asyncio.Event()
            try:
                await asyncio.wait_for(self._idle.wait(), self.timeouts.unload or None)
            except TimeoutError:
                self.kill_for(not_ended(self.timeouts.unload, idle=False))

    async def stop(self, seconds: float | None = None) -> None:
        """Let the model finalize and wait for the process to end; kill it after ``seconds``, or after its timeout.

        With 0 a worker without requests is not asked first, and nothing is held against it.
        """
        self._stopping = True
        if self.alive and self.idle and seconds == 0:
            self.kill()
        elif self.alive:
            seconds = self.timeouts.finalize if seconds is None else seconds
            self._link.send({"op": "stop"})
            try:
                await asyncio.wait_for(self._ended.wait(), seconds)
            except asyncio.CancelledError:
                self.kill()
                raise
            except TimeoutError:
                self.kill_for(not_ended(seconds, idle=self.idle))
        await self._ended.wait()

    def heed(self, verdict: Verdict) -> None:
        """Take over what the watch has found."""
        if verdict.responsive != self.verdict.responsive and verdict.kill is None and not self.loading:
            if verdict.responsive:
                LOG.info("worker of '%s' (pid %d) responds again", self.name, self.pid)
            else:
                LOG.warning("worker of '%s' (pid %d) does not respond", self.name, self.pid)
        self.verdict = verdict
        if verdict.kill is not None:
            self.kill_for(verdict.kill)

    def kill_for(self, kill: Kill) -> None:
        """Kill the process and say why: in the log, in metrics, and to the clients whose requests it has."""
        if not self.alive or self._killed is not None:
            return
        self._killed = kill
        LOG.error("worker of '%s' (pid %d) is killed: %s", self.name, self.pid, kill.reason)
        if self.on_kill is not None:
            self.on_kill(self, kill.cause)
        self.kill()

    def kill(self) -> None:
        """End the process now, by its id; what it was doing fails."""
        self._process.kill()
        if self.alive:
            self._loop.call_later(KILL_SECONDS, self._exited)

    async def ended(self) -> None:
        """Wait until the process has ended and its requests have been failed."""
        await self._ended.wait()

    def _printed(self, line: str) -> None:
        self._worker_log.line(line, self.name, self.pid)

    def _received(self, frames: list[Frame]) -> None:
        for frame in frames:
            self._handle(frame)
        if self._idle is not None and self.idle:
            self._idle.set()
        if self.alive and not self._executions:
            self._link.flush()

    def _handle(self, frame: Frame) -> None:
        header, payload = frame
        op = header["op"]
        try:
            if op == "done":
                self._done(header, Unpacker(payload, self._link.regions))
            elif op == "response":
                request = self._running.get(header["serial"])  # unpacked in any case, so that its memory goes back
                response = response_of(header, Unpacker(payload, self._link.regions), header["final"], request)
                self._deliver(header["serial"], response)
            elif op == "progress":
                self._progress(header, Unpacker(payload, self._link.regions))
            elif op == "prepared":
                self._preparation.note_lengths(header["lengths"])
                if self.on_prepared is not None:
                    self.on_prepared()
            elif op == "log":
                self._worker_log.message(header, self.said, self.name, self.pid)
            elif op == "prompt":
                self._worker_log.at_prompt(header["open"])
            elif op == "heartbeat":
                self._heartbeat = memoryview(self._link.regions.get(header["region"]))[:SIZE]
            elif op in ANSWERS and self._answer is not None and not self._answer.done():
                self._answer.set_result(header)
            elif op not in ANSWERS and not self.calls.handle(header, Unpacker(payload, self._link.regions)):
                raise internal("nothing takes it")
        except (ConchError, LookupError, TypeError, ValueError) as error:
            self._hung_up(internal(f"frame {op!r}: {error!r}"))

    def _done(self, header: dict[str, Any], unpacker: Unpacker) -> None:
        execution = self._executions.pop(header["batch"])
        execution.times = tuple(header["times"])
        execution.work = header.get("work") or {}
        error = header.get("error")
        if error is not None:
            self._fail_execution(execution, ConchError(error[1], Code[error[0]]))
            return
        responses = responses_of(header["responses"], unpacker, execution.requests)
        if "rescheduled" in header:
            execution.rescheduled = [execution.requests[place] for place in header["rescheduled"]]
        execution.on_done(execution)
        for request, response in zip(execution.requests, responses, strict=True):
            take_times(request, execution.times)
            if response is not None:
                self._respond(request, response)

    def _progress(self, header: dict[str, Any], unpacker: Unpacker) -> None:
        """Pass on the responses of one step of a worker that generates, to any of its requests."""
        responses = [(one["serial"], response_of(one, unpacker, one["final"])) for one in header["responses"]]
        if self.on_progress is not None:
            self.on_progress(header["load"])
        for batch, times in header["done"]:
            execution = self._executions.pop(batch)
            execution.times = tuple(times)
            for request in execution.requests:
                take_times(request, execution.times)
            execution.on_done(execution)
        for serial, response in responses:
            self._deliver(serial, response)

    def _deliver(self, serial: int, response: InferResponse) -> None:
        """Give a request one of its responses, unless it has ended."""
        request = self._running.get(serial)
        if request is not None:
            if self.on_response_sent is not None:
                self.on_response_sent(request, response)
            self._respond(request, response)

    def _respond(self, request: InferRequest, response: InferResponse) -> None:
        request.answered = True
        if response.final:
            self._forget(request)
        request.respond(response)

    def _forget(self, request: InferRequest) -> None:
        self._running.pop(request.serial, None)
        if request.expires:
            self._expiries.drop(request)

    def _fail_execution(self, execution: Execution, error: ConchError) -> None:
        execution.error = error
        execution.on_done(execution)
        for request in execution.requests:
            self._forget(request)
            take_times(request, execution.times)
            request.fail(error)

    def _hung_up(self, reason: ConchError | None) -> None:
        """Kill the process, whose channel has closed or (with a ``reason``) been misused."""
        if self.alive:
            self._link.stop_reading()
            if reason is not None:
                self.kill_for(Kill(Cause.PROTOCOL, f"it broke the protocol: {reason.message}"))
            else:
                self.kill()

    def _exited(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self._link.drain()
        self._worker_log.at_prompt(False)
        self._link.close()
        self._heartbeat = None
        self.calls.close()
        error = self._unhealthy()
        executions, self._executions = self._executions, {}
        for execution in executions.values():
            self._fail_execution(execution, error)
        self._preparation.clear()
        for request in list(self._running.values()):
            self._forget(request)
            request.fail(error)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        if self._idle is not None:
            self._idle.set()
        self._ended.set()
        on_exit = self.on_exit
        # Who was told of anything is forgotten, so that an ended worker is freed at once, with its buffers.
        self.on_exit = self.on_response_sent = self.on_prepared = self.on_progress = None
        self._answer = None
        if not self._stopping and on_exit is not None:
            on_exit(self)

    def _unhealthy(self) -> ConchError:
        return unhealthy(self.name, self._killed)
