"""``conch.Client`` over HTTP: the KServe protocol with binary tensors, and the generate extension for streams.

Any thread may call, and streams can be cancelled from another thread.
"""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlsplit

import numpy as np

from conch.client.connection import BlockingConnection, connect_failure
from conch.client.deadline import Deadline
from conch.client.http1 import JSON_SIZE, HttpFault, HttpResponse, request_head
from conch.client.requests import OutgoingRequest
from conch.client.results import InferResult
from conch.client.service import ResultStream
from conch.client.transport import LostError, UnreachableError
from conch.client.values import decode, from_values
from conch.config import render
from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError, internal, invalid, unavailable, unsupported
from conch.core.inference import TensorSpec
from conch.core.tensors import Buffer, WireTensor
from conch.machine.ports import host_and_port
from conch.wire.json.generate import deduced_shape
from conch.wire.json.outgoing import CODES, decode_error, encode_request, model_path, read_response

T = TypeVar("T", dict[str, Any], list[Any])

_NO_HEADERS: Final[Mapping[str, str]] = {}
_OVER_GRPC: Final = "connect with grpc:// for this request"
_EVENT: Final = b"data:"
#: Fields of an event that are not outputs.
_OF_RESPONSE: Final = frozenset(("model_name", "model_version", "id"))


def generate_body(request: OutgoingRequest) -> dict[str, Any]:
    """Return the body of a request to ``generate_stream``. Raises UNSUPPORTED if JSON cannot express the request.

    The server deduces the shapes of its tensors; a request for which it would deduce others is refused.
    """
    signature = request.signature
    if request.priority or request.sequence_id or request.flags:
        raise unsupported(f"streams over HTTP have neither priorities nor sequences: {_OVER_GRPC}")
    body: dict[str, Any] = dict(request.parameters)
    if request.id:
        body["id"] = request.id
    for name, tensor in request.inputs.items():
        spec = signature.inputs[name]
        dims = (-1, *spec.dims) if signature.max_batch_size > 0 else spec.dims
        if tensor.datatype in ("FP16", "BF16") or deduced_shape(name, dims, prod(tensor.shape)) != tensor.shape:
            raise unsupported(
                f"a stream over HTTP cannot carry input '{name}' as {tensor.datatype} of shape {list(tensor.shape)}: "
                f"{_OVER_GRPC}"
            )
        values = decode(tensor).reshape(-1)
        try:
            body[name] = [value.decode() for value in values] if tensor.datatype == "BYTES" else values.tolist()
        except UnicodeDecodeError:
            raise unsupported(f"input '{name}' is not UTF-8, and a stream over HTTP is text: {_OVER_GRPC}") from None
    return body


class SingleResult(ResultStream):
    """The only response of a model that is not decoupled."""

    def __init__(self, result: InferResult) -> None:
        self._results = iter((result,))

    def __next__(self) -> InferResult:
        return next(self._results)

    def close(self) -> None:
        self._results = iter(())


class EventStream(ResultStream):
    """The events of the response that ``connection`` has begun to read."""

    def __init__(self, request: OutgoingRequest, connection: BlockingConnection) -> None:
        self._request = request
        self._connection = connection
        self._status = connection.reader.status
        content = connection.reader.headers.get(b"content-type", b"")
        #: Whether the response has events; an error has, if it is the model's first response.
        self._has_events = self._status == 200 or content.startswith(b"text/event-stream")
        self._unread = b""
        self._closed = False

    def __next__(self) -> InferResult:
        while not self._closed:
            try:
                if not self._has_events:
                    response = self._connection.response()
                    self.close()
                    raise decode_error(response.status, response.body)
                line = self._read_line()
            except TimeoutError:
                self.close()
                raise self._request.not_in_time() from None
            except (OSError, HttpFault) as error:
                if self._closed:
                    break
                self.close()
                raise unavailable(f"the stream of model '{self._request.model}' broke off: {error}") from None
            if not line:
                break
            text = line.removeprefix(_EVENT).strip()
            if text:
                try:
                    return self._result(text)
                except BaseException:
                    self.close()
                    raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Close the connection; the server then cancels a request that is still running."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._connection.shutdown()  # wakes the thread that reads; closing would wait for it
            self._connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()

    def _read_line(self) -> bytes:
        """Return the next line with its end, nothing after the last line. Raises OSError and HttpFault."""
        reader = self._connection.reader
        self._unread += reader.take_body()
        while b"\n" not in self._unread and not reader.complete:
            self._connection.receive()
            self._unread += reader.take_body()
        line, end, self._unread = self._unread.partition(b"\n")
        return line + end

    def _result(self, text: bytes) -> InferResult:
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict) or event.keys().isdisjoint(("model_name", "error")):
            raise internal(f"the stream of model '{self._request.model}' has an event without a response: {text!r:.80}")
        if "model_name" not in event:
            # Only the first response has a code.
            raise ConchError(str(event["error"]), CODES.get(self._status, Code.UNKNOWN))
        specs = self._request.signature.outputs
        requested = self._request.outputs
        return InferResult(
            str(event["model_name"]),
            str(event.get("model_version", "")),
            {
                name: from_values(name, specs[name].datatype, self._shape(specs[name], value), value)
                for name, value in event.items()
                if name in specs and (not requested or name in requested)
            },
            str(event.get("id", "")),
            {name: value for name, value in event.items() if name not in specs and name not in _OF_RESPONSE},
        )

    def _shape(self, spec: TensorSpec, value: Any) -> tuple[int, ...]:
        """Return the shape of a flattened output. Raises INTERNAL if its declaration allows several."""
        signature = self._request.signature
        count = int(np.size(np.array(value, np.object_)))
        rows = next((tensor.shape[0] for tensor in self._request.inputs.values()), 1)
        dims = (rows, *spec.dims) if signature.max_batch_size > 0 else spec.dims
        if dims.count(-1) > 1:
            raise internal(
                f"output '{spec.name}' has a variable shape, which the response does not contain: {_OVER_GRPC}"
            )
        return deduced_shape(spec.name, dims, count)


_INDEX: Final = "/v2/repository/index"
_REGION: Final = "/v2/systemsharedmemory/region"


class HttpTransport:
    """Connections to ``host:port``, as many as there are concurrent calls, encrypted with ``tls``.

    ``prefix`` precedes every path; ``headers`` are sent with every request.
    """

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str = "",
        tls: ssl.SSLContext | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._prefix = prefix
        self._tls = tls
        self._headers = {**_fixed_headers(host, port, tls), **(headers or {})}
        self._idle: list[BlockingConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    def live(self, deadline: Deadline) -> bool:
        return self._succeeds("/v2/health/live", deadline)

    def ready(self, model: str, version: int, deadline: Deadline) -> bool:
        return self._succeeds(f"{model_path(model, version)}/ready" if model else "/v2/health/ready", deadline)

    def metadata(self, model: str, version: int, deadline: Deadline) -> dict[str, Any]:
        path = model_path(model, version) if model else "/v2"
        return self._document("GET", path, deadline, dict)

    def config(self, model: str, version: int, deadline: Deadline) -> ModelConfig:
        path = f"{model_path(model, version)}/config"
        return render.from_json(
            self._exchange("GET", path, (), deadline, model).body.decode(errors="replace"), lenient=True
        )

    def statistics(self, model: str, version: int, deadline: Deadline) -> list[dict[str, Any]]:
        path = model_path(model, version) if model else "/v2/models"
        entries: list[dict[str, Any]] = self._document("GET", f"{path}/stats", deadline, dict).get("model_stats", [])
        return entries

    def index(self, deadline: Deadline) -> list[dict[str, str]]:
        return self._document("POST", _INDEX, deadline, list)

    def load(self, model: str, config: str | None, files: Mapping[str, bytes], deadline: Deadline) -> None:
        parameters = {f"file:{path}": base64.b64encode(content).decode() for path, content in files.items()}
        if config is not None:
            parameters["config"] = config
        body = json.dumps({"parameters": parameters}).encode()
        self._call("POST", f"/v2/repository/models/{quote(model, safe='')}/load", body, deadline)

    def unload(self, model: str, dependents: bool, deadline: Deadline) -> None:
        body = json.dumps({"parameters": {"unload_dependents": dependents}}).encode()
        self._call("POST", f"/v2/repository/models/{quote(model, safe='')}/unload", body, deadline)

    def register_memory(self, region: str, key: str, size: int, deadline: Deadline) -> None:
        body = json.dumps({"key": key, "offset": 0, "byte_size": size}).encode()
        self._call("POST", f"{_REGION}/{region}/register", body, deadline)

    def unregister_memory(self, region: str, deadline: Deadline) -> None:
        self._call("POST", f"{_REGION}/{region}/unregister", b"{}", deadline)

    def infer(self, request: OutgoingRequest) -> InferResult:
        header, tensors = encode_request(request.to_infer_request())
        path = f"{model_path(request.model, request.version)}/infer"
        headers = {JSON_SIZE: str(len(header))}
        response = self._exchange("POST", path, (header, *tensors), request.deadline, request.model, headers)
        return _result(request, response.body, response.json_size)

    def stream(self, request: OutgoingRequest) -> ResultStream:
        if not request.signature.decoupled:
            return SingleResult(self.infer(request))
        body = json.dumps(generate_body(request)).encode()
        path = f"{model_path(request.model, request.version)}/generate_stream"
        try:
            connection = self._send("POST", path, (body,), request.deadline)
        except (OSError, HttpFault) as error:
            raise self._failed(error, request.deadline, request.model) from None
        return EventStream(request, connection)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _succeeds(self, path: str, deadline: Deadline) -> bool:
        try:
            self._call("GET", path, b"", deadline)
        except ConchError as error:
            if error.code in (Code.INVALID_ARG, Code.NOT_FOUND):  # the protocol's negative responses
                return False
            raise
        return True

    def _document(self, method: str, path: str, deadline: Deadline, kind: type[T]) -> T:
        """Return a JSON object or array. Raises INTERNAL for any other response, such as a web page."""
        try:
            document = json.loads(self._call(method, path, b"", deadline))
        except ValueError:
            document = None
        if not isinstance(document, kind):
            name = "array" if kind is list else "object"
            raise internal(f"{method} {path} does not return a JSON {name}, as a server of the KServe protocol would")
        return document

    def _call(self, method: str, path: str, body: bytes, deadline: Deadline) -> bytes:
        return self._exchange(method, path, (body,), deadline).body

    def _exchange(
        self, method: str, path: str, body: Sequence[Buffer], deadline: Deadline, model: str = "",
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> HttpResponse:  # fmt: skip
        """Return a successful response; raises the server's error for any other."""
        response = self.request(method, path, body, deadline, model, headers)
        if response.status != 200:
            raise decode_error(response.status, response.body)
        return response

    def request(
        self, method: str, path: str, body: Sequence[Buffer], deadline: Deadline, model: str = "",
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> HttpResponse:  # fmt: skip
        """Return the response, whatever its status; ``model`` is the model named in the error at the deadline."""
        try:
            connection = self._send(method, path, body, deadline, headers)
            try:
                response = connection.response()
            except BaseException:
                connection.close()
                raise
        except (OSError, HttpFault) as error:
            raise self._failed(error, deadline, model) from None
        self._give_back(connection)
        return response

    def _send(
        self, method: str, path: str, body: Sequence[Buffer], deadline: Deadline,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> BlockingConnection:  # fmt: skip
        """Send a request and read the head of its response. Raises OSError or HttpFault.

        A request is resent only if the server cannot have read it, or if it is read-only.
        """
        length = sum(map(len, body)) if method == "POST" else None
        head = request_head(method, self._prefix + path, {**self._headers, **headers}, length)
        while True:
            connection, used = self._connection(deadline)
            sent = False
            try:
                connection.send((head, *body), deadline)
                sent = True
                while not connection.reader.status:
                    connection.receive()
                return connection
            except TimeoutError:
                connection.close()
                raise
            except (OSError, HttpFault):
                connection.close()
                # A server may close an idle connection at any time. If sending fails, the server has not received the
                # whole request and cannot act on it.
                if not used or (sent and method != "GET" and path != _INDEX):
                    raise
            except BaseException:
                connection.close()
                raise

    def _connection(self, deadline: Deadline) -> tuple[BlockingConnection, bool]:
        """Return a connection, and whether it was used before; skips connections that the server has closed.

        Raises TimeoutError at the deadline, and UnreachableError.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise unavailable("the client is closed")
                if not self._idle:
                    break
                connection = self._idle.pop()
            if not connection.stale:
                return connection, True
            connection.close()
        try:
            return BlockingConnection(self._host, self._port, self._tls, deadline), False
        except (OSError, UnicodeError) as error:
            if isinstance(error, TimeoutError) and deadline.at is not None:
                raise
            raise UnreachableError(connect_failure(error, self._host), host_and_port(self._host, self._port)) from None

    def _give_back(self, connection: BlockingConnection) -> None:
        with self._lock:
            if connection.reader.keep_alive and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _failed(self, error: BaseException, deadline: Deadline, model: str) -> ConchError:
        if isinstance(error, TimeoutError) and deadline.at is not None:  # the operating system has timeouts, too
            return deadline.no_response(model)
        reason = " ".join(str(error).split()) or type(error).__name__
        return LostError(reason, host_and_port(self._host, self._port))


def fetch(url: str, timeout: float, body: bytes | None = None) -> tuple[int, bytes]:
    """Return the status and the body of the response to ``GET url``, or to ``POST url`` with ``body``, which is JSON.

    For pages outside the protocol. The connection is direct, and redirects are not followed. Raises INVALID_ARG for an
    invalid URL, and UNAVAILABLE without a complete response within ``timeout`` seconds.
    """
    deadline = Deadline.after(timeout)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https"):
        raise invalid(f"'{url}' is not an HTTP URL")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    headers = {"connection": "close", **({} if body is None else {"content-type": "application/json"})}
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    with contextlib.closing(HttpTransport(host, port or (80 if tls is None else 443), "", tls, headers)) as transport:
        response = transport.request("GET" if body is None else "POST", target, (body or b"",), deadline)
    return response.status, response.body


def _fixed_headers(host: str, port: int, tls: ssl.SSLContext | None) -> dict[str, str]:
    """Return the headers of every request to a server. Raises INVALID_ARG for an impossible name."""
    try:
        name = host if host.isascii() else host.encode("idna").decode()
    except UnicodeError:
        raise invalid(f"'{host}' is not the name of a host") from None
    address = host_and_port(name, port).removesuffix(":80" if tls is None else ":443")
    return {"host": address, "accept-encoding": "identity"}


def _result(request: OutgoingRequest, body: bytes, json_size: int | None) -> InferResult:
    document, outputs = read_response(body, json_size)
    arrays = {}
    for name, datatype, shape, data, values in outputs:
        if data is not None:
            arrays[name] = decode(WireTensor(name, datatype, shape, data))
        elif values is not None:
            arrays[name] = from_values(name, datatype, shape, values)
        else:
            raise internal(f"output '{name}' of model '{request.model}' has no data")
    return InferResult(
        str(document.get("model_name", request.model)),
        str(document.get("model_version", "")),
        arrays,
        str(document.get("id", "")),
        document.get("parameters", {}),
    )
