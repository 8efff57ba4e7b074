"""The calls shared by in-process servers and remote clients, so that code written for one runs on the other.

``InferenceService`` converts the arguments to requests; its subclasses run them. Any thread may call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
        with self._target(model, number, deadline) as target:
            request = infer_request(
                single_response(target.signature), number, inputs,
                outputs=outputs, parameters=parameters, request_id=request_id, priority=priority,
                sequence_id=sequence_id, sequence_start=sequence_start, sequence_end=sequence_end, deadline=deadline,
            )  # fmt: skip
            return target.infer(request)

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
        with self._target(model, number, deadline) as target:
            request = infer_request(
                target.signature, number, inputs,
                outputs=outputs, parameters=parameters, request_id=request_id, priority=priority,
                sequence_id=sequence_id, sequence_start=sequence_start, sequence_end=sequence_end, deadline=deadline,
            )  # fmt: skip
            return target.stream(request)

    def generate(
        self,
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
        with self._target(model, number, deadline) as target:
            request = generate_request(
                target.signature, number, inputs, parameters, request_id=request_id, deadline=deadline, stream=False
            )
            if not target.signature.decoupled:
                return target.infer(request)
            with target.stream(request) as stream:
                results = list(stream)
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
    ) -> ResultStream:
        """Send a request as ``generate`` does and stream its responses.

        A model with an input ``stream`` is asked to stream unless ``stream=False`` is given.
        """
        deadline = Deadline.after(timeout)
        number = version_number(version)
        with self._target(model, number, deadline) as target:
            request = generate_request(
                target.signature, number, inputs, parameters, request_id=request_id, deadline=deadline, stream=True
            )
            return target.stream(request)

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
