"""Requests, responses and model signatures, shared by front ends, schedulers and workers.

Used on the server's event loop, without I/O. A request may have any number of responses; the one marked ``final``
ends it. A request ends exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import monotonic_ns
from typing import Final, Protocol

from conch.core.errors import Code, ConchError, internal
from conch.core.tensors import Buffer, Loan, StoredData, WireTensor

LOG = logging.getLogger("conch")

ParameterValue = bool | int | float | str
#: Raises INVALID_ARG for parameter names that a request may not use.
ParameterCheck = Callable[[Iterable[str]], None]
OnResponse = Callable[["InferResponse"], None]
OnText = Callable[[str], None]

#: ``TRITONSERVER_REQUEST_FLAG_SEQUENCE_START`` and ``…_END``.
SEQUENCE_START: Final = 1
SEQUENCE_END: Final = 2

_serial = count(1)


def ignore(*arguments: object) -> None:
    """Do nothing: a callback for unused results; assigned in place of a callback, it releases the callback's owner."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model, without the batch dimension; ``-1`` is a variable dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """The inputs, outputs and limits that validate requests to a model version.

    ``max_batch_size`` 0 means no batch dimension. ``by_row``: ``generate`` returns a value for each row instead of one
    flat list; without a batch dimension it accepts several texts and makes a request of each. ``adapters`` are names of
    LoRA adapters, and ``output_format`` is how the model writes reasoning and tool calls; the worker of the model
    reports them.
    """

    name: str
    version: int
    max_batch_size: int
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    decoupled: bool = False
    check_parameters: ParameterCheck | None = field(default=None, compare=False)
    by_row: bool = False
    adapters: tuple[str, ...] = ()
    output_format: str = ""


@dataclass(slots=True)
class Timings:
    """The times at which a request reached each stage (``monotonic_ns``), and durations measured by the worker (ns)."""

    arrived: int = field(default_factory=monotonic_ns)
    queued: int = 0
    started: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0
    #: Duration of the response cache lookup (ns); 0 unless it was a hit.
    lookup: int = 0
    #: The cache key, and the cache entry with the response.
    key: bytes = b""
    entry: object = None


class InferResponse:
    """One response of a request: output tensors in the backend's order, or an error; ``final`` ends the request.

    A response without outputs and error is the *empty final* of a decoupled model.
    """

    __slots__ = ("error", "final", "outputs", "parameters")

    def __init__(
        self,
        outputs: Sequence[WireTensor] = (),
        *,
        error: ConchError | None = None,
        final: bool = True,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        self.outputs = outputs
        self.error = error
        self.final = final
        self.parameters = parameters or {}

    @property
    def empty(self) -> bool:
        """Whether there are no outputs and no error."""
        return not self.outputs and self.error is None

    def forget_frames(self) -> None:
        """Clear the traceback of the error; its frames reference this response and its receiver."""
        if self.error is not None:
            self.error.__traceback__ = None


class OutputTarget(Protocol):
    """The destination of an output in a shared memory region."""

    def check(self, output: str, size: int) -> None:
        """Raise INTERNAL if ``size`` bytes of an output do not fit."""

    def lend(self) -> Loan | None:
        """Return memory to which a worker can write the output directly; None if this process must write it."""

    def write(self, data: Buffer) -> None:
        """Write an output that fits. Raises INVALID_ARG if the client has truncated the memory."""


class SharedTensors:
    """The tensors of a request that are in shared memory regions.

    ``output_targets`` maps outputs to their targets, ``sources`` has the inputs that are read when the request runs. If
    ``copies`` is set, the response cache needs the outputs too, and they stay in the response until :meth:`deliver`.
    """

    __slots__ = ("copies", "output_targets", "sources")

    def __init__(self) -> None:
        self.output_targets: dict[str, OutputTarget] = {}
        self.sources: list[CheckedData] = []
        self.copies = False

    def loans(self) -> dict[str, Loan]:
        """Return the memory of the outputs that a worker can write directly, by output name."""
        if self.copies:
            return {}
        loans = ((name, target.lend()) for name, target in self.output_targets.items())
        return {name: loan for name, loan in loans if loan is not None}

    def lends(self, name: str) -> bool:
        """Return whether a worker may have written an output directly."""
        target = self.output_targets.get(name)
        return target is not None and not self.copies and target.lend() is not None

    def put(self, name: str, data: Buffer) -> bool:
        """Write an output to its target without copying it first; False if :meth:`deliver` must write it."""
        target = self.output_targets.get(name)
        if target is None or self.copies:
            return False
        try:
            target.check(name, len(data))
            target.write(data)
        except ConchError:
            return False
        return True

    def deliver(self, response: InferResponse) -> None:
        """Write the remaining outputs to their targets, and remove their data from the response.

        Raises the errors of the targets, and INVALID_ARG for inputs that were missing when they were read.
        """
        for source in self.sources:
            source.require_whole()
        for tensor in response.outputs:
            if tensor.name in self.output_targets:
                self.output_targets[tensor.name].check(tensor.name, len(tensor.data))
        outputs = []
        for tensor in response.outputs:
            if tensor.name in self.output_targets and tensor.data:
                self.output_targets[tensor.name].write(tensor.data)
                tensor = WireTensor(tensor.name, tensor.datatype, tensor.shape, b"")
            outputs.append(tensor)
        response.outputs = outputs


class CheckedData(Protocol):
    """Data that may turn out to be incomplete when it is read."""

    def require_whole(self) -> None:
        """Raise INVALID_ARG if some data was missing when it was read."""


class Holder(Protocol):
    """The owner of a request's prepared form."""

    def drop(self, request: InferRequest) -> None: ...


class RequestTrace(Protocol):
    """Records the events of a traced request; see :mod:`conch.telemetry.tracing.trace`."""

    @property
    def context(self) -> str | None:
        """The trace context for services that the model calls, as JSON; None without a context."""

    def child(self) -> RequestTrace:
        """Return the trace of a request that is made on behalf of this request."""

    def accepted(self, request: InferRequest, computes: bool) -> None:
        """Record that the request is about to be queued; ``computes`` is False for an ensemble."""

    def ended(self, request: InferRequest) -> None:
        """Record that the request has its final response, before this is delivered."""

    def deliver(self, response: InferResponse, on_response: OnResponse) -> None:
        """Pass a response to ``on_response`` and record when it was sent."""

    def refused(self) -> None:
        """Record that the request was refused and gets no response."""


class ResponseOrder(Protocol):
    """Decides when the responses of a request are delivered; see :mod:`conch.server.schedulers.ordering`."""

    def deliver(self, request: InferRequest, response: InferResponse, on_response: OnResponse) -> None:
        """Call ``request.deliver`` with the response when its turn comes."""


class InferRequest:
    """An inference request and its callbacks.

    Front ends create it with ``on_response``, which is called on the event loop for each response and never replaced.
    Before, each response passes the observers that the model, the cache and the scheduler have added. The scheduler or
    worker that holds the request sets ``on_cancel``. The model that counts it sets ``on_final``, which is called before
    the observers of the last response. A request that has ended or was refused releases its inputs and callbacks,
    because a callback may reference the request: the cycle would otherwise wait for the garbage collector.
    ``outputs`` has the names of the requested outputs; empty means all. ``timeout`` is in microseconds.
    """

    __slots__ = (
        "batch_size", "cancelled", "correlation_id", "deadline", "finished", "flags", "holder", "id", "inputs",
        "length", "model_name", "model_version", "observers", "on_cancel", "on_final", "on_response", "on_text",
        "order", "outputs", "parameters", "priority", "responded", "responses", "sequences", "serial", "shared",
        "start_deadline", "timeout", "times", "trace",
    )  # fmt: skip

    def __init__(
        self,
        model_name: str,
        inputs: dict[str, WireTensor],
        on_response: OnResponse,
        *,
        model_version: int = -1,
        id: str = "",
        outputs: tuple[str, ...] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
        correlation_id: int | str = 0,
        flags: int = 0,
        priority: int = 0,
        timeout: int = 0,
    ) -> None:
        self.serial = next(_serial)
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.inputs = inputs
        self.outputs = outputs
        self.parameters: Mapping[str, ParameterValue] = parameters or {}
        self.correlation_id = correlation_id
        self.flags = flags
        self.priority = priority
        #: The queue deadline: a request that has not started is then refused (ns, monotonic); 0 for none.
        self.start_deadline = 0
        self.timeout = timeout
        #: The client's deadline: the request then fails, even while it runs (ns, monotonic); 0 for none.
        self.deadline = 0
        self.batch_size = 1
        self.times = Timings()
        self.on_response = on_response
        self.observers: tuple[OnResponse, ...] = ()
        #: Set if responses are delivered in the order of their requests.
        self.order: ResponseOrder | None = None
        self.on_cancel: Callable[[InferRequest], None] | None = None
        self.on_final: Callable[[InferRequest, InferResponse], None] | None = None
        #: Called, while the request runs, with the beginning of the response's text, as far as it is known. A front end
        #: sets it before the request is sent; it changes nothing else.
        self.on_text: OnText | None = None
        #: Whether the backend itself responded, possibly with an error.
        self.responded = False
        self.responses = 0
        self.cancelled = False
        self.finished = False
        #: The longest sequence (tokens, frames …) and the number of sequences; 0 until a worker has counted them.
        self.length = 0
        self.sequences = 0
        #: The tensors in shared memory regions, or None.
        self.shared: SharedTensors | None = None
        #: Owner of the prepared form of this request; drops it when the request ends.
        self.holder: Holder | None = None
        self.trace: RequestTrace | None = None

    def observe(self, observer: OnResponse) -> None:
        """Call ``observer`` with each response, before earlier observers; it may change the outputs."""
        self.observers = (observer, *self.observers)

    def respond(self, response: InferResponse) -> None:
        """Pass a response to the observers and deliver it; responses after the final one are dropped."""
        if self.finished:
            return
        on_response, observers, order = self.on_response, self.observers, self.order
        if response.final:
            self.finished = True
            if self.holder is not None:
                self.holder.drop(self)
            on_final = self.on_final
            self.release()
            if self.trace is not None:
                self.trace.ended(self)
            if on_final is not None:
                on_final(self, response)
        self.responses += 1
        try:
            for observer in observers:
                observer(response)
        except Exception:
            LOG.exception("a response of request %s could not be processed", self.serial)
            response = InferResponse(error=internal("the response could not be processed"), final=response.final)
        if order is None:
            self.deliver(response, on_response)
        else:
            order.deliver(self, response, on_response)

    def deliver(self, response: InferResponse, on_response: OnResponse) -> None:
        """Call ``on_response``, which :meth:`respond` has taken from this request."""
        try:
            if self.trace is None:
                on_response(response)
            else:
                self.trace.deliver(response, on_response)
        except Exception:
            # An exception must not reach the scheduler or worker that responds, because it has other requests.
            LOG.exception("a response of request %s could not be delivered", self.serial)
        if response.error is not None:
            response.forget_frames()

    def preview(self, text: str) -> None:
        """Pass the beginning of the response's text to ``on_text``."""
        if self.on_text is None:
            return
        try:
            self.on_text(text)
        except Exception:
            LOG.exception("a text of request %s could not be delivered", self.serial)

    def release(self) -> None:
        """Release the inputs and callbacks; called when no more responses follow."""
        self.inputs = {}
        self.on_cancel = None
        self.on_final = None
        self.on_text = None
        self.on_response = ignore
        self.observers = ()

    def fail(self, error: ConchError) -> None:
        """End the request with an error."""
        self.respond(InferResponse(error=error))

    def cancel(self) -> None:
        """Cancel the request: ``on_cancel`` is called once and ends it."""
        if self.cancelled or self.finished:
            return
        self.cancelled = True
        if self.on_cancel is not None:
            self.on_cancel(self)

    def hold_copies(self) -> None:
        """Reserve bytes for copies of the inputs in shared memory.

        Raises UNAVAILABLE if the server holds too many bytes.
        """
        for tensor in self.inputs.values():
            if isinstance(tensor.data, StoredData):
                tensor.data.hold()

    def error(self, message: str, code: Code = Code.INVALID_ARG) -> ConchError:
        """Return an error about this request, with Triton's prefix for such messages."""
        return ConchError(f"[request id: {self.id or '<id_unknown>'}] {message}", code)
