"""One loaded version of a model, as the front ends see it.

Validates, counts and accounts for every request; how requests are executed is its executor's
business: a dispatcher with instances, or an ensemble.  Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import count
from time import monotonic_ns
from typing import Any, Final, Protocol

from conch import logs
from conch.backends.table import BACKENDS, Backend, RequestParameters, backend_of
from conch.config import render
from conch.config.schema import ModelConfig, datatype, implementation
from conch.config.signature import full_shape, parameters, platform
from conch.config.signature import signature as make_signature
from conch.errors import Code, ConchError, did_you_mean, invalid, unavailable
from conch.inference import InferRequest, InferResponse, ModelSignature
from conch.repository.fingerprint import ExternalFiles
from conch.repository.identity import NO_IDENTITY, Identity
from conch.repository.naming import qualified
from conch.server.cached_messages import CachedMessages
from conch.server.runtime_facts import RuntimeFacts, shown
from conch.telemetry.statistics import FailureReason, ModelStatistics
from conch.tensors import WireTensor
from conch.validation import validate_request
from conch.workers.host.process import WorkerProcess

# In Triton's protocol a request may carry any parameter, and a backend ignores those that it does not know; a
# misspelt option then changes nothing, and nobody is told. Requests of Python models and of ensembles stay like that.
# The wire formats call this for what a client sends; parameters that the server itself adds (forwarded headers) are
# not checked.


#: How alike two names are (``difflib``'s ratio) when an unknown one is refused for it, and when it is only suggested.
_MISSPELT = 0.85
_SUGGESTED = 0.6
#: What clients of the protocol send to any server: the member ``id`` of a body for ``generate``, which is a parameter
#: as well, as in Triton; what MLServer's clients say of their tensors; and what KServe's pass on from HTTP to gRPC.
_PROTOCOL = frozenset({"id", "content_type", "headers", "binary_data_output"})
#: How many names that have been judged are remembered for a model, and the longest that is compared with others.
_REMEMBERED = 256
_LONGEST = 64
#: How many unknown names a request may have: to judge one takes a fifth of a millisecond.
_MOST_UNKNOWN = 64


class CheckParameters:
    """The check for requests of ``model``, which has ``inputs``: raises INVALID_ARG for a name that is not accepted."""

    def __init__(self, model: str, accepted: RequestParameters, inputs: Iterable[str]) -> None:
        self._model = model
        self._names = accepted.names | _PROTOCOL
        self._others = accepted.others
        self._inputs = frozenset(inputs)
        self._known = accepted.names | self._inputs
        # To compare a name with all that are known takes longer than all else that is done with a small request.
        self._judged = lru_cache(_REMEMBERED)(self._problem)

    def __call__(self, names: Iterable[str]) -> None:
        unknown = 0
        for name in names:
            if name not in self._names:
                problem = self._judged(name) if len(name) <= _LONGEST else self._problem(name)
                unknown += 1
                if not problem and unknown > _MOST_UNKNOWN:
                    problem = f"the request has more than {_MOST_UNKNOWN} parameters that model '{self._model}' ignores"
                if problem:
                    raise invalid(problem)

    def _problem(self, name: str) -> str:
        """Why the name is refused; empty where it is accepted."""
        if name in self._inputs:
            if self._others:
                return ""
            return f"'{name}' is an input of model '{self._model}', not a parameter: send it as a tensor"
        likeness = _MISSPELT if self._others else _SUGGESTED
        hint = did_you_mean(name, self._known, likeness=likeness)
        if hint:
            return f"parameter '{name}' is not known to model '{self._model}'; {hint}"
        if self._others:
            return ""
        known = ", ".join(sorted(self._known))
        return f"parameter '{name}' is not known to model '{self._model}'; its requests have {known}"


_serial = count(1)

#: How often it is looked whether the sequences of a model that stops have ended (s).
SEQUENCE_LOOK_SECONDS: Final = 0.1
STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"


class Executor(Protocol):
    """What runs the requests of a model version."""

    @property
    def ready(self) -> bool: ...

    @property
    def away(self) -> str:
        """Why other servers, which are to run the requests, cannot; empty where they can, or this one runs them."""

    @property
    def processes(self) -> Sequence[WorkerProcess]: ...

    @property
    def sequences(self) -> int:
        """How many sequences are under way."""

    def continues(self, request: InferRequest) -> bool:
        """Whether a request belongs to a sequence that is under way."""

    def submit(self, request: InferRequest) -> None: ...

    def fail_waiting(self, error: ConchError) -> None: ...

    def set_log(self, levels: Mapping[str, Any]) -> None: ...

    def retire(self) -> None:
        """Other versions, or none, get the requests that come from now on, except some that are being decoded."""

    def abandon(self) -> None: ...

    async def stop(self, seconds: float | None) -> None: ...


class Model:
    """A model version that has been loaded; ``namespace`` is its repository, where names may be ambiguous.

    ``steps`` has the keys of an ensemble's members, by name; ``members`` finds those that its steps would use now.
    ``identity`` says what this version itself answers from, for a cache that may outlive it.

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
        *,
        namespace: str = "",
        steps: Mapping[str, str] | None = None,
        members: Callable[[], Sequence[Model]] = tuple,
        identity: Identity = NO_IDENTITY,
    ) -> None:
        #: Tells every load of every version from all others.
        self.serial = next(_serial)
        self.identity = identity
        #: The files outside of the model's directory that it was loaded from.
        self.external: ExternalFiles = {}
        self._members = members
        self.name: str = config.name
        self.namespace = namespace
        self.key = qualified(namespace, config.name)
        self.steps = steps or {step.model_name: step.model_name for step in config.ensemble_scheduling.step}
        self.version = version
        self.config = config
        self.statistics = statistics
        self.tell({})
        runs_on = implementation(config)
        backend = backend_of(runs_on, parameters(config)) if runs_on in BACKENDS else None
        self.signature = _with_ways_of(make_signature(config, version), backend)
        self.executor = executor
        self.stopping = False
        self._stopped = False
        #: What the loader gives a model whose responses are cached in the server.
        self.cached_messages: CachedMessages | None = None
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
    def away(self) -> str:
        """Why the servers that are to run its requests cannot; empty where they can, or this one does."""
        return self.executor.away

    @property
    def in_use(self) -> bool:
        """Whether requests are in flight or sequences under way."""
        return bool(self.in_flight or self.executor.sequences)

    @property
    def sources(self) -> list[Model]:
        """The models that its answers come from: itself and all that its steps lead to.

        Raises what finding a model raises.
        """
        return [self, *origins_of(self._members())]

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

    def tell(self, runtime_facts: RuntimeFacts) -> None:
        """Show what the model runs with in its configuration and its statistics."""
        self.statistics.runtime_facts = dict(runtime_facts)
        self.shown_config = shown(self.config, runtime_facts)
        self.config_json = render.to_json(self.shown_config).encode()

    def labels(self, output: str) -> Sequence[str] | None:
        """The labels of an output's classes, where a file names them."""
        return self._labels.get(output)

    def continues(self, request: InferRequest) -> bool:
        """Whether a request belongs to a sequence that is under way, whose requests are accepted to the end."""
        return self.executor.continues(request)

    def infer(self, request: InferRequest) -> None:
        """Accept a request from a client.

        Raises :class:`ConchError` when it is refused; otherwise it ends exactly once, through
        ``request.respond``.
        """
        if self.stopping and not self.continues(request):
            _refuse(request)
            raise request.error(STOPPING, Code.UNAVAILABLE)
        self.run_step(request)

    def answer_again(self, message: Hashable) -> object | None:
        """What was sent in answer to the same message before, if the response cache still has it."""
        if self.cached_messages is None or self.stopping or logs.current().log_verbose_level:
            return None
        answer = self.cached_messages.answer_to(message)
        if answer is not None:
            self.last_ended = monotonic_ns()
        return answer

    def run_step(self, request: InferRequest) -> None:
        """Accept a request from inside the server, also while the server stops; raises as :meth:`infer` does."""
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
            self._restore_shapes(request)
        request.on_final = self._ended
        if request.trace is not None:
            request.trace.accepted(request, computes=not self._is_ensemble)
        self.in_flight += 1
        try:
            self.executor.submit(request)
        except ConchError as error:
            _refuse(request)
            self._left()
            if error.code is not Code.INVALID_ARG:  # the client's fault, as what validation refuses
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

    async def drain(self, seconds: float | None = None) -> None:
        """Wait until nothing is in flight and no sequence is under way, for ``seconds`` at most."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await self.finish(seconds)
        while self.executor.sequences and (seconds is None or loop.time() < begun + seconds):
            await asyncio.sleep(SEQUENCE_LOOK_SECONDS)

    def abandon(self) -> None:
        """Fail the requests that run or wait, and refuse the next steps of ensembles that they belong to."""
        self.stopping = self._stopped = True
        self.executor.fail_waiting(unavailable(STOPPING))
        self.executor.abandon()

    async def stop(self, seconds: float | None = None) -> None:
        """End the executor within ``seconds``, or after its workers' timeouts; queued requests fail."""
        self.stopping = self._stopped = True
        self.executor.fail_waiting(unavailable(STOPPING))
        await self.executor.stop(seconds)

    def _ended(self, request: InferRequest, response: InferResponse) -> None:
        times = request.times
        self.last_ended = now = monotonic_ns()
        self._left()
        given_up = request.cancelled and response.error is not None and response.error.code is Code.CANCELLED
        if times.lookup:
            self.statistics.record_cache_hit(times.lookup, times.lookup, now - times.arrived)
        elif response.error is None or (request.answered and not given_up):
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


def origins_of(members: Iterable[Model]) -> list[Model]:
    """The models that the answers of an ensemble with these members come from."""
    return [origin for member in members for origin in member.sources]


def _refuse(request: InferRequest) -> None:
    """Let go of a request that is refused with an error."""
    request.release()
    if request.trace is not None:
        request.trace.refused()


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
