"""The messages are those of Triton's clients and of gRPC's own packages; what the reader of their files refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from conch.core.protocol import grpc_service, health, model_config
from conch.core.protocol.proto_files import POOL, read_file
from conch.frontends.grpc.reflection import served_files


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (model_config_pb2.DESCRIPTOR, model_config.DESCRIPTOR),
        (service_pb2.DESCRIPTOR, grpc_service.DESCRIPTOR),
        (health_pb2.DESCRIPTOR, health.DESCRIPTOR),
        (reflection_pb2.DESCRIPTOR, None),
    ],
    ids=["configuration", "service", "health", "reflection"],
)
def test_calls_messages_and_fields_are_those_of_other_clients(theirs: Any, ours: Any) -> None:
    """If a field is new, decide whether conch supports it, and add it to the file and to docs/policy.md."""
    if ours is None:
        assert "grpc.reflection.v1alpha.ServerReflection" in served_files().services
        ours = POOL.FindFileByName("grpc/reflection/v1alpha/reflection.proto")
    installed, declared = set(declarations(theirs)), set(declarations(ours))
    assert installed - declared == set()
    # An older client lacks the newest fields.
    assert len(declared - installed) < 8, declared - installed


def declarations(file: Any) -> Iterator[str]:
    """Yield a line for each method, field, enum value and message of a file."""
    described = FileDescriptorProto()
    file.CopyToProto(described)
    for service in described.service:
        for method in service.method:
            streams = (method.client_streaming, method.server_streaming)
            yield f"{described.package}.{service.name} {method.name} {method.input_type} {method.output_type} {streams}"
    yield from members(described, described.message_type, described.package)


def members(scope: Any, messages: Any, name: str) -> Iterator[str]:
    for enum in scope.enum_type:
        yield from (f"{name}.{enum.name} {value.name} {value.number}" for value in enum.value)
    for message in messages:
        path = f"{name}.{message.name}"
        yield f"{path} is {'an entry' if message.options.map_entry else 'a message'}"
        for field in message.field:
            oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
            yield f"{path} {field.number} {field.name} {field.label} {field.type} {field.type_name} {oneof}"
        yield from members(message, message.nested_type, path)


def test_messages_of_both_packages_are_read_in_one_process() -> None:
    ours = grpc_service.ModelInferRequest(model_name="m", raw_input_contents=[b"1"])
    ours.parameters["priority"].uint64_param = 2
    tensor = ours.inputs.add(name="x", datatype="INT32", shape=[1, -1])
    tensor.contents.int_contents.extend([1, -2])
    theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
    assert (theirs.parameters["priority"].uint64_param, theirs.inputs[0].contents.int_contents[1]) == (2, -2)
    assert grpc_service.ModelInferRequest.FromString(theirs.SerializeToString()) == ours
    assert model_config.DataType.Value("TYPE_BF16") == model_config.TYPE_BF16 == model_config_pb2.TYPE_BF16
    assert model_config.ModelInstanceGroup.KIND_GPU == model_config_pb2.ModelInstanceGroup.KIND_GPU


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('syntax = "proto3"; option java_package = "x";', "x.proto: unexpected 'option'"),
        ("message A { string a: 1; }", "x.proto: '=' expected, not '1'"),
        ("message A { string a = 1 }", "x.proto: ';' expected, not '}'"),
        ("message A { string a = 1;", "x.proto: the file ends too early"),
    ],
)
def test_what_is_not_of_the_known_part_of_the_language_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"x\.proto") as error:
        read_file("x.proto", text)
    assert str(error.value) == reason
