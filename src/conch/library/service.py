"""The calls that servers in the process and clients of other servers share: code written for one runs on the other.

``InferenceService`` sorts the arguments; those that derive from it run what comes out.  Any thread may call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from numpy.typing import ArrayLike

from conch.inference import ModelSignature, ParameterValue
from conch.library.deadline import Deadline
from conch.library.requests import (
    OutgoingRequest,
    generate_request,
    infer_request,
    single_response,
    version_number,
)
from conch.library.results import InferResult


class ResultStream(Iterator[InferResult]):
    """The responses to one request, in their order, for one thread at a time.

    Closing it before its end cancels the request; any thread may close it.
    """

    @abstractmethod
    def __next__(self) -> InferResult: ...

    @abstractmethod
    def close(self) -> None:
        """Give the rest up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RequestTarget(Protocol):
    """A model that takes one request."""

    @property
    def signature(self) -> ModelSignature:
        """Its inputs and outputs."""

    def infer(self, request: OutgoingRequest) -> InferResult:
        """The only response to a request."""

    def stream(self, request: OutgoingRequest) -> ResultStream:
        """The responses to a request that is sent now."""


class InferenceService(ABC):
    """A server of models.  Every method raises :class:`conch.ConchError`, whose ``code`` says what kind of failure.

    ``timeout`` bounds a whole call, in seconds: without a response by then it raises UNAVAILABLE, and ``live`` and
    ``ready`` return False.  Loads and unloads continue on the server.
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
        """Ask a model that gives one response to a request.

        ``inputs`` are NumPy arrays, lists, numbers and texts by input name; they become tensors of the datatypes that
        the model declares.  ``outputs`` names the outputs wanted, all without it.  ``timeout`` (s) bounds the whole
        call, with a load on demand.  Raises INVALID_ARG for inputs that do not fit, NOT_FOUND or UNAVAILABLE for a
        model that is not there or not ready, UNSUPPORTED for a decoupled one, UNAVAILABLE when the time is up, and
        what the model itself raises.
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
        """Ask a model that gives any number of responses; the arguments are those of ``infer``.

        The iterator raises what ends the request; ``timeout`` counts from this call to the last response.
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
        """Ask a model as ``POST …/generate`` does: with a text, or inputs by name, and sampling parameters.

        ``parameters`` that are inputs of the model are given as such, all others as parameters of the request.  The
        answer's ``text`` is what a model that writes text has written.  Raises as ``infer`` does, and UNSUPPORTED
        when the model gives more responses than one.
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
        """Ask a model as ``generate`` does, and get its responses as they come.

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
        """Whether the server answers."""

    @abstractmethod
    def ready(self, model: str = "", version: int | str = "", *, timeout: float | None = None) -> bool:
        """Whether the server is ready, or one model; False for a model that is not there."""

    @abstractmethod
    def metadata(self, model: str = "", version: int | str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """What the server says of itself, or of a model: the body of ``GET /v2`` and ``GET /v2/models/<model>``."""

    @abstractmethod
    def config(self, model: str, version: int | str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """The configuration that a model runs with: the body of ``GET /v2/models/<model>/config``."""

    @abstractmethod
    def statistics(
        self, model: str = "", version: int | str = "", *, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """The statistics of each version of a model, or of all models; durations in nanoseconds."""

    @abstractmethod
    def models(self, *, timeout: float | None = None) -> list[dict[str, str]]:
        """The repository's index: ``name``, and of versions that were loaded ``version``, ``state`` and ``reason``."""

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

        ``config`` replaces its configuration; ``files``, by paths such as ``1/model.py``, its files.  Raises why it
        does not load, and UNAVAILABLE unless the server's option ``model_control_mode`` is ``explicit`` (or
        ``on-demand``, which takes neither).
        """

    @abstractmethod
    def unload(self, model: str, dependents: bool = False, *, timeout: float | None = None) -> None:
        """Stop serving a model; with ``dependents``, the members of an ensemble as well.  Raises as ``load`` does."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back that this object holds.  Closing again does nothing."""

    @abstractmethod
    def _target(self, model: str, version: int, deadline: Deadline) -> AbstractContextManager[RequestTarget]:
        """The model of a request, ready by ``deadline``; it stays loaded until the request has been sent.

        Raises NOT_FOUND or UNAVAILABLE.
        """
