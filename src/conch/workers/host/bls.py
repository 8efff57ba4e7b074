"""Serves the calls of a worker's model to the server: BLS, custom metrics and readiness.

The server's side of ``conch.backends.python``'s calls and metrics; runs on the event loop. Every call gets at least one
reply, the last of them with ``final``. When the worker ends, its requests are cancelled, and metrics that no other
worker uses are removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from math import isfinite
from typing import Any, Final, Protocol

from conch.core.errors import ConchError, internal
from conch.core.inference import InferRequest, InferResponse, ParameterValue, ignore
from conch.telemetry.custom import CustomMetrics, MetricsHolder
from conch.workers.child.channel import Header
from conch.workers.child.packing import Packer, Unpacker


class MetricsHandler:
    """Handles the custom metrics of one worker; ``send`` writes a frame to the worker."""

    def __init__(self, holder: MetricsHolder, send: Callable[[Header], None]) -> None:
        self._holder = holder
        self._send = send

    def handle(self, header: Header) -> bool:
        """Handle a metrics frame; return False for other frames. Malformed ones raise LookupError or ValueError."""
        match header["op"]:
            case "metrics":
                for number, absolute, amount, buckets in header["series"]:
                    self._holder.change(number, absolute, float(amount), buckets)
            case "metrics_drop" if "series" in header:
                self._holder.drop_series(header["series"])
            case "metrics_drop":
                self._holder.drop_family(header["family"])
            case "metric_control":
                self._reply(header)
            case _:
                return False
        return True

    def close(self) -> None:
        """Release all metrics because the worker has ended."""
        self._holder.close()

    def _reply(self, header: Header) -> None:
        reply: Header = {"op": "answer", "call": header["call"], "outputs": [], "parameters": {}, "final": True}
        try:
            reply["parameters"] = self._do(header)
        except ConchError as error:
            reply["error"] = [error.code.name, error.message]
        self._send(reply)

    def _do(self, header: Header) -> Header:
        number = header["number"]
        match header["do"]:
            case "family":
                self._holder.add_family(number, header["name"], header["description"], header["kind"])
            case "series":
                bounds = [float(bound) for bound in header["bounds"]]
                shared = self._holder.add_series(number, header["family"], header["labels"], bounds)
                return {"bounds": list(map(_portable, shared))}
            case "value":
                return {"value": _portable(self._holder.value(number))}
            case other:
                raise internal(f"metrics have no '{other}'")
        return {}


def _portable(value: float) -> float | str:
    """Convert a number for JSON, which has no infinity and no NaN."""
    return value if isfinite(value) else repr(value)


LOG = logging.getLogger("conch")


class BlsServer(Protocol):
    """The server's interface for BLS calls; implemented by :class:`conch.server.bls.BlsModels`."""

    def infer(self, request: InferRequest, decoupled: bool, caller: str) -> None:
        """Accept a request from the model ``caller``; raises ConchError if it is refused."""

    def is_ready(self, name: str, version: int) -> bool: ...

    async def load(self, name: str, parameters: Mapping[str, object], starting: str) -> None:
        """Load a model; ``starting`` is the name of the calling model while it is being initialized, else empty."""

    async def unload(self, name: str, dependents: bool) -> None: ...


class BlsHandler:
    """Serves the BLS calls of one worker.

    ``send`` writes a frame to the worker. ``start`` runs a coroutine; by default it becomes a task. ``running`` holds
    the in-flight requests of the worker, by serial number.
    """

    def __init__(
        self,
        models: BlsServer,
        caller: str,
        send: Callable[[Header, Packer | None], None],
        running: Mapping[int, InferRequest] | None = None,
        start: Callable[[Coroutine[Any, Any, None]], None] | None = None,
    ) -> None:
        self._models = models
        self._caller = caller
        self._send = send
        self._start = start
        self._running = running if running is not None else {}
        self._requests: dict[int, InferRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def handle(self, header: Header, unpacker: Unpacker) -> bool:
        """Handle a BLS frame; return False for other frames. Malformed ones raise KeyError, TypeError or ValueError."""
        match header["op"]:
            case "call":
                self._infer(header, unpacker)
            case "cancel_call":
                self._cancel(header["call"], header["drop"])
            case "model_control":
                self._control(header, unpacker)
            case _:
                return False
        return True

    @property
    def busy(self) -> bool:
        """Whether a call is in progress, so that the worker may be waiting for its reply."""
        return bool(self._requests or self._tasks)

    def close(self) -> None:
        """Cancel the requests in flight because the worker has ended."""
        self._closed = True
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.cancel()

    def _infer(self, header: Header, unpacker: Unpacker) -> None:
        number = header["call"]
        decoupled = header["decoupled"]
        inputs = unpacker.unpack(header["inputs"])
        request = InferRequest(
            header["model"],
            {tensor.name: tensor for tensor in inputs},
            lambda response: self._respond(number, response, decoupled),
            model_version=header["version"],
            id=header["id"],
            outputs=tuple(header["outputs"]),
            parameters=header["parameters"],
            correlation_id=header["correlation_id"],
            flags=header["flags"],
            timeout=header["timeout"],
        )
        self._requests[number] = request
        try:
            if len(request.inputs) < len(inputs):
                raise request.error(
                    f"input '{_repeated([tensor.name for tensor in inputs])}' already exists in request"
                )
            if "trace" in header:
                self._trace(request, header["trace"])
            self._models.infer(request, decoupled, self._caller)
        except ConchError as error:
            message = f"Model {request.model_name} - Error when running inference: {error.public}"
            self._respond(number, InferResponse(error=internal(message)))

    def _trace(self, request: InferRequest, caller: int) -> None:
        """Add a request to the trace of the request with the serial number ``caller``, if that is still running."""
        traced = self._running.get(caller)
        if traced is not None and traced.trace is not None:
            request.trace = traced.trace.child()

    def _respond(self, number: int, response: InferResponse, decoupled: bool = False) -> None:
        if number not in self._requests:
            return
        error = response.error
        if error is not None and decoupled:
            error = internal(error.public)  # the error code is always INTERNAL here, as in Triton
        if response.final:
            del self._requests[number]
        packer = Packer()
        try:
            self._reply(number, packer.pack(response.outputs), response.parameters, error, response.final, packer)
        except (ConchError, OSError) as reason:  # no shared memory or no descriptor left
            failure = internal(f"the response could not be passed to the model: {reason}")
            self._reply(number, error=failure, final=response.final)

    def _cancel(self, number: int, drop: bool) -> None:
        request = self._requests.pop(number, None) if drop else self._requests.get(number)
        if request is not None:
            request.cancel()

    def _control(self, header: Header, unpacker: Unpacker) -> None:
        number, name = header["call"], header["model"]
        match header["do"]:
            case "ready":
                self._reply(number, parameters={"ready": self._models.is_ready(name, header["version"])})
            case "load":
                files = unpacker.unpack(header["inputs"])
                parameters: dict[str, object] = {file.name: bytes(file.data) for file in files}
                if header["config"]:
                    parameters["config"] = header["config"]
                starting = self._caller if header["starting"] else ""
                self._reply_later(number, self._models.load(name, parameters, starting))
            case "unload":
                self._reply_later(number, self._models.unload(name, header["dependents"]))
            case other:
                raise ValueError(other)

    def _reply_later(self, number: int, doing: Awaitable[None]) -> None:
        async def answer() -> None:
            error: ConchError | None = None
            try:
                await doing
            except ConchError as failure:
                error = failure
            except Exception as failure:
                LOG.exception("a call of model '%s' failed", self._caller)
                error = internal(repr(failure))
            self._reply(number, error=error)

        (self._start or self._start_task)(answer())

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _reply(
        self,
        number: int,
        outputs: list[Any] | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        error: ConchError | None = None,
        final: bool = True,
        packer: Packer | None = None,
    ) -> None:
        if self._closed:
            return
        header: Header = {
            "op": "answer",
            "call": number,
            "outputs": outputs or [],
            "parameters": parameters or {},
            "final": final,
        }
        if error is not None:
            header["error"] = [error.code.name, error.public]
        self._send(header, packer)


def _repeated(names: list[str]) -> str:
    return next(name for at, name in enumerate(names) if name in names[:at])


#: Frames with which a worker replies to the server; it sends all other frames unprompted.
ANSWERS: Final = frozenset({"completed", "preloads", "ready", "adapted", "failed", "stopped"})


class ModelCalls:
    """Handles the calls of one worker; ``send`` writes a frame to it, ``running`` are its in-flight requests."""

    def __init__(
        self, send: Callable[[Header, Packer | None], None], running: Mapping[int, InferRequest] | None = None
    ) -> None:
        self._send = send
        self._running = running
        self._bls: BlsHandler | None = None
        self._metrics: MetricsHandler | None = None
        #: Whether the model has reported itself ready; True if it reports nothing.
        self.model_ready = True

    def serve_bls(self, models: BlsServer, caller: str) -> None:
        """Enable BLS: let the worker of the model ``caller`` send requests to ``models``."""
        self._bls = BlsHandler(models, caller, self._send, self._running)

    def show_metrics(self, metrics: CustomMetrics) -> None:
        """Enable custom metrics: let the worker's model add its own to ``metrics``."""
        self._metrics = MetricsHandler(metrics.holder(), lambda header: self._send(header, None))

    @property
    def busy(self) -> bool:
        """Whether a BLS call is in progress, so that the worker may be waiting for its reply."""
        return self._bls is not None and self._bls.busy

    def handle(self, header: Header, unpacker: Unpacker) -> bool:
        """Handle a call frame; return False for other frames.

        Malformed frames raise LookupError, TypeError or ValueError.
        """
        if header["op"] == "model_ready":
            self.model_ready = bool(header["ready"])
            return True
        if self._metrics is not None and self._metrics.handle(header):
            return True
        return self._bls is not None and self._bls.handle(header, unpacker)

    def close(self) -> None:
        """Cancel the worker's calls and release its metrics because it has ended."""
        if self._metrics is not None:
            self._metrics.close()
        if self._bls is not None:
            self._bls.close()
        self._bls = self._metrics = None
        self._send = ignore  # break the reference cycle with the owner
