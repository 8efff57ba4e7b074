"""A loaded version of a model: validates, counts and records its requests.

Its executor runs the requests: a dispatcher with workers, an ensemble or a remote executor. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

from conch.backends.table import BACKENDS, Backend, RequestParameters, backend_of
from conch.config import render
from conch.config.complete import LOADS_ADAPTERS, OUTPUT_FORMAT
from conch.config.schema import ModelConfig, datatype, implementation
from conch.config.signature import full_shape, parameters, platform
from conch.config.signature import signature as make_signature
from conch.core.errors import (
    Code,
    ConchError,
    did_you_mean,
    error_text,
    internal,
    invalid,
    unavailable,
    unsupported,
)
from conch.core.inference import InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor
from conch.core.validation import validate_request
from conch.machine import logs
from conch.repository.fingerprint import NO_IDENTITY, ExternalFiles, Identity
from conch.repository.names import qualified
from conch.server.execution.caching import CachedMessages, CacheLookup
from conch.server.execution.executor import STOPPING, Executor
from conch.server.runtime_facts import RuntimeFacts, adapters, shown
from conch.server.schedulers.ordering import InOrder
from conch.telemetry.statistics import FailureReason, ModelStatistics

LOG = logging.getLogger("conch")

# In Triton's protocol a request may have any parameters, and backends ignore unknown ones: a misspelt option has no
# effect and causes no error. Python models and ensembles keep this behaviour. The wire formats check the parameters
# that clients send; parameters that the server adds (forwarded headers) are not checked.


#: Similarity (``difflib`` ratio) to a known name from which an unknown name is refused, and from which a name is
#: suggested.
_MISSPELT = 0.85
_SUGGESTED = 0.6
#: Parameters that clients send to any server: ``id`` of a body for ``generate``, which is also a parameter in Triton;
#: tensor parameters of MLServer's clients; and parameters that KServe's clients pass on from HTTP to gRPC.
_PROTOCOL = frozenset({"id", "content_type", "headers", "binary_data_output"})
#: Number of cached results per model, and maximum length of a name whose result is cached.
_REMEMBERED = 256
_LONGEST = 64
#: Maximum number of unknown parameters in a request; a check takes 0.2 ms.
_MOST_UNKNOWN = 64


class CheckParameters:
    """Checks the parameter names of requests to ``model``; raises INVALID_ARG for a name that is not accepted."""

    def __init__(self, model: str, accepted: RequestParameters, inputs: Mapping[str, TensorSpec]) -> None:
        self._model = model
        self._names = accepted.names | _PROTOCOL
        self._others = accepted.others
        self._inputs = frozenset(inputs)
        self._required = [name for name, spec in inputs.items() if not spec.optional]
        self._known = accepted.names | self._inputs
        # Cached, because the comparison with all known names takes longer than the rest of a small request.
        self._cached_problem = lru_cache(_REMEMBERED)(self._problem)

    def __call__(self, names: Iterable[str]) -> None:
        unknown = 0
        for name in names:
            if name not in self._names:
                problem = self._cached_problem(name) if len(name) <= _LONGEST else self._problem(name)
                unknown += 1
                if not problem and unknown > _MOST_UNKNOWN:
                    problem = f"the request has more than {_MOST_UNKNOWN} parameters that model '{self._model}' ignores"
                if problem:
                    raise invalid(problem)

    def _problem(self, name: str) -> str:
        """Return why a name is refused; empty if it is accepted."""
        if name in self._inputs:
            if self._others:
                return ""
            return f"'{name}' is an input of model '{self._model}', not a parameter: send it as a tensor"
        if self._others:
            hint = did_you_mean(name, self._known, likeness=_MISSPELT)
        else:
            # A required input that begins with the name is a better guess than a more similar optional one.
            begun = [required for required in self._required if required.startswith(name)]
            hint = did_you_mean(name, begun or self._known, likeness=0 if begun else _SUGGESTED)
        if hint:
            return f"parameter '{name}' is not known to model '{self._model}'; {hint}"
        if self._others:
            return ""
        known = ", ".join(sorted(self._known))
        return f"parameter '{name}' is not known to model '{self._model}'; its requests have {known}"


_serial = count(1)

#: Interval between checks whether the sequences of a stopping model have ended (s).
SEQUENCE_LOOK_SECONDS: Final = 0.1


class Model:
    """A loaded model version; ``namespace`` is its repository if names may be ambiguous.

    ``steps`` maps the model names in an ensemble's steps to keys; ``step_models`` returns the models that the steps use
    now. ``identity`` covers everything that the responses of this version depend on, for a cache that may outlive it.
    ``cache`` looks up requests before ``executor`` gets them. If ``ordered``, responses are delivered in the order of
    their requests.

    ``config`` is the effective configuration, ``shown_config`` the one that clients receive. While ``stopping`` is set,
    requests of clients are refused, but further steps of in-flight ensemble requests are accepted.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        executor: Executor,
        statistics: ModelStatistics,
        labels: Mapping[str, Sequence[str]],
        *,
        namespace: str = "",
        steps: Mapping[str, str] | None = None,
        step_models: Callable[[], Sequence[Model]] = tuple,
        identity: Identity = NO_IDENTITY,
        cache: CacheLookup | None = None,
        ordered: bool = False,
    ) -> None:
        #: Unique for each load of a version.
        self.serial = next(_serial)
        self.identity = identity
        #: Files outside of the model's directory that it was loaded from.
        self.external: ExternalFiles = {}
        #: The directory of the version, None if it has none, and the configuration as written, before its completion.
        self.directory: Path | None = None
        self.written_config = config
        self._step_models = step_models
        self.name: str = config.name
        self.namespace = namespace
        self.key = qualified(namespace, config.name)
        self.steps = steps or {step.model_name: step.model_name for step in config.ensemble_scheduling.step}
        self.version = version
        self.config = config
        self.statistics = statistics
        runs_on = implementation(config)
        backend = backend_of(runs_on, parameters(config)) if runs_on in BACKENDS else None
        self.signature = _with_request_rules(make_signature(config, version), backend)
        self.set_runtime_facts({})
        self.executor = executor
        self.cache = cache
        self._submit = executor.submit if cache is None else cache.submit
        self._order = InOrder() if ordered else None
        #: Encoded responses in the response cache; they have no order.
        self.cached_messages: CachedMessages | None = cache.messages if cache is not None and not ordered else None
        self.stopping = False
        self._stopped = False
        self.in_flight = 0
        #: Time at which its last request ended (ns, monotonic).
        self.last_ended = 0
        self._labels = labels
        on_request = backend.on_request if backend is not None else frozenset[str]()
        #: The outputs of requests that name none; empty if another server chooses them.
        self._outputs: tuple[str, ...] = ()
        if on_request is not None:
            self._outputs = tuple(name for name in self.signature.outputs if name not in on_request)
        self._reshaped = {spec.name: spec for spec in self.signature.outputs.values() if spec.reshape is not None}
        self._is_ensemble = config.HasField("ensemble_scheduling")
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether requests can run now."""
        return self.executor.ready

    @property
    def unavailable_reason(self) -> str:
        """The reason why no remote server can take its requests; empty if one can, or if this server runs them."""
        return self.executor.unavailable_reason

    @property
    def in_use(self) -> bool:
        """Whether requests are in flight or sequences are active."""
        return bool(self.in_flight or self.executor.sequences)

    @property
    def dependencies(self) -> list[Model]:
        """The models that its responses depend on: itself and, recursively, the models of its steps.

        Raises the error of a model that is not found.
        """
        return [self, *dependencies_of(self._step_models())]

    @property
    def metadata(self) -> dict[str, Any]:
        """The body of ``GET /v2/models/<name>`` for this version; the server may list further versions."""
        config = self.config
        return {
            "name": self.name,
            "versions": [str(self.version)],
            "platform": platform(config),
            "inputs": [_describe(config, tensor) for tensor in config.input],
            "outputs": [_describe(config, tensor) for tensor in config.output],
        }

    def reconfigure(self, config: ModelConfig) -> None:
        """Replace the configuration by one that does not change how requests run."""
        self.config = config

    def set_runtime_facts(self, runtime_facts: RuntimeFacts) -> None:
        """Set the runtime facts that the statistics and the configuration for clients show, and the adapters."""
        self.signature = replace(
            self.signature, adapters=adapters(runtime_facts), output_format=runtime_facts.get(OUTPUT_FORMAT, "")
        )
        self.statistics.runtime_facts = dict(runtime_facts)
        self.shown_config = shown(self.config, runtime_facts)
        self.config_json = render.to_json(self.shown_config).encode()

    async def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        """Load a LoRA adapter at run time. Raises UNSUPPORTED if the model's parameters do not allow it."""
        self._require_adapters()
        await self.executor.load_adapter(name, path, in_place)
        self.set_runtime_facts(self.executor.runtime_facts)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter that was loaded at run time; requests in flight keep it."""
        self._require_adapters()
        await self.executor.unload_adapter(name)
        self.set_runtime_facts(self.executor.runtime_facts)

    @property
    def loads_adapters(self) -> bool:
        """Whether clients may load LoRA adapters."""
        return LOADS_ADAPTERS in self.statistics.runtime_facts

    def _require_adapters(self) -> None:
        if not self.loads_adapters:
            raise unsupported(
                f"model '{self.name}' does not load LoRA adapters at run time: its parameter 'lora_folders' must name "
                "the folders that may have them"
            )
        if self.cache is not None:
            raise unsupported(
                f"model '{self.name}' does not load LoRA adapters at run time, because its responses are cached"
            )

    def labels(self, output: str) -> Sequence[str] | None:
        """Return the labels of an output's classes; None if no file names them."""
        return self._labels.get(output)

    def continues(self, request: InferRequest) -> bool:
        """Whether a request belongs to an active sequence; its requests are accepted until the sequence ends."""
        return self.executor.continues(request)

    def infer(self, request: InferRequest) -> None:
        """Accept a request from a client.

        Raises :class:`ConchError` if the request is refused; otherwise it ends exactly once, through
        ``request.respond``.
        """
        if self.stopping and not self.continues(request):
            _refuse(request)
            raise request.error(STOPPING, Code.UNAVAILABLE)
        self.run_step(request)

    def cached_response(self, message: Hashable) -> object | None:
        """Return the encoded response to an identical earlier message if the response cache still has it."""
        if self.cached_messages is None or self.stopping or logs.current().logs_calls:
            return None
        response = self.cached_messages.find(message)
        if response is not None:
            self.last_ended = monotonic_ns()
        return response

    def run_step(self, request: InferRequest) -> None:
        """Accept a request from inside the server, even while the server stops; raises as :meth:`infer` does."""
        if self._stopped:
            _refuse(request)
            raise request.error(STOPPING, Code.UNAVAILABLE)
        try:
            validate_request(self.signature, request)
        except ConchError:
            _refuse(request)
            raise
        request.model_version = self.version
        if not request.outputs:
            request.outputs = self._outputs
        if self._reshaped:
            request.observe(self._restore_shapes)
        request.on_final = self._ended
        if request.trace is not None:
            request.trace.accepted(request, computes=not self._is_ensemble)
        self.in_flight += 1
        try:
            self._submit(request)
        except Exception as error:
            _refuse(request)
            self.let_go()
            # Client errors are not counted, as in validation.
            if not (isinstance(error, ConchError) and error.code is Code.INVALID_ARG):
                self.statistics.record_failure(FailureReason.REJECTED, monotonic_ns() - request.times.arrived)
            if not isinstance(error, ConchError):
                LOG.exception("a request of '%s' could not be queued", self.name)
                raise internal(error_text(error)) from None
            raise
        if self._order is not None and not request.finished:
            self._order.admit(request)

    def held(self) -> AbstractContextManager[None]:
        """Keep this version loaded, even if it is replaced, while a request to it is being decoded."""
        return _Held(self)

    def let_go(self) -> None:
        """Record that a request, or the holder of this version, has ended."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    async def finish(self, seconds: float | None = None) -> bool:
        """Wait until no request is in flight; False after ``seconds``."""
        if not self.in_flight:
            return True
        self._idle.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def drain(self, seconds: float | None = None) -> None:
        """Wait until no request is in flight and no sequence is active, or for ``seconds``."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        await self.finish(seconds)
        while self.executor.sequences and (seconds is None or loop.time() < start + seconds):
            await asyncio.sleep(SEQUENCE_LOOK_SECONDS)

    def abandon(self) -> None:
        """Fail running and waiting requests, and refuse the next steps of their ensembles."""
        self._refuse_all()
        self.executor.abandon()

    async def stop(self, seconds: float | None = None) -> None:
        """Stop the executor within ``seconds``, or its workers' timeouts if that is None; queued requests fail."""
        self._refuse_all()
        if self.cache is not None:
            self.cache.forget()
        await self.executor.stop(seconds)

    def _refuse_all(self) -> None:
        self.stopping = self._stopped = True
        if self.cache is not None:
            self.cache.fail_waiting(unavailable(STOPPING))

    def _ended(self, request: InferRequest, response: InferResponse) -> None:
        times = request.times
        self.last_ended = now = monotonic_ns()
        self.let_go()
        given_up = request.cancelled and response.error is not None and response.error.code is Code.CANCELLED
        if times.lookup:
            self.statistics.record_cache_hit(times.lookup, times.lookup, now - times.arrived)
        elif response.error is None or (request.responded and not given_up):
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

    def _restore_shapes(self, response: InferResponse) -> None:
        """Restore the shapes of outputs with a ``reshape`` to those that clients expect."""
        response.outputs = [self._restored(tensor) for tensor in response.outputs]

    def _restored(self, tensor: WireTensor) -> WireTensor:
        spec = self._reshaped.get(tensor.name)
        if spec is None:
            return tensor
        batched = self.signature.max_batch_size > 0
        shape = tensor.shape[1:] if batched else tensor.shape
        assert spec.reshape is not None
        variable = iter([size for size, dim in zip(shape, spec.reshape, strict=False) if dim == -1])
        dims = tuple(next(variable, -1) if dim == -1 else dim for dim in spec.dims)
        return WireTensor(tensor.name, tensor.datatype, (*tensor.shape[:1], *dims) if batched else dims, tensor.data)


class _Held(AbstractContextManager[None]):
    """Counts as a request in flight. A class, because entering a generator takes twice as long."""

    __slots__ = ("_model",)

    def __init__(self, model: Model) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._model.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self._model.let_go()


def dependencies_of(models: Iterable[Model]) -> list[Model]:
    """Return the models that the responses of ``models`` depend on."""
    return [dependency for model in models for dependency in model.dependencies]


def _refuse(request: InferRequest) -> None:
    """Release a request that is refused with an error."""
    request.release()
    if request.trace is not None:
        request.trace.refused()


def _with_request_rules(signature: ModelSignature, backend: Backend | None) -> ModelSignature:
    """Add the request rules of ``backend`` that differ from Triton's; an ensemble has no backend."""
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
