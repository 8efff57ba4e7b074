"""Requests, responses and what a model accepts: the vocabulary between front ends, schedulers and workers.

Lives on the server's event loop; nothing here does I/O.  A request may have any number of
responses; the one marked ``final`` ends it, and it ends exactly once, whoever tries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import monotonic_ns
from typing import Final, Protocol

from conch.errors import Code, ConchError
from conch.tensors import Buffer, Loan, StoredData, WireTensor

LOG = logging.getLogger("conch")

ParameterValue = bool | int | float | str
#: Raises INVALID_ARG for names that the parameters of a request may not have.
ParameterCheck = Callable[[Iterable[str]], None]

#: ``TRITONSERVER_REQUEST_FLAG_SEQUENCE_START`` and ``…_END``.
SEQUENCE_START: Final = 1
SEQUENCE_END: Final = 2

_serial = count(1)


def _ignore(response: InferResponse) -> None:
    """Take the place of a callback that has had its last response."""


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
    """What requests to a model version are checked against.  ``max_batch_size`` 0 means no batch dimension.

    ``by_row``: ``generate`` answers with a value for each row, not with one flat list; without a batch dimension it
    takes several texts, which are a request each.
    """

    name: str
    version: int
    max_batch_size: int
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    decoupled: bool = False
    check_parameters: ParameterCheck | None = field(default=None, compare=False)
    by_row: bool = False


@dataclass(slots=True)
class Timings:
    """When a request reached each stage (``monotonic_ns``), and what the worker measured (durations, ns)."""

    arrived: int = field(default_factory=monotonic_ns)
    queued: int = 0
    started: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0
    #: How long the response cache took to find the answer (ns); 0 for a request that it does not answer.
    lookup: int = 0
    #: The cache key, and the entry of the cache with the answer.
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
        """Whether this carries nothing but the end."""
        return not self.outputs and self.error is None

    def forget_frames(self) -> None:
        """Let go of the frames of whoever has raised the error: they hold this response, and its receiver."""
        if self.error is not None:
            self.error.__traceback__ = None


class OutputTarget(Protocol):
    """Where an output goes whose client wants it in shared memory."""

    def check(self, output: str, size: int) -> None:
        """Raise INTERNAL if ``size`` bytes of an output do not fit."""

    def lend(self) -> Loan | None:
        """Where a worker can put an output for itself; None if only this process can, or should."""

    def write(self, data: Buffer) -> None:
        """Put an output there that fits.  Raises INVALID_ARG where the client has taken the memory away."""


class SharedTensors:
    """The tensors of a request that are in shared memory of its client.

    ``places`` are those of outputs by name, ``sources`` the inputs that are read when the request runs.  ``copies``
    says that somebody else needs the outputs as well, which then stay in the response until :meth:`deliver`.
    """

    __slots__ = ("copies", "places", "sources")

    def __init__(self) -> None:
        self.places: dict[str, OutputTarget] = {}
        self.sources: list[CheckedData] = []
        self.copies = False

    def loans(self) -> dict[str, Loan]:
        """Where the outputs go that a worker can write for itself, by name."""
        if self.copies:
            return {}
        loans = ((name, place.lend()) for name, place in self.places.items())
        return {name: loan for name, loan in loans if loan is not None}

    def lends(self, name: str) -> bool:
        """Whether a worker may have written an output for itself."""
        place = self.places.get(name)
        return place is not None and not self.copies and place.lend() is not None

    def put(self, name: str, data: Buffer) -> bool:
        """Write an output to its place before there is a copy of it; False where :meth:`deliver` has to."""
        place = self.places.get(name)
        if place is None or self.copies:
            return False
        try:
            place.check(name, len(data))
            place.write(data)
        except ConchError:
            return False
        return True

    def deliver(self, response: InferResponse) -> None:
        """Write the outputs that have places and are not there yet, and take their data out of the response.

        Raises what their places raise, and INVALID_ARG for inputs that were gone when they were read.
        """
        for source in self.sources:
            source.require_whole()
        for tensor in response.outputs:
            if tensor.name in self.places:
                self.places[tensor.name].check(tensor.name, len(tensor.data))
        outputs = []
        for tensor in response.outputs:
            if tensor.name in self.places and tensor.data:
                self.places[tensor.name].write(tensor.data)
                tensor = WireTensor(tensor.name, tensor.datatype, tensor.shape, b"")
            outputs.append(tensor)
        response.outputs = outputs


class CheckedData(Protocol):
    """Data of which it turns out late that it is not all there."""

    def require_whole(self) -> None:
        """Raise INVALID_ARG if some of it was missing when it was read."""


class Holder(Protocol):
    """Whoever keeps a request's prepared form."""

    def drop(self, request: InferRequest) -> None: ...


class RequestTrace(Protocol):
    """Records what happens to a request that is traced; see :mod:`conch.telemetry.tracing.trace`."""

    @property
    def context(self) -> str | None:
        """The context for whoever the model calls, as JSON; None where there is none."""

    def child(self) -> RequestTrace:
        """The trace of a request that is made to answer this one."""

    def accepted(self, request: InferRequest, computes: bool) -> None:
        """The request is about to be queued; ``computes`` is False for an ensemble's."""

    def refused(self) -> None:
        """The request has not been queued after all, and gets no response."""


class InferRequest:
    """A request on its way through the server.

    Front ends build it and give ``on_response``, called on the event loop once for every
    response.  Whoever holds the request while it waits or runs sets ``on_cancel``; whoever
    accounts for it sets ``on_final``, which is called before the last ``on_response``.  What has
    ended, or was refused, lets go of its inputs and of all callbacks: whoever is called may hold the
    request, and neither should have to wait for the garbage collector.
    ``outputs`` names the outputs wanted; empty means all.  ``timeout`` is in microseconds.
    """

    __slots__ = (
        "answered", "batch_size", "cancelled", "correlation_id", "deadline", "expires", "finished", "flags", "holder",
        "id", "inputs", "length", "model_name", "model_version", "on_cancel", "on_final", "on_response", "outputs",
        "parameters", "priority", "responses", "sequences", "serial", "shared", "timeout", "times", "trace",
    )  # fmt: skip

    def __init__(
        self,
        model_name: str,
        inputs: dict[str, WireTensor],
        on_response: Callable[[InferResponse], None],
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
        #: When it is refused if it has not begun by then (ns, monotonic); 0 for never.
        self.deadline = 0
        self.timeout = timeout
        #: When it fails even if it runs (ns, monotonic), as its client wants it; 0 for never.
        self.expires = 0
        self.batch_size = 1
        self.times = Timings()
        self.on_response = on_response
        self.on_cancel: Callable[[InferRequest], None] | None = None
        self.on_final: Callable[[InferRequest, InferResponse], None] | None = None
        #: Whether the backend itself answered, if only with an error of its own.
        self.answered = False
        self.responses = 0
        self.cancelled = False
        self.finished = False
        #: The longest sequence (tokens, frames …) and the number of sequences; 0 until a worker has counted them.
        self.length = 0
        self.sequences = 0
        #: Which of its tensors are in shared memory of its client.
        self.shared: SharedTensors | None = None
        #: Who keeps what a worker has prepared for this request, and lets go of it when the request ends.
        self.holder: Holder | None = None
        self.trace: RequestTrace | None = None

    def respond(self, response: InferResponse) -> None:
        """Pass a response on; what comes after the final one is dropped."""
        if self.finished:
            return
        on_response = self.on_response
        if response.final:
            self.finished = True
            if self.holder is not None:
                self.holder.drop(self)
            on_final = self.on_final
            self.release()
            if on_final is not None:
                on_final(self, response)
        self.responses += 1
        try:
            on_response(response)
        except Exception:
            # Whoever responds (a scheduler, a worker) has other requests to look after.
            LOG.exception("a response of request %s could not be passed on", self.serial)
        if response.error is not None:
            response.forget_frames()

    def release(self) -> None:
        """Let go of the inputs and of everybody who would be told of responses; called when there will be none."""
        self.inputs = {}
        self.on_cancel = None
        self.on_final = None
        self.on_response = _ignore

    def fail(self, error: ConchError) -> None:
        """End the request with an error."""
        self.respond(InferResponse(error=error))

    def cancel(self) -> None:
        """Give the request up: whoever holds it is told once, and ends it."""
        if self.cancelled or self.finished:
            return
        self.cancelled = True
        if self.on_cancel is not None:
            self.on_cancel(self)

    def hold_copies(self) -> None:
        """Count the copies of inputs in shared memory that are about to be made.

        Raises UNAVAILABLE if the server holds too many bytes.
        """
        for tensor in self.inputs.values():
            if isinstance(tensor.data, StoredData):
                tensor.data.hold()

    def error(self, message: str, code: Code = Code.INVALID_ARG) -> ConchError:
        """An error about this request, with the prefix that Triton puts before such messages."""
        return ConchError(f"[request id: {self.id or '<id_unknown>'}] {message}", code)
