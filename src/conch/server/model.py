"""One loaded version of a model, as the front ends see it.

Validates, counts and accounts for every request; how requests are executed is its executor's
business: a dispatcher with instances, or an ensemble.  Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic_ns
from typing import Any, Protocol

from conch import logs
from conch.backends.table import BACKENDS, Backend, backend_of
from conch.config import render
from conch.config.schema import ModelConfig, datatype
from conch.config.signature import full_shape, parameters, platform
from conch.config.signature import signature as make_signature
from conch.errors import Code, ConchError, unavailable
from conch.inference import InferRequest, InferResponse, ModelSignature
from conch.server.request_parameters import CheckParameters
from conch.server.runs_with import RunsWith, shown
from conch.telemetry.statistics import FailureReason, ModelStatistics
from conch.tensors import WireTensor
from conch.validation import validate_request
from conch.workers.host.process import WorkerProcess

STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"


class Executor(Protocol):
    """What runs the requests of a model version."""

    @property
    def ready(self) -> bool: ...

    @property
    def processes(self) -> Sequence[WorkerProcess]: ...

    def submit(self, request: InferRequest) -> None: ...

    def fail_waiting(self, error: ConchError) -> None: ...

    def set_log(self, levels: Mapping[str, Any]) -> None: ...

    def abandon(self) -> None: ...

    async def stop(self, seconds: float | None) -> None: ...


class Model:
    """A model version that has been loaded.

    ``config`` is the effective configuration, ``shown_config`` the one that clients are shown.  ``stopping`` refuses
    requests from outside while steps of ensembles that are under way may still come.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        executor: Executor,
        statistics: ModelStatistics,
        labels: Mapping[str, Sequence[str]],
    ) -> None:
        self.name: str = config.name
        self.version = version
        self.config = config
        self.statistics = statistics
        self.tell({})
        backend = backend_of(config.backend, parameters(config)) if config.backend in BACKENDS else None
        self.signature = _with_ways_of(make_signature(config, version), backend)
        self.executor = executor
        self.stopping = False
        self.in_flight = 0
        #: When its last request ended (ns, monotonic).
        self.last_ended = 0
        self._labels = labels
        on_request = backend.on_request if backend is not None else frozenset[str]()
        self._outputs = tuple(name for name in self.signature.outputs if name not in on_request)
        self._reshaped = {spec.name: spec for spec in self.signature.outputs.values() if spec.reshape is not None}
        self._is_ensemble = config.HasField("ensemble_scheduling")
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether requests can run right now."""
        return self.executor.ready

    @property
    def metadata(self) -> dict[str, Any]:
        """The body of ``GET /v2/models/<name>`` but for ``versions``, which the server knows."""
        config = self.config
        return {
            "name": self.name,
            "versions": [str(self.version)],
            "platform": platform(config),
            "inputs": [_describe(config, tensor) for tensor in config.input],
            "outputs": [_describe(config, tensor) for tensor in config.output],
        }

    def reconfigure(self, config: ModelConfig) -> None:
        """Take over a configuration that differs in nothing that requests depend on."""
        self.config = config

    def tell(self, runs_with: RunsWith) -> None:
        """Show what the model runs with in its configuration and its statistics."""
        self.statistics.runs_with = dict(runs_with)
        self.shown_config = shown(self.config, runs_with)
        self.config_json = render.to_json(self.shown_config).encode()

    def labels(self, output: str) -> Sequence[str] | None:
        """The labels of an output's classes, where a file names them."""
        return self._labels.get(output)

    def infer(self, request: InferRequest) -> None:
        """Accept a request from a client.

        Raises :class:`ConchError` when it is refused; otherwise it ends exactly once, through
        ``request.respond``.
        """
        if self.stopping:
            request.release()
            raise request.error(STOPPING, Code.UNAVAILABLE)
        self.run_step(request)

    def run_step(self, request: InferRequest) -> None:
        """Accept a request from inside the server, also while the server stops; raises as :meth:`infer` does."""
        try:
            validate_request(self.signature, request)
        except ConchError:
            request.release()
            raise
        request.model_version = self.version
        if not request.outputs:
            request.outputs = self._outputs
        if self._reshaped:
            self._restore_shapes(request)
        request.on_final = self._ended
        self.in_flight += 1
        try:
            self.executor.submit(request)
        except ConchError:
            request.release()
            self._left()
            self.statistics.record_failure(FailureReason.REJECTED, monotonic_ns() - request.times.arrived)
            raise

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep this version loaded, even if it is replaced, while a request to it is being decoded."""
        self.in_flight += 1
        try:
            yield
        finally:
            self._left()

    async def finish(self, seconds: float | None = None) -> bool:
        """Wait until nothing is in flight; False when ``seconds`` run out first."""
        if not self.in_flight:
            return True
        self._idle.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def abandon(self) -> None:
        """Fail the requests that run or wait."""
        self.stopping = True
        self.executor.fail_waiting(unavailable(STOPPING))
        self.executor.abandon()

    async def stop(self, seconds: float | None = None) -> None:
        """End the executor within ``seconds``, or when patience with its workers ends; what still waits fails."""
        self.stopping = True
        self.executor.fail_waiting(unavailable(STOPPING))
        await self.executor.stop(seconds)

    def _ended(self, request: InferRequest, response: InferResponse) -> None:
        times = request.times
        self.last_ended = now = monotonic_ns()
        self._left()
        given_up = request.cancelled and response.error is not None and response.error.code is Code.CANCELLED
        if response.error is None or (request.answered and not given_up):
            started = times.started or now
            self.statistics.record_success(
                request.batch_size,
                max(started - (times.queued or started), 0),
                times.compute_input,
                times.compute_infer or (0 if self._is_ensemble else now - started),
                times.compute_output,
                now - times.arrived,
            )
            if self._is_ensemble:
                self.statistics.record_execution(
                    request.batch_size, times.compute_input, times.compute_infer, times.compute_output
                )
        else:
            self.statistics.record_failure(self._reason(request, response.error), now - times.arrived)
        if logs.current().log_verbose_level:
            self._log_end(request, response, now)

    def _log_end(self, request: InferRequest, response: InferResponse, now: int) -> None:
        times = request.times
        started = times.started or now
        logs.verbose(
            1,
            "request %s of '%s' version %d: %s, batch of %d, waited %.3f ms, computed for %.3f ms, %.3f ms in all",
            logs.shortened(request.id) or f"<no id, {request.serial}>",
            self.name,
            self.version,
            "OK" if response.error is None else response.error.status,
            request.batch_size,
            (started - (times.queued or started)) / 1e6,
            (times.compute_infer or now - started) / 1e6,
            (now - times.arrived) / 1e6,
        )

    def _reason(self, request: InferRequest, error: ConchError) -> FailureReason:
        if error.code is Code.CANCELLED:
            return FailureReason.CANCELED
        if self._is_ensemble:
            return FailureReason.OTHER
        return FailureReason.BACKEND if request.times.started else FailureReason.REJECTED

    def _left(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    def _restore_shapes(self, request: InferRequest) -> None:
        """Give outputs with a ``reshape`` the shape that clients know."""
        deliver = request.on_response

        def restore(response: InferResponse) -> None:
            response.outputs = [self._restored(tensor) for tensor in response.outputs]
            deliver(response)

        request.on_response = restore

    def _restored(self, tensor: WireTensor) -> WireTensor:
        spec = self._reshaped.get(tensor.name)
        if spec is None:
            return tensor
        batched = self.signature.max_batch_size > 0
        shape = tensor.shape[1:] if batched else tensor.shape
        assert spec.reshape is not None
        variable = iter([given for given, dim in zip(shape, spec.reshape, strict=False) if dim == -1])
        dims = tuple(next(variable, -1) if dim == -1 else dim for dim in spec.dims)
        return WireTensor(tensor.name, tensor.datatype, (*tensor.shape[:1], *dims) if batched else dims, tensor.data)


def _with_ways_of(signature: ModelSignature, backend: Backend | None) -> ModelSignature:
    """The signature with what ``backend`` does otherwise than Triton; an ensemble has none."""
    if backend is None:
        return signature
    accepted = backend.request_parameters
    return replace(
        signature,
        check_parameters=CheckParameters(signature.name, accepted, signature.inputs) if accepted is not None else None,
        by_row=backend.by_row,
    )


def _describe(config: ModelConfig, tensor: Any) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "datatype": datatype(tensor.data_type),
        "shape": full_shape(config, tensor.dims),
    }
