"""Server reflection, asked by gRPC's own client; and ``Health/Watch``."""

from __future__ import annotations

import queue
import threading

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from conch.frontends.grpc.reflection import VERSIONS, served_files
from tests.unit.frontends.grpc.conftest import models
from tests.unit.frontends.grpc.harness import Frontend

SERVICE = "inference.GRPCInferenceService"
SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    SERVICE,
]


@pytest.fixture(params=VERSIONS)
def ask(request, channel):
    """Asks some questions on one stream; the answers come as messages."""
    messages = served_files().messages[request.param]
    call = channel.stream_stream(
        f"/grpc.reflection.{request.param}.ServerReflection/ServerReflectionInfo",
        request_serializer=messages.request.SerializeToString,
        response_deserializer=messages.response.FromString,
    )

    def ask(*questions: dict[str, str]) -> list:
        return list(call(iter([messages.request(host="here", **question) for question in questions])))

    return ask


def test_services_are_listed(ask):
    (answer,) = ask({"list_services": ""})
    assert [service.name for service in answer.list_services_response.service] == SERVICES
    assert (answer.valid_host, answer.original_request.host) == ("here", "here")


@pytest.mark.parametrize(
    ("symbol", "names"),
    [
        (SERVICE, ["grpc_service.proto", "model_config.proto"]),
        (f"{SERVICE}.ModelInfer", ["grpc_service.proto", "model_config.proto"]),
        ("inference.ModelInferRequest.InferInputTensor", ["grpc_service.proto", "model_config.proto"]),
        ("inference.ModelInferRequest.model_name", ["grpc_service.proto", "model_config.proto"]),
        ("inference.DataType", ["model_config.proto"]),
        ("inference.TYPE_FP32", ["model_config.proto"]),
    ],
)
def test_file_of_a_symbol_comes_with_what_it_imports(ask, symbol, names):
    by_symbol, by_name = ask({"file_containing_symbol": symbol}, {"file_by_filename": names[0]})
    files = by_symbol.file_descriptor_response.file_descriptor_proto
    assert [FileDescriptorProto.FromString(file).name for file in files] == names
    assert by_name.file_descriptor_response.file_descriptor_proto == files


@pytest.mark.parametrize(
    "question",
    [
        {"file_by_filename": "nothing.proto"},
        {"file_containing_symbol": "inference.Nothing"},
        {"file_containing_symbol": f"{SERVICE}.Nothing"},
        {"file_containing_symbol": ""},
        {"all_extension_numbers_of_type": "inference.Nothing"},
        {},
    ],
)
def test_what_does_not_exist_is_not_found(ask, question):
    answer, after = ask(question, {"list_services": ""})
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert len(after.list_services_response.service) == len(SERVICES)


def test_no_message_is_extended(ask):
    (answer,) = ask({"all_extension_numbers_of_type": "inference.ModelInferRequest"})
    assert list(answer.all_extension_numbers_response.extension_number) == []
    assert answer.all_extension_numbers_response.base_type_name == "inference.ModelInferRequest"


def test_grpcs_own_client_reads_the_service(channel):
    reflection = pytest.importorskip("grpc_reflection.v1alpha.proto_reflection_descriptor_database")
    database = reflection.ProtoReflectionDescriptorDatabase(channel)
    assert list(database.get_services()) == SERVICES
    service = DescriptorPool(database).FindServiceByName(SERVICE)
    assert (
        service.methods_by_name.keys() == pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name.keys()
    )
    infer = service.methods_by_name["ModelInfer"]
    assert "raw_input_contents" in infer.input_type.fields_by_name
    assert DescriptorPool(database).FindMessageTypeByName("grpc.health.v1.HealthCheckRequest")


# Health/Watch


class Watch:
    """The statuses that come, in the order of their coming; ``None`` at the end."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self.seen: queue.Queue[int | None] = queue.Queue()
        self.call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for response in self.call:
                self.seen.put(response.status)
        except grpc.RpcError:
            pass
        self.seen.put(None)


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("service", ["", SERVICE])
def test_watcher_is_told_what_is_and_what_changes(frontend, channel, service):
    watch = Watch(channel, service)
    assert watch.seen.get(timeout=60) == SERVING
    for ready, status in ((False, NOT_SERVING), (True, SERVING)):
        frontend.call(setattr, frontend.server, "ready", ready)
        assert watch.seen.get(timeout=60) == status
    watch.call.cancel()
    assert watch.seen.get(timeout=60) is None
    assert watch.seen.empty()


def test_unknown_service_is_unknown(channel):
    watch = Watch(channel, "nothing")
    assert watch.seen.get(timeout=60) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.call.cancel()


@pytest.mark.parametrize("service", ["", "nothing"])
def test_watchers_do_not_keep_a_server_from_stopping(service):
    with Frontend(*models()) as frontend, grpc.insecure_channel(frontend.target) as channel:
        watch = Watch(channel, service)
        assert watch.seen.get(timeout=60) is not None
        frontend.call(setattr, frontend.server, "exiting", True)
        assert watch.seen.get(timeout=60) is None
        assert watch.call.code() is grpc.StatusCode.UNAVAILABLE
