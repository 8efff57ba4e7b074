"""gRPC server reflection, v1 and v1alpha, which tools such as grpcurl use to list and describe services.

The messages of both versions differ only in their package. Calls run on the event loop.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import FileDescriptor

from conch.core.protocol import grpc_service, health
from conch.core.protocol.proto_files import POOL, load, members
from conch.core.tensors import Buffer
from conch.frontends.grpc.calls import Call, ServingContext
from conch.frontends.grpc.large import MAX_HERE, parse
from conch.frontends.grpc.requests import RequestHead
from conch.frontends.grpc.status import CallFault, Status
from conch.http2 import Http2Stream

VERSIONS: Final = ("v1", "v1alpha")
#: Bytes of responses that may be unread before further requests wait.
_PAUSE_AT: Final = 256 << 10


class ReflectionMessages(NamedTuple):
    """The classes of the request and the response of one version."""

    request: Any
    response: Any


class ServedFiles:
    """The files that describe the services of the port; ``services`` are their names, ``messages`` by version."""

    def __init__(self) -> None:
        self.messages: dict[str, ReflectionMessages] = {}
        roots = [grpc_service.DESCRIPTOR, health.DESCRIPTOR]
        for version in VERSIONS:
            roots.append(load("reflection.proto", f"grpc.reflection.{version}"))
            types = members(roots[-1])
            self.messages[version] = ReflectionMessages(
                types["ServerReflectionRequest"], types["ServerReflectionResponse"]
            )
        self.services = sorted(service.full_name for file in roots for service in file.services_by_name.values())

    def of_symbol(self, symbol: str) -> FileDescriptor:
        """Return the file of a service, method, message, field, enum or value. Raises KeyError for another name."""
        try:
            return POOL.FindFileContainingSymbol(symbol)
        except KeyError:
            return POOL.FindMethodByName(symbol).containing_service.file


def _with_imports(file: FileDescriptor) -> list[FileDescriptor]:
    """Return a file followed by its imports, each once."""
    files = {file.name: file}
    for imported in file.dependencies:
        files |= {dependency.name: dependency for dependency in _with_imports(imported)}
    return list(files.values())


@cache
def served_files() -> ServedFiles:
    """Return the files; built on the first call."""
    return ServedFiles()


class ReflectionCall(Call):
    """A reflection call: any number of requests, each with a response."""

    __slots__ = ("_files", "_messages")

    def __init__(self, stream: Http2Stream, head: RequestHead, context: ServingContext, version: str) -> None:
        self._files = served_files()
        self._messages = self._files.messages[version]
        super().__init__(stream, head, context)

    def on_message(self, data: Buffer) -> None:
        if len(data) > MAX_HERE:
            self.on_compressed_message(data)
        request = parse(self._messages.request, data)
        self.release(self.message_size)
        response = self._messages.response(valid_host=request.host, original_request=request)
        try:
            self._respond(request, response)
        except KeyError:
            response.error_response.error_code = Status.NOT_FOUND
            response.error_response.error_message = "not found"
        self.send([response.SerializeToString()])
        if self.unsent > _PAUSE_AT:
            self.paused = True

    def on_compressed_message(self, data: Buffer) -> None:
        raise CallFault(Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({MAX_HERE})")

    def on_half_close(self) -> None:
        self.finish()

    def on_cancel(self) -> None:
        pass

    def on_drained(self) -> None:
        if self.paused:
            self.resume()

    def _respond(self, request: Any, response: Any) -> None:
        """Fill in the response to a request. Raises KeyError if the requested name does not exist."""
        files = self._files
        match request.WhichOneof("message_request"):
            case "list_services":
                for name in files.services:
                    response.list_services_response.service.add(name=name)
                return
            case "all_extension_numbers_of_type":
                name = POOL.FindMessageTypeByName(request.all_extension_numbers_of_type).full_name
                response.all_extension_numbers_response.base_type_name = name  # no message here has extensions
                return
            case "file_by_filename":
                file = POOL.FindFileByName(request.file_by_filename)
            case "file_containing_symbol":
                file = files.of_symbol(request.file_containing_symbol)
            case kind:
                raise KeyError(kind)
        serialised = [dependency.serialized_pb for dependency in _with_imports(file)]
        response.file_descriptor_response.file_descriptor_proto.extend(serialised)
