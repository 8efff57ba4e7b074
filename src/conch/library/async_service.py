"""The calls of ``service.py`` for code that runs on an event loop.

``AsyncInferenceService`` converts the arguments to requests; its subclasses run them on the caller's loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncInferenceService(ABC):
    """A server of models; its methods behave and raise as those of :class:`conch.InferenceService`.

    Cancelling a call cancels its request.
    """

    async def infer(
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
        """Send a request to a model that returns one response per request."""
        deadline = Deadline.after(timeout)
        number = version_number(version)
        signature = single_response(await self._loaded_signature(model, number, deadline))
        request = infer_request(
            signature, number, inputs,
            outputs=outputs, parameters=parameters, request_id=request_id, priority=priority,
            sequence_id=sequence_id, sequence_start=sequence_start, sequence_end=sequence_end, deadline=deadline,
        )  # fmt: skip
        return await self._infer(request)

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
    ) -> AsyncResultStream:
        """Send a request at once to a model that returns any number of responses, for ``async for``."""
        deadline = Deadline.after(timeout)
        number = version_number(version)

        def send() -> AsyncResultStream:
            request = infer_request(
                self._signature(model, number), number, inputs,
                outputs=outputs, parameters=parameters, request_id=request_id, priority=priority,
                sequence_id=sequence_id, sequence_start=sequence_start, sequence_end=sequence_end, deadline=deadline,
            )  # fmt: skip
            return self._stream(request)

        return self._sent(send, deadline)

    async def generate(
        self,
        model: str,
        inputs: str | Mapping[str, Any],
        *,
        version: int | str = "",
        request_id: str = "",
        timeout: float | None = None,
        **parameters: Any,
    ) -> InferResult:
        """Send a request as ``POST …/generate`` does: a text or inputs by name, and sampling parameters."""
        deadline = Deadline.after(timeout)
        number = version_number(version)
        signature = await self._loaded_signature(model, number, deadline)
        request = generate_request(
            signature, number, inputs, parameters, request_id=request_id, deadline=deadline, stream=False
        )
        if not signature.decoupled:
            return await self._infer(request)
        async with self._stream(request) as stream:
            results = [result async for result in stream]
        if len(results) != 1:
            raise request.several_responses()
        return results[0]

    def generate_stream(
        self,
        model: str,
        inputs: str | Mapping[str, Any],
        *,
        version: int | str = "",
        request_id: str = "",
        timeout: float | None = None,
        **parameters: Any,
    ) -> AsyncResultStream:
        """Send a request as ``generate`` does and stream its responses, for ``async for``."""
        deadline = Deadline.after(timeout)
        number = version_number(version)

        def send() -> AsyncResultStream:
            request = generate_request(
                self._signature(model, number), number, inputs, parameters,
                request_id=request_id, deadline=deadline, stream=True,
            )  # fmt: skip
            return self._stream(request)

        return self._sent(send, deadline)

    @abstractmethod
    async def live(self, *, timeout: float | None = None) -> bool:
        """Whether the server is live."""

    @abstractmethod
    async def ready(self, model: str = "", version: int | str = "", *, timeout: float | None = None) -> bool:
        """Whether the server, or a model, is ready; False for an unknown model."""

    @abstractmethod
    async def metadata(
        self, model: str = "", version: int | str = "", *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Return the metadata of the server or of a model."""

    @abstractmethod
    async def config(self, model: str, version: int | str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Return the configuration with which a model runs."""

    @abstractmethod
    async def statistics(
        self, model: str = "", version: int | str = "", *, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the statistics of each version of a model, or of all models; durations in nanoseconds."""

    @abstractmethod
    async def models(self, *, timeout: float | None = None) -> list[dict[str, str]]:
        """Return the repository index."""

    @abstractmethod
    async def load(
        self,
        model: str,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Load or reload a model; returns when it is ready."""

    @abstractmethod
    async def unload(self, model: str, dependents: bool = False, *, timeout: float | None = None) -> None:
        """Unload a model; with ``dependents``, also the steps of an ensemble."""

    @abstractmethod
    async def close(self) -> None:
        """Release all resources of this object. Closing again does nothing."""

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
