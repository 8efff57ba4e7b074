"""gRPC server reflection, v1 and v1alpha, which tools such as grpcurl use to list and describe services.

The messages of both versions differ only in their package; they are built here, in a separate descriptor pool. Calls
run on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from conch.core.tensors import Buffer
from conch.frontends.grpc.calls import Call, ServingContext
from conch.frontends.grpc.large import MAX_HERE, parse
from conch.frontends.grpc.requests import RequestHead
from conch.frontends.grpc.status import CallFault, Status
from conch.http2 import Http2Stream

VERSIONS: Final = ("v1", "v1alpha")
#: Bytes of responses that may be unread before further requests wait.
_PAUSE_AT: Final = 256 << 10

#: The messages with the field numbers of ``reflection.proto``; ``*`` marks repeated fields, ``@`` members of a oneof.
_MESSAGES: Final[Mapping[str, Mapping[str, tuple[int, str]]]] = {
    "ServerReflectionRequest": {
        "host": (1, "string"),
        "@file_by_filename": (3, "string"),
        "@file_containing_symbol": (4, "string"),
        "@file_containing_extension": (5, "ExtensionRequest"),
        "@all_extension_numbers_of_type": (6, "string"),
        "@list_services": (7, "string"),
    },
    "ExtensionRequest": {"containing_type": (1, "string"), "extension_number": (2, "int32")},
    "ServerReflectionResponse": {
        "valid_host": (1, "string"),
        "original_request": (2, "ServerReflectionRequest"),
        "@file_descriptor_response": (4, "FileDescriptorResponse"),
        "@all_extension_numbers_response": (5, "ExtensionNumberResponse"),
        "@list_services_response": (6, "ListServiceResponse"),
        "@error_response": (7, "ErrorResponse"),
    },
    "FileDescriptorResponse": {"*file_descriptor_proto": (1, "bytes")},
    "ExtensionNumberResponse": {"base_type_name": (1, "string"), "*extension_number": (2, "int32")},
    "ListServiceResponse": {"*service": (1, "ServiceResponse")},
    "ServiceResponse": {"name": (1, "string")},
    "ErrorResponse": {"error_code": (1, "int32"), "error_message": (2, "string")},
}


def _describe(version: str) -> descriptor_pb2.FileDescriptorProto:
    """Return the file that declares one version of the service."""
    package = f"grpc.reflection.{version}"
    file = descriptor_pb2.FileDescriptorProto(
        name=f"grpc/reflection/{version}/reflection.proto", package=package, syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if any(field.startswith("@") for field in fields):
            message.oneof_decl.add(name=f"message_{name.removeprefix('ServerReflection').lower()}")
        for field, (number, kind) in fields.items():
            declared = message.field.add(name=field.lstrip("*@"), number=number)
            declared.label = kinds.LABEL_REPEATED if field.startswith("*") else kinds.LABEL_OPTIONAL
            if kind in _MESSAGES:
                declared.type = kinds.TYPE_MESSAGE
                declared.type_name = f".{package}.{kind}"
            else:
                declared.type = getattr(kinds, f"TYPE_{kind.upper()}")
            if field.startswith("@"):
                declared.oneof_index = 0
    service = file.service.add(name="ServerReflection")
    service.method.add(
        name="ServerReflectionInfo",
        input_type=f".{package}.ServerReflectionRequest",
        output_type=f".{package}.ServerReflectionResponse",
        client_streaming=True,
        server_streaming=True,
    )
    return file


class ReflectionMessages(NamedTuple):
    """The classes of the request and the response of one version."""

    request: Any
    response: Any


class ServedFiles:
    """The files that describe the services of the port; ``services`` are their names, ``messages`` by version."""

    def __init__(self) -> None:
        self.pool = descriptor_pool.DescriptorPool()
        self.messages: dict[str, ReflectionMessages] = {}
        roots: list[FileDescriptor] = [service_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR]
        for file in roots:
            for dependency in reversed(_with_imports(file)):
                self.pool.AddSerializedFile(dependency.serialized_pb)
        for version in VERSIONS:
            described = _describe(version)
            self.pool.AddSerializedFile(described.SerializeToString())
            file = self.pool.FindFileByName(described.name)
            roots.append(file)
            types = file.message_types_by_name
            self.messages[version] = ReflectionMessages(
                message_factory.GetMessageClass(types["ServerReflectionRequest"]),
                message_factory.GetMessageClass(types["ServerReflectionResponse"]),
            )
        self.services = sorted(service.full_name for file in roots for service in file.services_by_name.values())

    def of_symbol(self, symbol: str) -> FileDescriptor:
        """Return the file of a service, method, message, field, enum or value. Raises KeyError for another name."""
        try:
            return self.pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self.pool.FindMethodByName(symbol).containing_service.file


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
                name = files.pool.FindMessageTypeByName(request.all_extension_numbers_of_type).full_name
                response.all_extension_numbers_response.base_type_name = name  # no message here has extensions
                return
            case "file_by_filename":
                file = files.pool.FindFileByName(request.file_by_filename)
            case "file_containing_symbol":
                file = files.of_symbol(request.file_containing_symbol)
            case kind:
                raise KeyError(kind)
        serialised = [dependency.serialized_pb for dependency in _with_imports(file)]
        response.file_descriptor_response.file_descriptor_proto.extend(serialised)
