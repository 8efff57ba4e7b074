"""The calls shared by in-process servers and remote clients, so that code written for one runs on the other.

``InferenceService`` declares the calls and converts their arguments to requests; its subclasses run them, and any
thread may call. ``AsyncInferenceService`` has the same calls for code that runs on an event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, Self, TypeVar, cast

from numpy.typing import ArrayLike

from conch.client.deadline import Deadline
from conch.client.requests import (
    OutgoingRequest,
    generate_request,
    infer_request,
    single_response,
    version_number,
)
from conch.client.results import InferResult
from conch.core.inference import ModelSignature, ParameterValue

P = ParamSpec("P")
T = TypeVar("T")


class ResultStream(Iterator[InferResult]):
    """The responses to a request, in order, for one thread at a time.

    Closing the stream before its end cancels the request; any thread may close it.
    """

    @abstractmethod
    def __next__(self) -> InferResult: ...

    @abstractmethod
    def close(self) -> None:
        """Cancel the request and discard its remaining responses."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class AsyncResultStream(AsyncIterator[InferResult]):
    """The responses to a request, in order, for one task at a time.

    Closing the stream before its end cancels the request.
    """

    @abstractmethod
    async def __anext__(self) -> InferResult: ...

    @abstractmethod
    async def aclose(self) -> None:
        """Cancel the request and discard its remaining responses."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()


class InferenceCall(NamedTuple):
    """A call to a model; ``build`` makes its request when the inputs and outputs of the model are known."""

    model: str
    version: int
    deadline: Deadline
    build: Callable[[ModelSignature], OutgoingRequest]


class RequestTarget(Protocol):
    """A model that accepts one request."""

    @property
    def signature(self) -> ModelSignature:
        """The inputs and outputs of the model."""

    def infer(self, request: OutgoingRequest) -> InferResult:
        """Return the only response to a request."""

    def stream(self, request: OutgoingRequest) -> ResultStream:
        """Send a request and return the stream of its responses."""


class InferenceService(ABC):
    """A server of models. Every method raises :class:`conch.ConchError`, whose ``code`` is the kind of failure.

    ``timeout`` limits a whole call, in seconds: without a response by then, the call raises UNAVAILABLE, and ``live``
    and ``ready`` return False. Loads and unloads continue on the server.
    """

    def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        version: int | str = "",
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        request_id: str = "",
        priority: int = 0,
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        timeout: float | None = None,
    ) -> InferResult:
        """Send a request to a model that returns one response per request.

        ``inputs`` are NumPy arrays, lists, numbers and texts by input name; they become tensors of the datatypes that
        the model declares. ``outputs`` names the requested outputs; the default is all. ``timeout`` (s) limits the
        whole call, including a load on demand. Raises INVALID_ARG for inputs that do not fit, NOT_FOUND or UNAVAILABLE
        for a model that is unknown or not ready, UNSUPPORTED for a decoupled model, UNAVAILABLE at the timeout, and the
        errors of the model.
        """
        deadline = Deadline.after(timeout)
        number = version_number(version)

        def build(signature: ModelSignature) -> OutgoingRequest:
            return infer_request(
                single_response(signature), number, inputs,
                outputs=outputs, parameters=parameters, request_id=request_id, priority=priority,
                sequence_id=sequence_id, sequence_start=sequence_start, sequence_end=sequence_end, deadline=deadline,
            )  # fmt: skip

        return self._single(InferenceCall(model, number, deadline, build))

    def infer_stream(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        version: int | str = "",
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        request_id: str = "",
        priority: int = 0,
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        timeout: float | None = None,
    ) -> ResultStream:
        """Send a request to a model that returns any number of responses; the arguments are those of ``infer``.

        The iterator raises the error that ends the request; ``timeout`` covers everything from this call to the last
        response.
        """
        deadline = Deadline.after(timeout)
        number = version_number(version)

        def build(signature: ModelSignature) -> OutgoingRequest:
            return infer_request(
                signature, number, inputs,
                outputs=outputs, parameters=parameters, request_id=request_id, priority=priority,
                sequence_id=sequence_id, sequence_start=sequence_start, sequence_end=sequence_end, deadline=deadline,
            )  # fmt: skip

        return self._streamed(InferenceCall(model, number, deadline, build))

    def generate(
        self,
        /,
        model: str,
        inputs: str | Mapping[str, Any],
        *,
        version: int | str = "",
        request_id: str = "",
        timeout: float | None = None,
        **parameters: Any,
    ) -> InferResult:
        """Send a request as ``POST …/generate`` does: a text or inputs by name, and sampling parameters.

        ``parameters`` with the names of inputs become inputs, all others parameters of the request. The result's
        ``text`` is the generated text. Raises the errors of ``infer``, and UNSUPPORTED if the model does not return
        exactly one response.
        """
        deadline = Deadline.after(timeout)
        number = version_number(version)

        def build(signature: ModelSignature) -> OutgoingRequest:
            return generate_request(
                signature, number, inputs, parameters, request_id=request_id, deadline=deadline, stream=False
            )

        return self._single(InferenceCall(model, number, deadline, build))

    def generate_stream(
        self,
        /,
        model: str,
        inputs: str | Mapping[str, Any],
        *,
        version: int | str = "",
        request_id: str = "",
        timeout: float | None = None,
        **parameters: Any,
    ) -> ResultStream:
        """Send a request as ``generate`` does and stream its responses.

        A model with an input ``stream`` gets it as true unless ``stream=False`` is given.
        """
        deadline = Deadline.after(timeout)
        number = version_number(version)

        def build(signature: ModelSignature) -> OutgoingRequest:
            return generate_request(
                signature, number, inputs, parameters, request_id=request_id, deadline=deadline, stream=True
            )

        return self._streamed(InferenceCall(model, number, deadline, build))

    @abstractmethod
    def live(self, *, timeout: float | None = None) -> bool:
        """Whether the server is live."""

    @abstractmethod
    def ready(self, model: str = "", version: int | str = "", *, timeout: float | None = None) -> bool:
        """Whether the server, or a model, is ready; False for an unknown model."""

    @abstractmethod
    def metadata(self, model: str = "", version: int | str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Return the metadata of the server or a model: the body of ``GET /v2`` or ``GET /v2/models/<model>``."""

    @abstractmethod
    def config(self, model: str, version: int | str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Return the configuration with which a model runs: the body of ``GET /v2/models/<model>/config``."""

    @abstractmethod
    def statistics(
        self, model: str = "", version: int | str = "", *, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the statistics of each version of a model, or of all models; durations in nanoseconds."""

    @abstractmethod
    def models(self, *, timeout: float | None = None) -> list[dict[str, str]]:
        """Return the repository index: ``name``; for versions that were loaded, ``version``, ``state``, ``reason``."""

    @abstractmethod
    def load(
        self,
        model: str,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Load or reload a model; returns when it is ready.

        ``config`` replaces its configuration; ``files``, by paths such as ``1/model.py``, replace its files. Raises the
        cause if the load fails, and UNAVAILABLE unless the server's option ``model_control_mode`` is ``explicit`` (or
        ``on-demand``, which accepts neither argument).
        """

    @abstractmethod
    def unload(self, model: str, dependents: bool = False, *, timeout: float | None = None) -> None:
        """Unload a model; with ``dependents``, also the steps of an ensemble. Raises the errors of ``load``."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources of this object. Closing again does nothing."""

    @abstractmethod
    def _target(self, model: str, version: int, deadline: Deadline) -> AbstractContextManager[RequestTarget]:
        """Return the model of a request, ready by ``deadline``; it stays loaded until the request has been sent.

        Raises NOT_FOUND or UNAVAILABLE.
        """

    def _single(self, call: InferenceCall) -> InferResult:
        with self._target(call.model, call.version, call.deadline) as target:
            request = call.build(target.signature)
            if not target.signature.decoupled:
                return target.infer(request)
            with target.stream(request) as stream:
                return request.only(list(stream))

    def _streamed(self, call: InferenceCall) -> ResultStream:
        with self._target(call.model, call.version, call.deadline) as target:
            return target.stream(call.build(target.signature))


def _awaited(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method of InferenceService as a coroutine function: ``_single`` of its object is one."""

    @wraps(method)
    async def call(self: Any, /, *arguments: P.args, **options: P.kwargs) -> T:
        return await cast(Coroutine[Any, Any, T], method(self, *arguments, **options))

    return call


def _asynchronous(
    method: Callable[Concatenate[Any, P], ResultStream],
) -> Callable[Concatenate[Any, P], AsyncResultStream]:
    """Return a method of InferenceService unchanged: ``_streamed`` of its object returns an asynchronous stream."""
    return cast(Callable[Concatenate[Any, P], AsyncResultStream], method)


class AsyncInferenceService(ABC):
    """A server of models; its methods behave and raise as those of :class:`conch.InferenceService`.

    Cancelling a call cancels its request. ``infer_stream`` and ``generate_stream`` send their request at once and
    return a stream for ``async for``; all other calls are coroutines.
    """

    infer = _awaited(InferenceService.infer)
    infer_stream = _asynchronous(InferenceService.infer_stream)
    generate = _awaited(InferenceService.generate)
    generate_stream = _asynchronous(InferenceService.generate_stream)
    # Abstract, as in InferenceService:
    live = _awaited(InferenceService.live)
    ready = _awaited(InferenceService.ready)
    metadata = _awaited(InferenceService.metadata)
    config = _awaited(InferenceService.config)
    statistics = _awaited(InferenceService.statistics)
    models = _awaited(InferenceService.models)
    load = _awaited(InferenceService.load)
    unload = _awaited(InferenceService.unload)
    close = _awaited(InferenceService.close)

    @abstractmethod
    def _signature(self, model: str, version: int) -> ModelSignature:
        """Return the inputs and outputs of the model. Raises NOT_FOUND or UNAVAILABLE."""

    async def _loaded_signature(self, model: str, version: int, deadline: Deadline) -> ModelSignature:
        """Return the inputs and outputs of the model once it is loaded. Raises UNAVAILABLE at ``deadline``."""
        return self._signature(model, version)

    def _sent(self, send: Callable[[], AsyncResultStream], deadline: Deadline) -> AsyncResultStream:
        """Return the stream that ``send`` makes, possibly after loading its model."""
        return send()

    @abstractmethod
    async def _infer(self, request: OutgoingRequest) -> InferResult:
        """Return the only response to a request."""

    @abstractmethod
    def _stream(self, request: OutgoingRequest) -> AsyncResultStream:
        """Send a request and return the stream of its responses."""

    async def _single(self, call: InferenceCall) -> InferResult:
        signature = await self._loaded_signature(call.model, call.version, call.deadline)
        request = call.build(signature)
        if not signature.decoupled:
            return await self._infer(request)
        async with self._stream(request) as stream:
            return request.only([result async for result in stream])

    def _streamed(self, call: InferenceCall) -> AsyncResultStream:
        def send() -> AsyncResultStream:
            return self._stream(call.build(self._signature(call.model, call.version)))

        return self._sent(send, call.deadline)
