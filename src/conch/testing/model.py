"""Loads a model's directory in the test's process, as the server does, and runs its requests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

from numpy.typing import NDArray

from conch.backends.table import backend_of
from conch.client.values import decode
from conch.config.schema import ModelConfig, copied, implementation
from conch.config.signature import parameters as parameters_of
from conch.config.validate import check_directory_name, validate
from conch.core.errors import ConchError, internal, invalid, not_found, unsupported
from conch.core.inference import InferRequest, InferResponse, ModelSignature, ParameterValue
from conch.core.tensors import format_shape
from conch.machine.facts import visible_gpus
from conch.repository.model_files import ModelFiles, describe
from conch.repository.versions import select_versions
from conch.testing.fakes import FakeModel, input_tensors
from conch.testing.instance import LocalInstance


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request with more than inputs; inputs are arrays, lists or texts, by name.

    ``outputs`` are the requested ones, all by default; ``timeout`` is in microseconds. The client of a ``cancelled``
    request has disconnected before the model runs.
    """

    inputs: Mapping[str, Any]
    outputs: Sequence[str] = ()
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout: int = 0
    cancelled: bool = False


class ModelReply(Mapping[str, NDArray[Any]]):
    """One response: its outputs as arrays by name (``bytes`` objects for text), or an error.

    Reading an output of an error response raises the error.
    """

    def __init__(
        self,
        outputs: Mapping[str, NDArray[Any]],
        parameters: Mapping[str, ParameterValue],
        error: ConchError | None = None,
    ) -> None:
        self._outputs = outputs
        self.parameters = parameters
        self.error = error

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._checked()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._checked())

    def __len__(self) -> int:
        return len(self._checked())

    def __repr__(self) -> str:
        what = f"error={self.error.status!r}" if self.error is not None else repr(dict(self._outputs))
        return f"ModelReply({what})"

    def texts(self, output: str) -> list[str]:
        """Return the elements of a BYTES output as texts, in row-major order."""
        return [element.decode() for element in self[output].ravel()]

    def _checked(self) -> Mapping[str, NDArray[Any]]:
        if self.error is not None:
            raise self.error
        return self._outputs


#: A request, or only its inputs by name.
Request = ModelRequest | Mapping[str, Any]


class ModelUnderTest:
    """A loaded model. Call it with its inputs by name; created by :func:`conch.testing.load`.

    Methods raise the model's exceptions with their own tracebacks. They raise ConchError, with the server's messages,
    for requests that the server would refuse and for responses that do not fit the configuration.
    """

    def __init__(
        self,
        files: ModelFiles,
        version: int,
        config: ModelConfig,
        models: Mapping[str, FakeModel],
        timeout: float,
    ) -> None:
        self._instance = LocalInstance(files, version, config, models)
        self._timeout = timeout
        self._closed = False

    @property
    def signature(self) -> ModelSignature:
        """Name, version, inputs and outputs of the completed model."""
        return self._instance.model.signature

    @property
    def config(self) -> dict[str, Any]:
        """The completed configuration, as in ``GET /v2/models/<name>/config``."""
        return self._instance.config_json()

    @property
    def python_model(self) -> Any:
        """The ``TritonPythonModel`` object; None for other backends."""
        return getattr(self._instance.backend, "instance", None)

    def __call__(self, request: Request | None = None, /, **inputs: Any) -> ModelReply:
        """Return the response to one request or its inputs; raises its error."""
        (reply,) = self.batch([_request(request, inputs)])
        if reply.error is not None:
            raise reply.error
        return reply

    def batch(self, requests: Sequence[Request]) -> list[ModelReply]:
        """Return the responses to several requests in one call of ``execute``; errors are not raised."""
        if self.signature.decoupled:
            raise TypeError(
                f"model '{self.signature.name}' is decoupled: read its responses with stream() or streams()"
            )
        return [next(responses) for responses in self.streams(requests)]

    def stream(self, request: Request | None = None, /, **inputs: Any) -> Iterator[ModelReply]:
        """Yield the responses to one request as they are sent; closing the iterator cancels the request."""
        return self.streams([_request(request, inputs)])[0]

    def streams(self, requests: Sequence[Request]) -> list[Iterator[ModelReply]]:
        """Call ``execute`` with several requests; returns an iterator of responses for each."""
        if self._closed:
            raise internal(f"model '{self.signature.name}' has been closed")
        with self._instance.lock:
            started = [self._collect_responses(_request(request, {})) for request in requests]
            rows = sum(request.batch_size for request, _ in started)
            limit = self.signature.max_batch_size
            if len(started) > 1 and 0 < limit < rows:
                self._instance.give_up()
                raise invalid(f"these {len(started)} requests have {rows} rows, and max_batch_size is {limit}")
            self._instance.execute()
        return [self._replies(request, responses) for request, responses in started]

    def close(self) -> None:
        """Finalize the model."""
        if not self._closed:
            self._closed = True
            self._instance.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _collect_responses(self, request: ModelRequest) -> tuple[InferRequest, SimpleQueue[InferResponse]]:
        signature = self.signature
        responses: SimpleQueue[InferResponse] = SimpleQueue()
        infer = InferRequest(
            signature.name,
            input_tensors(signature, request.inputs),
            responses.put,
            id=request.id,
            outputs=tuple(request.outputs),
            parameters=request.parameters,
            correlation_id=request.correlation_id,
            flags=request.flags,
            timeout=request.timeout,
        )
        try:
            self._instance.model.infer(infer)
        except ConchError:
            self._instance.give_up()
            raise
        if request.cancelled:
            self._instance.cancel(infer)
        return infer, responses

    def _replies(self, request: InferRequest, responses: SimpleQueue[InferResponse]) -> Iterator[ModelReply]:
        try:
            while True:
                try:
                    response = responses.get(timeout=self._timeout)
                except Empty:
                    raise TimeoutError(
                        f"model '{self.signature.name}' has not ended a request within {self._timeout:g} s"
                    ) from None
                self._instance.raise_failure()
                if not (response.final and response.empty and self.signature.decoupled):
                    yield self._reply(request, response)
                if response.final:
                    return
        finally:
            self._instance.end(request)

    def _reply(self, request: InferRequest, response: InferResponse) -> ModelReply:
        if response.error is not None:
            return ModelReply({}, response.parameters, response.error)
        outputs = {tensor.name: tensor for tensor in response.outputs}
        about = f"of model '{self.signature.name}'"
        for name in request.outputs:
            if name not in outputs:
                raise internal(f"a response {about} lacks output '{name}', which its configuration declares")
        rows = () if not self.signature.max_batch_size else (-1 if self.signature.decoupled else request.batch_size,)
        for name, tensor in outputs.items():
            spec = self.signature.outputs[name]
            if tensor.datatype != spec.datatype:
                raise internal(
                    f"output '{name}' {about} is {tensor.datatype}, but its configuration declares {spec.datatype}"
                )
            expected = (*rows, *spec.dims)
            if not _fits(tensor.shape, expected):
                raise internal(
                    f"output '{name}' {about} has shape {format_shape(tensor.shape)}, "
                    f"but its configuration declares {format_shape(expected)}"
                )
        return ModelReply({name: decode(tensor) for name, tensor in outputs.items()}, response.parameters)


def _request(request: Request | None, inputs: Mapping[str, Any]) -> ModelRequest:
    if request is None:
        return ModelRequest(inputs)
    if inputs:
        raise TypeError("pass either a request or its inputs by name")
    return request if isinstance(request, ModelRequest) else ModelRequest(request)


def _fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))


def load(
    path: str | os.PathLike[str],
    *,
    models: Mapping[str, FakeModel] | None = None,
    parameters: Mapping[str, str] | None = None,
    version: int | None = None,
    timeout: float = 60.0,
) -> ModelUnderTest:
    """Load the model in the directory ``path`` and initialize it; use as a context manager, or close it.

    ``models`` are functions that stand in for other models, by name. They get inputs as arrays by name and return
    outputs by name, or any number of such mappings if called as decoupled models; another loaded model works too.
    ``parameters`` override the configuration's parameters, ``version`` overrides its version policy. ``timeout`` limits
    the wait for a response (s) after ``execute`` has returned.

    Raises the model's exceptions, and :class:`conch.core.errors.ConchError` for a model that the server would not load.
    """
    directory = Path(path).resolve()
    if not directory.is_dir():
        raise not_found(f"there is no model at {directory}: pass its directory, which contains a version such as '1'")
    files = describe(directory.name, directory)
    config = _configured(files, parameters or {})
    if version is None:
        selected = select_versions(config, files.versions).versions
        if not selected:
            raise invalid(f"at least one version must be available under the version policy of model '{files.name}'")
        version = selected[-1]
    return ModelUnderTest(files, version, config, models or {}, timeout)


def _configured(files: ModelFiles, parameters: Mapping[str, str]) -> ModelConfig:
    """Return the configuration before the model completes it."""
    written = copied(files.config)
    for name, value in parameters.items():
        if not isinstance(value, str):
            raise invalid(f"parameter '{name}' of a model is a text, as in its config.pbtxt; got {value!r:.80}")
        written.parameters[name].string_value = value
    config = files.completed(visible_gpus(), written)
    validate(config)
    check_directory_name(config, files.name)
    if config.HasField("ensemble_scheduling"):
        raise unsupported(f"model '{files.name}' is an ensemble, which has no code: test the models of its steps")
    if backend_of(implementation(config), parameters_of(config)).generates:
        raise unsupported(f"model '{files.name}' generates text between requests: test it with a server")
    return config
