"""Runs the requests of an ensemble, on the event loop; requests wait only in the queues of its steps' models.

The model of a step is looked up with ``find`` for every request, so that a reloaded version is used from its next
request on. A step runs as soon as all of its input tensors are available; independent steps run at the same time. Each
response of a decoupled model starts a separate *iteration* through the rest of the graph. Source: Triton's ensemble
scheduler.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Protocol

from conch.core.errors import Code, ConchError, cancelled, error_text, internal
from conch.core.inference import (
    SEQUENCE_END,
    SEQUENCE_START,
    InferRequest,
    InferResponse,
    ModelSignature,
    ParameterValue,
    Timings,
)
from conch.core.tensors import WireTensor
from conch.machine import logs
from conch.server.execution.executor import Executor

LOG = logging.getLogger("conch")


class StepModel(Protocol):
    """The loaded model of a step."""

    signature: ModelSignature

    def continues(self, request: InferRequest) -> bool:
        """Whether a request belongs to an active sequence."""

    def run_step(self, request: InferRequest) -> None:
        """Validate and enqueue a request; raises :class:`ConchError` if it is refused."""


@dataclass(frozen=True, slots=True)
class Step:
    """An ensemble step; ``inputs`` and ``outputs`` map names of the model to names of the ensemble's tensors."""

    model: str
    version: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(slots=True)
class StepTimes:
    """The number of requests to the model of a step, how many of them failed, and their total durations (ns).

    ``total_ns`` is from a request's arrival at the model to its last response; ``queue_ns`` and ``compute_ns`` are
    parts of it.
    """

    count: int = 0
    failed: int = 0
    total_ns: int = 0
    queue_ns: int = 0
    compute_ns: int = 0

    def add(self, times: Timings, *, failed: bool) -> None:
        """Add a request that has ended now."""
        self.count += 1
        self.failed += failed
        self.total_ns += monotonic_ns() - times.arrived
        self.queue_ns += max(times.started - times.queued, 0) if times.queued else 0
        self.compute_ns += times.compute_input + times.compute_infer + times.compute_output


class Ensemble(Executor):
    """The executor of an ensemble; the server checks that the models of its steps are ready.

    ``max_inflight_requests`` limits the in-flight requests of a step for one request of the ensemble, 0 for no limit: a
    decoupled model may respond faster than the next step runs.
    """

    def __init__(
        self,
        signature: ModelSignature,
        steps: Sequence[Step],
        find: Callable[[str, int], StepModel],
        max_inflight_requests: int = 0,
    ) -> None:
        self.signature = signature
        self.steps = steps
        #: The times of each step, over the life of this ensemble.
        self.step_times = [StepTimes() for _ in steps]
        self.find = find
        self.max_inflight_requests = max_inflight_requests
        self._writers = {tensor: step for step in range(len(steps)) for tensor in steps[step].outputs.values()}
        # Precomputed, because most requests are for all outputs.
        self._all_outputs = tuple(signature.outputs)
        self._all_needed = self._needed_steps(self._all_outputs)

    def step_counts(self) -> tuple[int, int]:
        """Return the number of ended requests of all steps, and how many of them failed."""
        return sum(times.count for times in self.step_times), sum(times.failed for times in self.step_times)

    def submit(self, request: InferRequest) -> None:
        """Start a request."""
        request.times.queued = monotonic_ns()
        _Run(self, request).start()

    def continues(self, request: InferRequest) -> bool:
        """Whether a request belongs to an active sequence of a step's model."""
        try:
            return any(self.find(step.model, step.version).continues(request) for step in self.steps)
        except ConchError:
            return False

    def needed_steps(self, outputs: Sequence[str]) -> Sequence[int]:
        """Return the indices of the steps on which ``outputs`` depend, in ascending order."""
        if self._all_outputs == outputs:
            return self._all_needed
        return self._needed_steps(outputs)

    def _needed_steps(self, outputs: Sequence[str]) -> Sequence[int]:
        needed: set[int] = set()
        tensors = list(outputs)
        while tensors:
            step = self._writers.get(tensors.pop())
            if step is not None and step not in needed:
                needed.add(step)
                tensors += self.steps[step].inputs.values()
        return sorted(needed)


@dataclass(slots=True, eq=False)
class _Iteration:
    """The tensors of one pass through the graph; ``None`` marks a tensor that its step did not produce.

    An iteration also has the tensors of its parents.
    """

    tensors: dict[str, WireTensor | None]
    parent: _Iteration | None = None
    children: list[_Iteration] = field(default_factory=list)
    started: set[int] = field(default_factory=set)
    completed: bool = False

    def has(self, name: str) -> bool:
        return name in self.tensors or (self.parent is not None and self.parent.has(name))

    def get(self, name: str) -> WireTensor | None:
        if name in self.tensors:
            return self.tensors[name]
        return self.parent.get(name) if self.parent is not None else None

    def was_started(self, step: int) -> bool:
        return step in self.started or (self.parent is not None and self.parent.was_started(step))

    def forget(self) -> None:
        """Release all tensors and child iterations; the children refer to this iteration, which forms a cycle."""
        self.tensors = {}
        children, self.children = self.children, []
        for child in children:
            child.forget()

    def family(self) -> Iterator[_Iteration]:
        yield self
        for child in self.children:
            yield from child.family()


class _Run:
    """The execution of one ensemble request."""

    def __init__(self, ensemble: Ensemble, request: InferRequest) -> None:
        self._ensemble = ensemble
        self._request = request
        self._outputs = request.outputs or tuple(ensemble.signature.outputs)
        self._steps = ensemble.needed_steps(self._outputs)
        tensors: dict[str, WireTensor | None] = dict.fromkeys(ensemble.signature.inputs)
        tensors.update(request.inputs)
        self._root = _Iteration(tensors)
        self._in_flight: dict[int, InferRequest] = {}
        self._limit = ensemble.max_inflight_requests
        self._running = [0] * len(ensemble.steps)
        self._waiting: list[deque[_Iteration]] = [deque() for _ in ensemble.steps] if self._limit else []
        self._correlation_id = request.correlation_id
        self._flags = request.flags

    def start(self) -> None:
        self._request.on_cancel = self._cancel
        try:
            self._advance(self._root)
        except Exception as error:
            self._fail_unexpectedly(error)

    def _advance(self, changed: _Iteration) -> None:
        """Start the steps and send the responses that new tensors in ``changed`` make possible."""
        complete: list[_Iteration] = []
        for iteration in list(changed.family()) if changed.children else (changed,):
            for step in self._steps:
                if not iteration.was_started(step) and self._is_ready(step, iteration):
                    iteration.started.add(step)
                    self._start(step, iteration)
                    if self._request.finished:
                        return
            if not iteration.completed and all(iteration.has(name) for name in self._outputs):
                iteration.completed = True
                complete.append(iteration)
        if self._request.finished:
            return
        for iteration in complete:
            if iteration.parent is not None:
                iteration.parent.children.remove(iteration)  # it is complete
            last = iteration is complete[-1] and not self._in_flight
            self._respond(iteration, final=last or not self._ensemble.signature.decoupled)
        if not self._in_flight and not self._request.finished:
            self._end()
        if self._request.finished:
            self._root.forget()

    def _is_ready(self, step: int, iteration: _Iteration) -> bool:
        # A loop is faster than a generator; this runs for every new tensor.
        for tensor in self._ensemble.steps[step].inputs.values():
            if tensor not in iteration.tensors and not iteration.has(tensor):
                return False
        return True

    def _respond(self, iteration: _Iteration, final: bool) -> None:
        outputs = [tensor for name in self._outputs if (tensor := iteration.get(name)) is not None]
        if len(outputs) < len(self._outputs):
            names = {tensor.name for tensor in outputs}
            for name in self._outputs:
                if name not in names:
                    logs.verbose(1, "Composing models did not output tensor %s", name)
        sequence: dict[str, ParameterValue] = {
            "sequence_id": self._correlation_id,
            "sequence_start": bool(self._flags & SEQUENCE_START),
            "sequence_end": bool(self._flags & SEQUENCE_END),
        }
        self._request.responded = True
        self._request.respond(InferResponse(outputs, final=final, parameters=sequence if outputs else None))

    def _start(self, index: int, iteration: _Iteration) -> None:
        if self._limit and self._running[index] >= self._limit:
            self._waiting[index].append(iteration)
            return
        self._running[index] += 1
        step, parent = self._ensemble.steps[index], self._request
        try:
            model = self._ensemble.find(step.model, step.version)
            request = InferRequest(
                step.model,
                _inputs(step, iteration, model.signature),
                lambda response: self._on_response(request, index, iteration, model.signature, response),
                model_version=model.signature.version,
                id=parent.id,
                outputs=tuple(step.outputs),
                parameters=parent.parameters,
                correlation_id=self._correlation_id,
                flags=self._flags,
                priority=parent.priority,
                timeout=parent.timeout,
            )
            if parent.trace is not None:
                request.trace = parent.trace.child()
            self._in_flight[request.serial] = request
            if not parent.times.started:
                parent.times.started = parent.times.queued
            model.run_step(request)
        except ConchError as error:
            self._fail(error)

    def _on_response(
        self,
        request: InferRequest,
        index: int,
        iteration: _Iteration,
        signature: ModelSignature,
        response: InferResponse,
    ) -> None:
        try:
            self._take(request, index, iteration, signature, response)
        except Exception as error:  # the step's model would only log it
            self._fail_unexpectedly(error)

    def _take(
        self,
        request: InferRequest,
        index: int,
        iteration: _Iteration,
        signature: ModelSignature,
        response: InferResponse,
    ) -> None:
        if response.final:
            self._in_flight.pop(request.serial, None)
            self._add_times(request)
            self._ensemble.step_times[index].add(request.times, failed=response.error is not None)
            self._running[index] -= 1
            if self._limit and self._waiting[index] and not self._request.finished and response.error is None:
                self._start(index, self._waiting[index].popleft())
        if self._request.finished:
            return
        if response.error is not None:
            self._fail(response.error)
            return
        self._take_over_sequence(response)
        changed = iteration
        if signature.decoupled:
            if not response.empty:
                changed = _Iteration({}, parent=iteration)
                iteration.children.append(changed)
                self._store(index, changed, response)
        else:
            self._store(index, changed, response)
        self._advance(changed)

    def _store(self, index: int, iteration: _Iteration, response: InferResponse) -> None:
        tensors = {tensor.name: tensor for tensor in response.outputs}
        for output, name in self._ensemble.steps[index].outputs.items():
            tensor = tensors.get(output)
            if tensor is not None:
                tensor = WireTensor(name, tensor.datatype, tensor.shape, tensor.data)
            iteration.tensors[name] = tensor

    def _add_times(self, request: InferRequest) -> None:
        total, times = self._request.times, request.times
        total.compute_input += times.compute_input
        total.compute_infer += times.compute_infer
        total.compute_output += times.compute_output

    def _take_over_sequence(self, response: InferResponse) -> None:
        parameters = response.parameters
        if "sequence_id" in parameters:
            sequence = parameters["sequence_id"]
            self._correlation_id = sequence if isinstance(sequence, int | str) else int(sequence)
        for key, flag in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
            if key in parameters:
                self._flags = self._flags | flag if parameters[key] else self._flags & ~flag

    def _end(self) -> None:
        """End a request that has no running steps and can start none; an error unless the ensemble is decoupled."""
        if self._ensemble.signature.decoupled:
            self._request.respond(InferResponse())
            return
        deadlock = self._request.error(
            "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
        )
        self._fail(deadlock)

    def _fail(self, error: ConchError) -> None:
        """Fail the request with its first error and cancel its running steps."""
        if error.code is Code.CANCELLED:
            self._request.fail(error)
        else:
            where = f"in ensemble '{self._ensemble.signature.name}', "
            self._request.fail(error.prefixed(where))
        self._cancel_steps()

    def _fail_unexpectedly(self, error: Exception) -> None:
        LOG.error("a request of ensemble '%s' failed", self._ensemble.signature.name, exc_info=error)
        self._fail(internal(error_text(error)))

    def _cancel(self, request: InferRequest) -> None:
        request.fail(cancelled())
        self._cancel_steps()

    def _cancel_steps(self) -> None:
        self._root.forget()
        for waiting in self._waiting:
            waiting.clear()
        for request in list(self._in_flight.values()):
            request.cancel()


def _inputs(step: Step, iteration: _Iteration, signature: ModelSignature) -> dict[str, WireTensor]:
    inputs: dict[str, WireTensor] = {}
    for name, source in step.inputs.items():
        tensor = iteration.get(source)
        if tensor is not None:
            shape = _adapt(tensor.shape, signature, name)
            inputs[name] = WireTensor(name, tensor.datatype, shape, tensor.data)
    return inputs


def _adapt(shape: tuple[int, ...], signature: ModelSignature, name: str) -> tuple[int, ...]:
    """Add or remove a batch dimension of 1 between models with and without batching."""
    spec = signature.inputs.get(name)
    if spec is None:
        return shape
    fits = len(shape) == len(spec.dims) and all(dim in (-1, size) for size, dim in zip(shape, spec.dims, strict=True))
    if signature.max_batch_size > 0:
        return (1, *shape) if fits else shape
    return shape[1:] if not fits and shape[:1] == (1,) else shape
