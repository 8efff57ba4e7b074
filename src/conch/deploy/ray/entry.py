"""Where Ray Serve's own proxies lead: from a request to the deployment of its model.

A request over HTTP names its model in the path, one over gRPC in its message.  Whatever is for no one model goes to an
ingress, and so does what names its model elsewhere, as OpenAI's API does.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import quote, unquote

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse

from conch.deploy.ray.affinity import session_of_body, session_of_message
from conch.deploy.ray.relay import RpcError
from conch.deploy.ray.service import STREAM, UNARY, RawMessage
from conch.errors import one_line

_OF_A_MODEL: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/[^/]+)?/(?:infer|generate|generate_stream)")
_HEADER_LENGTH: Final = "inference-header-content-length"
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
#: Requests of a stream that may be under way, and its answers that may wait to be sent.
_AHEAD: Final = 64
#: Metadata that gRPC makes itself for each connection, and what Ray Serve's proxies are told by theirs.
_OF_GRPC: Final = ("grpc-", ":")
_OF_A_PROXY: Final = frozenset(
    {
        "accept-encoding",
        "application",
        "content-type",
        "multiplexed_model_id",
        "request_id",
        "session_id",
        "te",
        "user-agent",
    }
)


class StreamFailed(Exception):
    """A stream has ended with the status that its context has."""


class ServeEntry:
    """The root of the application, with the methods of ``GRPCInferenceService`` by their names.

    ``deployments`` has a handle for each model, by its name; where models share replicas (``shared``), Ray Serve is
    told which one a request is for.
    """

    def __init__(self, deployments: Mapping[str, Any], ingress: Any, shared: bool) -> None:
        self._deployments = deployments
        self._shared = shared
        self.ingress = ingress

    async def __call__(self, request: Any) -> Any:
        """A request (Starlette's) over HTTP."""
        from starlette.responses import StreamingResponse

        body: bytes = await request.body()
        path = (request.scope.get("raw_path") or quote(request.url.path).encode()).decode("latin-1")
        query = request.scope["query_string"].decode("latin-1")
        named = _OF_A_MODEL.fullmatch(path)
        handle = self.ingress
        if named is not None:
            length = request.headers.get(_HEADER_LENGTH, "")
            session = session_of_body(body, int(length) if _LENGTH.fullmatch(length) else None)
            handle = self._replicas(unquote(named[1]), session)
        parts = handle.options(method_name="http", stream=True).remote(
            request.method, f"{path}?{query}" if query else path, request.headers.items(), body
        )
        head = await anext(aiter(parts))
        return StreamingResponse(parts, head.status, dict(head.headers))

    async def ModelInfer(self, message: bytes, grpc_context: Any) -> RawMessage:
        return await _unary(self._of(_read(message)), "ModelInfer", message, grpc_context)

    async def ModelStreamInfer(self, messages: Any, grpc_context: Any) -> AsyncIterator[RawMessage]:
        """Requests of one stream, those of one sequence after each other; their answers as they come."""
        stream = _EntryStream(self._of, _metadata(grpc_context))
        reading = asyncio.ensure_future(stream.read(messages))
        try:
            while (answer := await stream.answers.get()) is not None:
                if isinstance(answer, RpcError):
                    _fail(grpc_context, answer)
                    raise StreamFailed(answer.details)  # of a stream that ends, Ray Serve takes it for OK
                yield RawMessage(answer)
        finally:
            reading.cancel()
            stream.cancel()

    def _of(self, request: ModelInferRequest) -> Any:
        return self._replicas(request.model_name, session_of_message(request))

    def _replicas(self, model: str, session: str) -> Any:
        """The handle that leads a request for ``model`` to a replica; an ingress answers for one that is not there."""
        handle = self._deployments.get(model)
        if handle is None:
            return self.ingress
        return handle.options(session_id=session, **({"multiplexed_model_id": model} if self._shared else {}))


def _passed_on(method: str) -> Callable[..., Any]:
    """The method of the entry that has an ingress answer ``method`` of the service."""

    async def call(self: ServeEntry, message: bytes, grpc_context: Any) -> RawMessage:
        return await _unary(self.ingress, method, message, grpc_context)

    call.__name__ = method
    return call


for _name in UNARY:
    if not hasattr(ServeEntry, _name):
        setattr(ServeEntry, _name, _passed_on(_name))


class _EntryStream:
    """The requests of one stream that are under way, and their ``answers``; None ends them."""

    def __init__(self, replicas: Callable[[ModelInferRequest], Any], metadata: list[tuple[str, str | bytes]]) -> None:
        self.answers: asyncio.Queue[bytes | RpcError | None] = asyncio.Queue(_AHEAD)
        self._replicas = replicas
        self._metadata = metadata
        self._tasks: set[asyncio.Task[None]] = set()
        #: The last request of each sequence that is under way.
        self._last: dict[str, asyncio.Task[None]] = {}

    async def read(self, messages: Any) -> None:
        """Pass on what the client sends (Ray Serve's ``gRPCInputStream``).

        Ends when all of it is answered, with what went wrong, or when the client has gone.
        """
        try:
            async for message in messages:
                while len(self._tasks) >= _AHEAD:  # a client that sends faster than it is answered waits
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                self._pass_on(message)
            if messages.is_cancelled():  # Ray Serve's proxy cancels the call itself only while it waits for an answer
                self.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        except asyncio.CancelledError:  # by Ray Serve, or as nobody waits for answers any more
            self.cancel()
            while not self.answers.empty():
                self.answers.get_nowait()
            self.answers.put_nowait(None)
            raise
        except Exception as error:  # whatever Ray raises
            await self.answers.put(RpcError(grpc.StatusCode.UNAVAILABLE.name, one_line(error)))
        await self.answers.put(None)

    def cancel(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()

    def _pass_on(self, message: bytes) -> None:
        request = _read(message)
        session = session_of_message(request)
        sequence = session if session.startswith("sequence") else ""
        before = self._last.get(sequence)
        task = asyncio.ensure_future(self._answer(self._replicas(request), request.id, message, before))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if sequence:
            self._last[sequence] = task
            task.add_done_callback(partial(self._ended, sequence))

    def _ended(self, sequence: str, task: asyncio.Task[None]) -> None:
        if self._last.get(sequence) is task:
            del self._last[sequence]

    async def _answer(self, handle: Any, id: str, message: bytes, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        answers = handle.options(method_name="rpc_stream", stream=True).remote(STREAM, message, self._metadata)
        try:
            async for answer in answers:
                await self.answers.put(answer)
        except asyncio.CancelledError:
            answers.cancel()  # Ray does so by itself only where the whole call is cancelled
            raise
        except Exception as error:  # whatever Ray raises, as for a replica that went away: other requests go on
            failed = ModelStreamInferResponse(error_message=f"no answer from the replica: {one_line(error)}")
            failed.infer_response.id = id
            await self.answers.put(failed.SerializeToString())


def _read(message: bytes) -> ModelInferRequest:
    """A request; an empty one, which the ingress refuses with the message as it is, for one that cannot be read."""
    try:
        return ModelInferRequest.FromString(message)
    except DecodeError:
        return ModelInferRequest()


async def _unary(handle: Any, method: str, message: bytes, context: Any) -> RawMessage:
    """Have a replica or an ingress answer a call; the status of one that fails is the client's."""
    answer = await handle.options(method_name="rpc").remote(method, message, _metadata(context))
    if isinstance(answer, RpcError):
        _fail(context, answer)
        return RawMessage(b"")
    return RawMessage(answer)


def _metadata(context: Any) -> list[tuple[str, str | bytes]]:
    """What the client sent beside its messages that is for the server."""
    sent = context.invocation_metadata()
    return [(key, value) for key, value in sent if not key.startswith(_OF_GRPC) and key not in _OF_A_PROXY]


def _fail(context: Any, error: RpcError) -> None:
    context.set_code(grpc.StatusCode[error.code])
    context.set_details(error.details)
