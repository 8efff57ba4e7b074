"""The server's side of a worker process: sends batches, delivers responses and handles the end of the process.

Runs on the server's event loop. A ``WorkerProcess`` is independent of schedulers: it receives batches and calls back.
Every request completes or fails, even if the process dies; ``server/execution/worker.py`` then restarts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any

from conch.core.errors import Code, ConchError, internal, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.machine import logs
from conch.workers.child.channel import Frame
from conch.workers.child.heartbeat import SIZE, HeartbeatSample, read_heartbeat
from conch.workers.child.packing import Packer, Unpacker
from conch.workers.host.bls import ANSWERS, ModelCalls
from conch.workers.host.execution import (
    Execution,
    Preparation,
    description,
    error_of,
    response_of,
    responses_of,
    take_times,
)
from conch.workers.host.link import Link
from conch.workers.host.liveness import (
    DEFAULT_WORKER_TIMEOUTS,
    Cause,
    Kill,
    LivenessSample,
    Verdict,
    WorkerEnd,
    WorkerTimeouts,
    not_ended,
    unhealthy,
    worker_end,
)
from conch.workers.host.spawn import ChildProcess, Spawn, spawn


class Deadlines:
    """Timers of the requests that a worker has and that have a deadline."""

    def __init__(self) -> None:
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def add(self, request: InferRequest, cancel: Callable[[InferRequest], None]) -> None:
        """Fail a request at its deadline, and call ``cancel`` so that the worker drops it and frees its slot."""
        seconds = (request.deadline - monotonic_ns()) / 1e9
        self._timers[request.serial] = asyncio.get_running_loop().call_later(seconds, _expire, request, cancel)

    def drop(self, request: InferRequest) -> None:
        """Cancel the timer of a request that has left the worker; it might otherwise be kept for hours."""
        timer = self._timers.pop(request.serial, None)
        if timer is not None:
            timer.cancel()


def _expire(request: InferRequest, cancel: Callable[[InferRequest], None]) -> None:
    if not request.finished:
        cancel(request)
        request.fail(unavailable("Request timeout expired"))


class WorkerLog:
    """Writes the output and log messages of a worker to the server log."""

    def __init__(self) -> None:
        self._lines = 0
        self._prompting = False

    def line(self, text: str, name: str, pid: int, model: str) -> None:
        """Log a line that the model, or a program that it started, wrote to standard output or error."""
        self._lines += 1
        logs.emit_from_worker("INFO", "output", self._lines, text, name, pid, model)

    def message(self, header: dict[str, Any], logged: set[str], name: str, pid: int, model: str) -> None:
        """Log a message; skip one that is marked ``once`` and already in ``logged``, and otherwise add it there."""
        text = header["message"]
        if header.get("once"):
            if text in logged:
                return
            logged.add(text)
        logs.emit_from_worker(header["level"], header["file"], header["line"], text, name, pid, model)

    def at_prompt(self, opened: bool) -> None:
        """Hold log lines while a debugger prompt is open at the terminal; write them when it closes."""
        if opened == self._prompting:
            return
        self._prompting = opened
        if opened:
            logs.hold()
        else:
            logs.release()


LOG = logging.getLogger("conch")

#: Time to wait for a killed process to end (s); a process that waits for a disk ends only after the disk responds.
KILL_SECONDS = 2.0


class WorkerProcess:
    """A worker, from its start to its end.

    ``on_exit`` is called once, after the process has ended and its requests have failed, unless :meth:`stop` was
    called before.
    """

    def __init__(self, name: str, spawn: Spawn = spawn, timeouts: WorkerTimeouts = DEFAULT_WORKER_TIMEOUTS) -> None:
        self.name = name
        #: The model that the worker runs, for metrics.
        self.model = ""
        self.timeouts = timeouts
        self._spawn = spawn
        self.on_exit: Callable[[WorkerProcess], None] | None = None
        #: Called with every response from a response sender, before it is delivered to the request.
        self.on_response_sent: Callable[[InferRequest, InferResponse], None] | None = None
        #: Called when requests have been prepared and their lengths are known.
        self.on_prepared: Callable[[], None] | None = None
        #: Called after each step of a generating worker with its load: requests in flight and work since the last step.
        self.on_progress: Callable[[Mapping[str, Any]], None] | None = None
        #: Number of requests that a generating worker runs at a time; 0 for any other worker.
        self.slots = 0
        #: Whether requests keep their inputs while they run, because the model may reschedule them.
        self.reschedules = False
        #: Runtime facts of the model, by name (``engine``, ``precision`` …); set when the worker is ready.
        self.runtime_facts: dict[str, str] = {}
        #: Dependencies of the model's responses outside the version directory; set when the worker is ready.
        self.dependencies: list[tuple[str, str]] = []
        #: Messages marked ``once`` that have been logged for the model; shared by its workers.
        self.said: set[str] = set()
        self._worker_log = WorkerLog()
        self.alive = False
        #: Whether the model is loading, from the first frame to the end of its warm-up.
        self.loading = False
        #: The result of the last check by the watchdog.
        self.verdict = Verdict()
        #: Called when the server kills the worker, with the cause.
        self.on_kill: Callable[[WorkerProcess, Cause], None] | None = None
        self._killed: Kill | None = None
        self._heartbeat: memoryview | None = None
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, InferRequest] = {}
        #: Calls from the model to the server; BLS calls work only after ``serve_bls``.
        self.calls = ModelCalls(lambda header, packer: self._link.send(header, packer), self._running)
        self._deadlines = Deadlines()
        self._executions: dict[int, Execution] = {}
        self._batches = 0
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._stopping = False
        self._idle: asyncio.Event | None = None  # set only during ``finish``
        self._ended = asyncio.Event()
        self._link: Link
        self._preparation: Preparation
        self._process: ChildProcess

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._process.exit_status

    @property
    def end(self) -> WorkerEnd:
        """The reason for the end of the process; call only when it has ended."""
        return worker_end(self._process.exit_status, self._killed)

    @property
    def shared_bytes(self) -> int:
        """Size of the memory that the server and the worker share for tensors (bytes)."""
        return self._link.shared_bytes if self.alive else 0

    @property
    def sample(self) -> LivenessSample:
        """The current liveness sample; read several times a second."""
        heartbeat = read_heartbeat(self._heartbeat) if self._heartbeat is not None else HeartbeatSample()
        # A generating worker holds its executions for the whole generation, so engine steps are checked instead.
        execution = 0 if self.slots else next(iter(self._executions), 0)
        return LivenessSample(heartbeat, execution, self.loading, self.calls.busy)

    @property
    def idle(self) -> bool:
        """Whether the worker has no requests."""
        return not self._running and not self._executions

    def start(self, init: dict[str, Any], *, python: str, environment: dict[str, str]) -> None:
        """Start the process and send it the frame ``init``. Raises OSError if the process cannot be started.

        Call this from the main thread: the worker is killed when the thread that started it ends.
        """
        self._process, connection = self._spawn(python, environment, self._exited, self._printed)
        self.alive = True
        self._link = Link(connection, self._received, self._hung_up)
        self._preparation = Preparation(self._link.send)
        self._link.send({"op": "init", **init})

    async def ask(self, header: dict[str, Any]) -> dict[str, Any]:
        """Send a frame and return the reply. Raises ConchError for a ``failed`` reply or if the worker has ended."""
        if not self.alive:
            raise self._unhealthy()
        self._reply = self._loop.create_future()
        self._link.send(header)
        reply = await self._reply
        if reply["op"] == "failed":
            code, message, public = reply["error"]
            raise ConchError(message, Code[code], public=public)
        return reply

    async def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        """Load a LoRA adapter. Raises ConchError if the worker refuses it or has ended."""
        await self.ask({"op": "load_adapter", "name": name, "path": path, "in_place": in_place, "later": False})

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Raises NOT_FOUND for an unknown one."""
        await self.ask({"op": "unload_adapter", "name": name})

    def register_adapter(self, name: str, path: str) -> None:
        """Add a LoRA adapter that another worker of the model has loaded; its first request loads it."""
        if self.alive:
            self._link.send({"op": "load_adapter", "name": name, "path": path, "in_place": True, "later": True})

    def execute(self, requests: Sequence[InferRequest], on_done: Callable[[Execution], None]) -> None:
        """Run a batch; ``on_done`` is called once, before the responses of the batch are delivered.

        Each request ends with its final response, which a response sender may send later.
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
            request.times.started = request.times.started or execution.started
            request.on_cancel = self.cancel
            if request.deadline and request.serial not in self._running:
                self._deadlines.add(request, self.cancel)
            self._running[request.serial] = request
            holder, request.holder = request.holder, None
            if holder is self and self._preparation.take(request):
                described.append({"serial": request.serial})
            else:
                if holder is not None and holder is not self:
                    holder.drop(request)  # another worker prepared it
                fields = description(request, packer)
                if self.slots:
                    fields["arrived"], fields["deadline"] = request.times.arrived, request.start_deadline
                    fields["priority"] = request.priority
                described.append(fields)
            if not self.reschedules:
                request.inputs = {}  # frees them: the frame holds the data until it is sent
        try:
            self._link.send({"op": "execute", "batch": self._batches, "requests": described}, packer)
        except Exception as error:
            if not isinstance(error, ConchError | OSError):  # no memory to share, no descriptor left
                LOG.exception("a request could not be passed to the worker of '%s'", self.name)
            del self._executions[self._batches]
            failure = internal(f"the request could not be passed to its worker: {error}")
            for fields in described:
                if "inputs" not in fields:  # the worker has prepared it
                    self._link.send({"op": "drop", **fields})
            # Deferred, because the end of the execution makes the caller run the next batch, which may fail too.
            self._loop.call_soon(self._fail_execution, execution, failure)

    def prepare(self, requests: Sequence[InferRequest]) -> None:
        """Have the worker decode waiting requests, so that their lengths are known and they start sooner.

        If a request ends before it runs, the worker drops it too.
        """
        if self.alive:
            self._preparation.add(requests, self)

    def drop(self, request: InferRequest) -> None:
        """Forget a prepared, unfinished or rescheduled request that will not run here; the worker drops it too."""
        request.holder = None
        self._forget(request)
        if self.alive:
            self._preparation.drop(request)
        if self._idle is not None and self.idle:
            self._idle.set()

    def cancel(self, request: InferRequest) -> None:
        """Tell the model that a request has been cancelled."""
        if self.alive and request.serial in self._running:
            self._link.send({"op": "cancel", "serial": request.serial})

    def set_log(self, log: dict[str, Any]) -> None:
        """Change the log levels of the model's logger."""
        if self.alive:
            self._link.send({"op": "log", "log": log})

    async def finish(self) -> None:
        """Wait until the worker has no requests; kill it after the unload timeout."""
        if not self.idle:
            self._idle = asyncio.Event()
            try:
                await asyncio.wait_for(self._idle.wait(), self.timeouts.unload or None)
            except TimeoutError:
                self.kill_for(not_ended(self.timeouts.unload, idle=False))

    async def stop(self, seconds: float | None = None) -> None:
        """Let the model finalize and wait for the process to end; kill it after ``seconds`` (default: its timeout).

        With 0, an idle worker is killed without finalizing, and this is not reported as an error.
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

    def apply_verdict(self, verdict: Verdict) -> None:
        """Apply the result of a watchdog check: log changes, and kill the worker if required."""
        if verdict.responsive != self.verdict.responsive and verdict.kill is None and not self.loading:
            if verdict.responsive:
                LOG.info("worker of '%s' (pid %d) responds again", self.name, self.pid)
            else:
                LOG.warning("worker of '%s' (pid %d) does not respond", self.name, self.pid)
        self.verdict = verdict
        if verdict.kill is not None:
            self.kill_for(verdict.kill)

    def kill_for(self, kill: Kill) -> None:
        """Kill the process and report the reason in the log, in metrics and in the errors of its requests."""
        if not self.alive or self._killed is not None:
            return
        self._killed = kill
        LOG.error("worker of '%s' (pid %d) is killed: %s", self.name, self.pid, kill.reason)
        if self.on_kill is not None:
            self.on_kill(self, kill.cause)
        self.kill()

    def kill(self) -> None:
        """Kill the process now; its requests fail."""
        self._process.kill()
        if self.alive:
            self._loop.call_later(KILL_SECONDS, self._exited)

    async def ended(self) -> None:
        """Wait until the process has ended and its requests have failed."""
        await self._ended.wait()

    def _printed(self, line: str) -> None:
        self._worker_log.line(line, self.name, self.pid, self.model)

    def _received(self, frames: list[Frame]) -> None:
        for frame in frames:
            self._handle(frame)
        if self._idle is not None and self.idle:
            self._idle.set()
        if self.alive and not self._executions:
            self._link.flush_soon()

    def _handle(self, frame: Frame) -> None:
        header, payload = frame
        op = header["op"]
        try:
            if op == "done":
                self._done(header, Unpacker(payload, self._link.buffers))
            elif op == "response":
                request = self._running.get(header["serial"])  # unpacked even if it has ended, to release its buffer
                response = response_of(header, Unpacker(payload, self._link.buffers), header["final"], request)
                self._deliver(header["serial"], response)
            elif op == "text":
                request = self._running.get(header["serial"])
                if request is not None:
                    request.preview(header["text"])
            elif op == "progress":
                self._progress(header, Unpacker(payload, self._link.buffers))
            elif op == "prepared":
                self._preparation.note_lengths(header["lengths"])
                if self.on_prepared is not None:
                    self.on_prepared()
            elif op == "log":
                self._worker_log.message(header, self.said, self.name, self.pid, self.model)
            elif op == "prompt":
                self._worker_log.at_prompt(header["open"])
            elif op == "heartbeat":
                self._heartbeat = memoryview(self._link.buffers.get(header["buffer"]))[:SIZE]
            elif op in ANSWERS and self._reply is not None and not self._reply.done():
                self._reply.set_result(header)
            elif op not in ANSWERS and not self.calls.handle(header, Unpacker(payload, self._link.buffers)):
                raise internal("no handler for it")
        except Exception as error:  # otherwise, requests of the frame would never end
            self._hung_up(internal(f"frame {op!r}: {error!r}"))

    def _done(self, header: dict[str, Any], unpacker: Unpacker) -> None:
        batch = header["batch"]
        execution = self._executions[batch]
        execution.times = tuple(header["times"])
        execution.work = header.get("work") or {}
        error = error_of(*header["error"]) if header.get("error") is not None else None
        if error is not None:
            del self._executions[batch]
            self._fail_execution(execution, error)
            return
        responses = responses_of(header["responses"], unpacker, execution.requests)
        if "rescheduled" in header:
            execution.rescheduled = [execution.requests[index] for index in header["rescheduled"]]
        if "unfinished" in header:
            execution.unfinished = [execution.requests[index] for index in header["unfinished"]]
            for request in execution.unfinished:
                self._preparation.keep(request, self)
        del self._executions[batch]  # a frame that could not be read ends the worker, and this execution with it
        for request in (*execution.rescheduled, *execution.unfinished):
            request.holder = self  # it may end before it runs again
            if request.finished:  # at its deadline
                self.drop(request)
        execution.on_done(execution)
        for request, response in zip(execution.requests, responses, strict=True):
            take_times(request, execution.times)
            if response is not None:
                self._respond(request, response)

    def _progress(self, header: dict[str, Any], unpacker: Unpacker) -> None:
        """Deliver the responses of one step of a generating worker."""
        responses = [
            (fields["serial"], response_of(fields, unpacker, fields["final"])) for fields in header["responses"]
        ]
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
        """Deliver a response to its request, unless the request has ended."""
        request = self._running.get(serial)
        if request is not None:
            if self.on_response_sent is not None:
                self.on_response_sent(request, response)
            self._respond(request, response)

    def _respond(self, request: InferRequest, response: InferResponse) -> None:
        request.responded = True
        if response.final:
            self._forget(request)
        request.respond(response)

    def _forget(self, request: InferRequest) -> None:
        self._running.pop(request.serial, None)
        if request.deadline:
            self._deadlines.drop(request)

    def _fail_execution(self, execution: Execution, error: ConchError) -> None:
        execution.error = error
        execution.on_done(execution)
        for request in execution.requests:
            self._forget(request)
            take_times(request, execution.times)
            request.fail(error)

    def _hung_up(self, reason: ConchError | None) -> None:
        """Kill the process after its channel has closed, or (with a ``reason``) after a protocol error."""
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
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
        if self._idle is not None:
            self._idle.set()
        self._ended.set()
        on_exit = self.on_exit
        # Callbacks are cleared to break reference cycles, so that the worker and its buffers are freed at once.
        self.on_exit = self.on_response_sent = self.on_prepared = self.on_progress = None
        self._reply = None
        if not self._stopping and on_exit is not None:
            on_exit(self)

    def _unhealthy(self) -> ConchError:
        return unhealthy(self.name, self._killed, self.end if self.loading else None)
