"""Simulated worker processes, which use the worker protocol over a simulated socket, and run simulated models.

A model's input ``IN`` is ``[value, milliseconds, responses]``; its output ``OUT`` is ``[value, stamp, position]``: the
stamp of the files that the worker has loaded, and the position of the response in its sequence or stream. A model with
metrics adds one to :data:`METRIC` for each of its requests.
"""

from __future__ import annotations

import json
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from conch.core.inference import SEQUENCE_END, SEQUENCE_START
from conch.workers.child.buffers import BufferMap
from conch.workers.child.frames import encode_frame, loads
from conch.workers.child.packing import Packer, Unpacker
from tests.simulation.loop import SimulatedLoop
from tests.simulation.sockets import SimulatedSocket

#: The metric of models, with the label ``model``.
METRIC = "executions"
#: Data that a worker wrote longer ago than this (s) has reached the server.
_SETTLED_SECONDS = 0.1
_HEAD = struct.Struct("<II")
_INPUT = struct.Struct("<3q")
#: Ids of simulated processes begin here: no real process has them.
_FIRST_PID = 1 << 30


class LevelEnvironment(Protocol):
    """Decides the faults of workers, and observes them."""

    loop: SimulatedLoop

    def next_fault(self, model: str, during: str) -> str:
        """Return the fault of the next load or execution of a model; "" for none."""

    def executed(self, model: str, id: str) -> None:
        """Record that a worker of ``model`` began to execute the request ``id``."""


class SimulatedWorkers:
    """Starts workers; ``alive`` are the workers that have not ended."""

    def __init__(self, surroundings: LevelEnvironment) -> None:
        self.surroundings = surroundings
        self.alive: list[SimulatedWorker] = []
        self.started = 0
        #: The number of updates of each model's metric by its workers, and by those of them that ended while other
        #: workers of the model still had it.
        self.updates: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

    def least_value(self, model: str) -> int | None:
        """Return the least value that the metric of a model must have; None if no worker has it."""
        holders = [worker for worker in self.alive if worker.model == model and worker.has_metric]
        return self._kept[model] + sum(len(worker.updates) for worker in holders) if holders else None

    def ended(self, worker: SimulatedWorker) -> None:
        """Record that a worker has ended."""
        self.alive.remove(worker)
        settled = self.surroundings.loop.clock.now_ns - int(_SETTLED_SECONDS * 1e9)
        if self.least_value(worker.model) is None:
            self._kept[worker.model] = 0
        elif worker.has_metric:
            self._kept[worker.model] += sum(when < settled for when in worker.updates)

    def idle(self, model: str) -> bool:
        """Return whether a worker of ``model`` is ready for a request, and no worker of any model is busy."""
        return all(worker.idle for worker in self.alive) and any(
            worker.model == model and worker.ready for worker in self.alive
        )

    def spawn(
        self,
        python: str,
        environment: Mapping[str, str],
        on_exit: Callable[[], None],
        on_line: Callable[[str], None],
    ) -> tuple[SimulatedWorker, Any]:
        """Start a worker; see :data:`conch.workers.host.spawn.Spawn`."""
        worker = self.start(on_exit)
        return worker, worker.socket

    def start(self, on_exit: Callable[[], None], socket: SimulatedSocket | None = None) -> SimulatedWorker:
        """Start a worker, with the other end of ``socket`` if there is one already."""
        worker = SimulatedWorker(self, self.new_pid(), on_exit, socket)
        self.alive.append(worker)
        return worker

    def new_pid(self) -> int:
        """Return the ID of a new process."""
        self.started += 1
        return _FIRST_PID + self.started


class SimulatedWorker:
    """One process."""

    def __init__(
        self,
        workers: SimulatedWorkers,
        pid: int,
        on_exit: Callable[[], None],
        socket: SimulatedSocket | None = None,
    ) -> None:
        self.pid = pid
        #: The exit status, set when it has ended, and set when the server can notice that.
        self.status: int | None = None
        self.exit_status: int | None = None
        self.model = ""
        self.stalled = False
        #: Whether its model is loaded.
        self.ready = False
        #: Whether it has its model's metric, and the times of its updates (ns).
        self.has_metric = False
        self.updates: list[int] = []
        self._workers = workers
        self._surroundings = workers.surroundings
        self._loop = workers.surroundings.loop
        self._on_exit = on_exit
        self.socket = socket or SimulatedSocket(self._loop, self._received, self._server_gone)
        if socket is not None:
            socket.attach(self._received, self._server_gone)
        self._buffer = bytearray()
        self._frames: deque[tuple[dict[str, Any], bytes]] = deque()
        self._busy = False
        self._spec: dict[str, Any] = {}
        self._config = ""  # JSON, as received
        self._batched = False
        self._directory = Path()
        self._positions: dict[object, int] = {}
        self._cancelled: set[int] = set()
        self._calls: dict[int, Callable[[dict[str, Any], bytes], None]] = {}
        self._call_count = 0

    @property
    def idle(self) -> bool:
        """Whether it has no work."""
        return not self._busy and not self.stalled and not self._frames

    # The process

    def kill(self) -> None:
        self._end(-9)

    def _end(self, status: int) -> None:
        if self.status is None:
            self.status = status
            self._workers.ended(self)
            self.socket.hang_up()
            self._loop.later(self._loop.latency(0.001), lambda: self._loop.arrive(self._exited))

    def _exited(self) -> None:
        self.exit_status = self.status
        self._on_exit()

    def _server_gone(self) -> None:
        self._end(1)

    # The main loop

    def _received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 8:
            header_size, payload_size = _HEAD.unpack_from(self._buffer)
            end = 8 + header_size + payload_size
            if len(self._buffer) < end:
                break
            header = loads(memoryview(bytes(self._buffer[8 : 8 + header_size])))
            frame = header, bytes(self._buffer[8 + header_size : end])
            del self._buffer[:end]
            if header["op"] == "cancel":
                self._cancelled.add(header["serial"])
            elif header["op"] == "answer":
                self._answered(*frame)
            else:
                self._frames.append(frame)
        self._next()

    def _next(self) -> None:
        while self._frames and not self._busy and not self.stalled and self.status is None:
            header, payload = self._frames.popleft()
            self._handle(header, payload)

    def _handle(self, header: dict[str, Any], payload: bytes) -> None:
        match header["op"]:
            case "init":
                self.model = header["model"]["name"]
                self._config = header["config"]
                self._batched = bool(json.loads(self._config).get("max_batch_size"))
                self._directory = Path(header["model"]["version_directory"])
            case "complete":
                self._load(0.01, {"op": "completed", "config": self._config})
            case "preloads":
                modules = json.loads((self._directory / "model.py").read_text()).get("modules", [])
                answer = {"op": "preloads", "modules": modules, "environment": {}}
                self._after(self._loop.latency(0.01), partial(self._send, answer))
            case "start":
                self._load(0.02, {"op": "ready", "async": False, "runs_with": {}})
            case "execute":
                self._execute(header, payload)
            case "stop":
                self._after(self._loop.latency(0.002), self._stop)

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        """Be busy for some time, then call a function and continue, unless the process has ended."""
        self._busy = True

        def go_on() -> None:
            if self.status is None and not self.stalled:
                self._busy = False
                then()
                self._next()

        self._loop.later(seconds, go_on)

    def _send(self, header: dict[str, Any], packer: Packer | None = None) -> None:
        if self.status is None:
            payload, size = (packer.payload, packer.size) if packer is not None else ((), 0)
            self.socket.deliver(b"".join(bytes(part) for part in encode_frame(header, payload, size)))

    def _stop(self) -> None:
        if self.has_metric and len(self.updates) % 2:  # others keep it until they end
            self._send({"op": "metrics_drop", "family": 1})
        self._send({"op": "stopped"})
        self._end(0)

    # The model

    def _load(self, typical: float, answer: dict[str, Any]) -> None:
        try:
            self._spec = self._spec or json.loads((self._directory / "model.py").read_text())
        except OSError as error:
            self._send({"op": "failed", "error": ["INTERNAL", str(error), str(error)]})
            return
        seconds = self._loop.latency(typical) + self._spec.get("load_seconds", 0)
        match self._surroundings.next_fault(self.model, "load"):
            case "fail":
                reason = "the model could not be initialized"
                answer = {"op": "failed", "error": ["INTERNAL", reason, reason]}
            case "die":
                self._after(seconds, lambda: self._end(-11))
                return
            case "slow":
                seconds += 30 * self._loop.random.random()

        def done(*ignored: object) -> None:
            self.ready = answer["op"] == "ready"
            self._send(answer)

        makes_metrics = answer["op"] == "ready" and self._spec.get("metrics")
        self._after(seconds, partial(self._make_metric, done) if makes_metrics else done)

    def _make_metric(self, then: Callable[..., None]) -> None:
        def made(*ignored: object) -> None:
            self.has_metric = True
            then()

        family = {"do": "family", "number": 1, "name": METRIC, "description": "", "kind": "COUNTER"}
        series = {"do": "series", "number": 2, "family": 1, "labels": {"model": self.model}, "bounds": []}
        self._control_metrics(family, lambda *ignored: self._control_metrics(series, made))

    def _control_metrics(self, fields: dict[str, Any], answered: Callable[..., None]) -> None:
        self._call_count += 1
        self._calls[self._call_count] = answered
        self._send({"op": "metric_control", "call": self._call_count, **fields})

    def _execute(self, header: dict[str, Any], payload: bytes) -> None:
        unpacker = Unpacker(payload, BufferMap())
        requests = header["requests"]
        inputs = []
        for request in requests:
            tensors = {tensor.name: tensor for tensor in unpacker.unpack(request["inputs"])}
            inputs.append(_INPUT.unpack(bytes(tensors["IN"].data)))
            self._surroundings.executed(self.model, request["id"])
        places = [self._position(request) for request in requests]
        if self.has_metric:
            self._workers.updates[self.model] += len(requests)
            self.updates += [self._loop.clock.now_ns] * len(requests)
            self._send({"op": "metrics", "series": [[2, False, len(requests), []]]})
        seconds = self._loop.latency(0.002) + max(milliseconds for _, milliseconds, _ in inputs) / 1000
        match self._surroundings.next_fault(self.model, "execute"):
            case "fail":
                error = ["INTERNAL", "the model raised"]
                self._after(seconds, lambda: self._done(header, [], error=error))
                return
            case "die":
                self._after(seconds * self._loop.random.random(), lambda: self._end(-11))
                return
            case "stall":
                self.stalled = True
                return
            case "slow":
                seconds += 20 * self._loop.random.random()
        if self._spec.get("decoupled"):
            self._stream(header, inputs, seconds)
        elif self._spec.get("calls"):
            self._call_others(header, inputs, seconds)
        else:
            self._after(seconds, lambda: self._answer(header, inputs, places))

    def _position(self, request: dict[str, Any]) -> int:
        """Return the position of a request in its sequence; -1 if this worker did not execute the start of it."""
        key = request["correlation_id"]
        if not self._spec.get("sequence"):
            return 0
        if request["flags"] & SEQUENCE_START:
            self._positions[key] = -1
        if key not in self._positions:
            return -1
        self._positions[key] += 1
        place = self._positions[key]
        if request["flags"] & SEQUENCE_END:
            del self._positions[key]
        return place

    def _answer(self, header: dict[str, Any], inputs: list[Any], places: list[int]) -> None:
        packer = Packer()
        responses: list[Any] = []
        for request, (value, _, _), place in zip(header["requests"], inputs, places, strict=True):
            if request["serial"] in self._cancelled and value % 2:
                responses.append({"error": ["CANCELLED", "the model saw that the request was cancelled"]})
            else:
                responses.append({"outputs": [self._output(packer, value, place)]})
        self._done(header, responses, packer)

    def _output(self, packer: Packer, value: int, place: int, stamp: int = 0) -> Any:
        shape = [1, 3] if self._batched else [3]
        return packer.add("OUT", "INT64", shape, _INPUT.pack(value, stamp or self._spec["stamp"], place))

    def _done(
        self, header: dict[str, Any], responses: list[Any], packer: Packer | None = None, error: Any = None
    ) -> None:
        answer = {"op": "done", "batch": header["batch"], "times": [1000, 1000, 1000], "responses": responses}
        self._send(answer if error is None else {**answer, "error": error}, packer)

    def _stream(self, header: dict[str, Any], inputs: list[Any], seconds: float) -> None:
        """Give each request its responses at random times, some of them after the execution."""

        def respond(serial: int, value: int, place: int, count: int) -> None:
            if self.status is not None or self.stalled:
                return
            packer = Packer()
            outputs = [self._output(packer, value, place)] if place < count else []
            final = place >= count or serial in self._cancelled
            self._send({"op": "response", "serial": serial, "outputs": outputs, "final": final}, packer)
            if not final:
                self._loop.later(self._loop.latency(0.01), lambda: respond(serial, value, place + 1, count))

        for request, (value, _, count) in zip(header["requests"], inputs, strict=True):
            serial = request["serial"]
            self._loop.later(
                self._loop.latency(0.005),
                lambda s=serial, v=value, c=count: respond(s, v, 0, c),
            )
        self._after(seconds, lambda: self._done(header, [None] * len(inputs)))

    # Calls of other models (BLS)

    def _call_others(self, header: dict[str, Any], inputs: list[Any], seconds: float) -> None:
        """Call another model for each request, one after the other, and return its response."""
        self._busy = True
        packer, responses = Packer(), list[Any]()

        def call_next() -> None:
            if self.status is not None or self.stalled:
                return
            if len(responses) == len(inputs):
                self._busy = False
                self._done(header, responses, packer)
                self._next()
                return
            self._call(self._spec["calls"], inputs[len(responses)], answered)

        def answered(answer: dict[str, Any], payload: bytes) -> None:
            if answer.get("error"):
                responses.append({"error": answer["error"]})
            else:
                (tensor,) = Unpacker(payload, BufferMap()).unpack(answer["outputs"])
                value, stamp, place = _INPUT.unpack(bytes(tensor.data))
                responses.append({"outputs": [self._output(packer, value, place, stamp)]})
            self._loop.later(self._loop.latency(0.001), call_next)

        self._loop.later(seconds, call_next)

    def _call(self, model: str, values: Any, answered: Callable[[dict[str, Any], bytes], None]) -> None:
        self._call_count += 1
        self._calls[self._call_count] = answered
        packer = Packer()
        described = [packer.add("IN", "INT64", [1, 3], _INPUT.pack(*values))]
        call = {
            "op": "call", "call": self._call_count, "decoupled": False, "inputs": described, "model": model,
            "version": -1, "id": "", "outputs": [], "parameters": {}, "correlation_id": 0, "flags": 0, "timeout": 0,
        }  # fmt: skip
        self._send(call, packer)

    def _answered(self, header: dict[str, Any], payload: bytes) -> None:
        answered = self._calls.pop(header["call"], None)
        if answered is not None and self.status is None:
            answered(header, payload)
