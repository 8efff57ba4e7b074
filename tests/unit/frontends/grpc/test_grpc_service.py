"""Every RPC, from Triton's client."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from conch.options.triton_values import Restriction
from tests.unit.frontends.grpc.conftest import array_request, models, text_of, text_request
from tests.unit.frontends.grpc.harness import Frontend


def fails(call, *arguments, **options) -> tuple[str, str]:
    """The status and the text with which a call fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **options)
    return caught.value.code().name, caught.value.details()


# Health and metadata


def test_server_and_models_say_whether_they_are_ready(frontend, client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("echo") and client.is_model_ready("echo", "1")
    assert not client.is_model_ready("echo", "2")
    assert not client.is_model_ready("unknown")
    frontend.server.ready = False
    assert not client.is_server_ready()


def test_health_service_follows_readiness(frontend, channel):
    health = health_pb2_grpc.HealthStub(channel)
    status = health_pb2.HealthCheckResponse.ServingStatus
    assert health.Check(health_pb2.HealthCheckRequest(service="any")).status == status.SERVING
    frontend.server.ready = False
    assert health.Check(health_pb2.HealthCheckRequest()).status == status.NOT_SERVING


def test_metadata_of_the_server_and_of_a_model(client):
    server = client.get_server_metadata()
    assert (server.name, server.version, list(server.extensions)) == ("triton", "2.51.0", ["statistics"])
    model = client.get_model_metadata("batched")
    assert (model.name, list(model.versions), model.platform) == ("batched", ["1"], "fake")
    (tensor,) = model.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("INPUT0", "BYTES", [-1, 1])


def test_configuration_is_the_models(frontend, client):
    config = client.get_model_config("count_down").config
    assert config.SerializeToString() == frontend.server.models["count_down"].shown_config.SerializeToString()


def test_statistics_carry_every_figure(client, stub):
    stub.ModelInfer(text_request("echo", "x"))
    stub.ModelInfer(text_request("echo", "x"))
    (entry,) = client.get_inference_statistics("echo").model_stats
    assert json_format.MessageToDict(entry, preserving_proto_field_name=True) == {
        "name": "echo",
        "version": "1",
        "last_inference": "1",
        "inference_count": "2",
        "execution_count": "2",
        "inference_stats": {
            name: {"count": "2", "ns": "2000"}
            for name in ("success", "queue", "compute_input", "compute_infer", "compute_output")
        },
        "response_stats": {"0": {"success": {"count": "2", "ns": "2000"}}},
        "batch_stats": [{"batch_size": "1", "compute_infer": {"count": "2", "ns": "2000"}}],
    }
    assert len(client.get_inference_statistics().model_stats) == len(models())


@pytest.mark.parametrize("version", ["abc", "", "7"])
def test_versions_are_read_alike_by_every_method(stub, version):
    requests = [
        (stub.ModelMetadata, pb.ModelMetadataRequest),
        (stub.ModelConfig, pb.ModelConfigRequest),
    ]
    for method, request in requests:
        if version == "":
            method(request(name="echo", version=version))
        elif version == "7":
            text = "Request for unknown model: 'echo' version 7 is not found"
            assert fails(method, request(name="echo", version=version)) == ("NOT_FOUND", text)
        else:
            code, text = fails(method, request(name="echo", version=version))
            assert code == "INVALID_ARGUMENT" and "version string 'abc' (details: stol)" in text


# Repository and logging


def test_index_lists_models(client, stub):
    models_listed = {model.name: model.state for model in client.get_model_repository_index().models}
    assert models_listed["echo"] == "READY"
    assert models_listed["never_loaded"] == ""
    ready = stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models
    assert "never_loaded" not in [model.name for model in ready]


def test_load_passes_configuration_and_files(frontend, client):
    client.load_model("echo")
    client.load_model("echo", config='{"name":"echo"}', files={"file:1/model.py": b"\0code"})
    assert frontend.server.loaded == [
        ("echo", None, {}),
        ("echo", '{"name":"echo"}', {"1/model.py": b"\0code"}),
    ]
    with pytest.raises(InferenceServerException, match="failed to poll"):
        client.load_model("unknown")


def test_unload_passes_dependents(frontend, client):
    client.unload_model("echo")
    client.unload_model("echo", unload_dependents=True)
    assert frontend.server.unloaded == [("echo", False), ("echo", True)]


def test_wrong_repository_requests_are_refused(stub):
    load, unload = pb.RepositoryModelLoadRequest, pb.RepositoryModelUnloadRequest
    unsupported = ("UNIMPLEMENTED", "'repository_name' specification is not supported")
    assert fails(stub.RepositoryModelLoad, load(repository_name="r", model_name="m")) == unsupported
    assert fails(stub.RepositoryModelUnload, unload(repository_name="r", model_name="m")) == unsupported
    assert fails(stub.RepositoryIndex, pb.RepositoryIndexRequest(repository_name="r")) == unsupported


def test_log_settings_are_shown_and_changed(frontend, client):
    settings = client.update_log_settings({"log_verbose_level": 2, "log_info": False, "log_format": "ISO8601"})
    assert settings.settings["log_verbose_level"].uint32_param == 2
    assert frontend.server.logs.log_info is False
    shown = client.get_log_settings(as_json=True)["settings"]
    assert shown["log_format"] == {"string_param": "ISO8601"}
    assert shown["log_error"] == {"bool_param": True}


def test_shared_memory_is_the_clients_only_where_the_server_allows_it(stub):
    assert not stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest()).regions
    for method, request in (
        (stub.SystemSharedMemoryRegister, pb.SystemSharedMemoryRegisterRequest(name="r")),
        (stub.SystemSharedMemoryUnregister, pb.SystemSharedMemoryUnregisterRequest(name="r")),
        (stub.CudaSharedMemoryRegister, pb.CudaSharedMemoryRegisterRequest(name="r")),
        (stub.CudaSharedMemoryUnregister, pb.CudaSharedMemoryUnregisterRequest(name="r")),
    ):
        assert fails(method, request) == (
            "UNIMPLEMENTED",
            "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
        )


def test_unknown_methods_are_unimplemented(channel):
    for path in (
        "/inference.GRPCInferenceService/Nothing",
        "/other.Service/ModelInfer",
        "/grpc.health.v1.Health/List",
    ):
        assert fails(channel.unary_unary(path), b"") == ("UNIMPLEMENTED", "")


# Inference


def test_inference_through_the_client(client):
    tensor = triton.InferInput("INPUT0", [2, 1], "BYTES")
    values = np.array([["first"], ["zweite ü"]], dtype=np.object_)
    tensor.set_data_from_numpy(values)
    result = client.infer("batched", [tensor], request_id="an id", outputs=[triton.InferRequestedOutput("OUTPUT0")])
    assert [[one.decode() for one in row] for row in result.as_numpy("OUTPUT0")] == values.tolist()
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("an id", "batched", "1")


def test_parameters_reach_the_model(frontend, client):
    tensor = triton.InferInput("INPUT0", [1], "FP32")
    tensor.set_data_from_numpy(np.zeros(1, np.float32))
    client.infer(
        "fp32", [tensor], sequence_id=42, sequence_start=True, sequence_end=True, priority=3, timeout=1000,
        parameters={"own": "text", "number": 5, "truth": False},
    )  # fmt: skip
    (request,) = frontend.server.models["fp32"].received
    assert request.correlation_id == 42
    assert (request.flags, request.priority, request.timeout) == (3, 3, 1000)
    assert request.parameters == {"own": "text", "number": 5, "truth": False}


def test_response_parameters_keep_their_types(stub):
    parameters = stub.ModelInfer(text_request("misbehave", "parameters")).parameters
    assert parameters["truth"].bool_param is True
    assert parameters["number"].int64_param == -7
    assert parameters["real"].double_param == 0.5
    assert parameters["text"].string_param == "ü"


def test_classification(stub):
    request = array_request("fp32", np.array([0.5, 3, -1], np.float32))
    request.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 2
    response = stub.ModelInfer(request)
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == ("BYTES", [2])
    assert response.raw_output_contents[0] == b"\x0c\0\0\x003.000000:1:b\x0c\0\0\x000.500000:0:a"


def test_single_response_may_be_followed_by_the_end(stub):
    assert text_of(stub.ModelInfer(text_request("misbehave", "late final"))) == "late final"


def test_response_may_have_no_outputs(stub):
    response = stub.ModelInfer(text_request("misbehave", "no outputs"))
    assert not response.outputs and response.model_name == "misbehave"


FAILURES = {
    "unknown model": (
        text_request("unknown", "x"), "NOT_FOUND", "Request for unknown model: 'unknown' is not found",
    ),
    "negative version": (
        text_request("echo", "x", model_version="-1"),
        "INVALID_ARGUMENT",
        "invalid model version specified '-1' , version should be an integral value > 0",
    ),
    "decoupled model": (
        array_request("count_down", np.ones(1, np.int32)),
        "UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    ),
    "two responses": (text_request("misbehave", "twice"), "INTERNAL", "expected a single response, got 2"),
    "error of the model": (text_request("misbehave", "bad luck"), "INVALID_ARGUMENT", "bad luck"),
    "refused by the queue": (text_request("misbehave", "refuse"), "UNAVAILABLE", "Exceeds maximum queue size"),
    "bug": (text_request("misbehave", "crash"), "INTERNAL", "RuntimeError: a bug"),
    "wrong shape": (
        array_request("fp32", np.ones((1, 1), np.float32)),
        "INVALID_ARGUMENT",
        "[request id: <id_unknown>] unexpected shape for input 'INPUT0' for model 'fp32'. Expected [-1], got [1,1]. ",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("request_", "code", "text"), FAILURES.values(), ids=FAILURES.keys())
def test_inference_fails_with_tritons_words(stub, request_, code, text):
    assert fails(stub.ModelInfer, request_) == (code, text)


def test_response_that_cannot_be_encoded_fails_its_call_only(stub):
    assert fails(stub.ModelInfer, text_request("misbehave", "unsendable"))[0] == "INTERNAL"
    assert text_of(stub.ModelInfer(text_request("echo", "x"))) == "x"


# Restrictions, forwarding, shutdown


def test_restricted_methods_need_their_key():
    restriction = Restriction(("inference", "model-repository"), "Admin", "secret")
    with Frontend(*models(), grpc_restricted_protocol=(restriction,)) as frontend:
        with grpc.insecure_channel(frontend.target) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            refused = (
                "UNAVAILABLE", "This protocol is restricted, expecting header 'triton-grpc-protocol-Admin'",
            )  # fmt: skip
            request = text_request("echo", "x")
            key = "triton-grpc-protocol-admin"
            assert fails(stub.ModelInfer, request) == refused
            assert fails(stub.ModelInfer, request, metadata=[(key, "wrong")]) == refused
            assert fails(lambda: list(stub.ModelStreamInfer(iter([request])))) == refused
            assert fails(stub.RepositoryIndex, pb.RepositoryIndexRequest()) == refused
            assert text_of(stub.ModelInfer(request, metadata=[(key, "secret")])) == "x"
            assert stub.ServerLive(pb.ServerLiveRequest()).live


def test_matching_metadata_becomes_parameters():
    with Frontend(*models(), grpc_header_forward_pattern="^(X-|triton_)") as frontend:
        with grpc.insecure_channel(frontend.target) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = text_request("echo", "x")
            request.parameters["own"].int64_param = 1
            metadata = [("x-tenant", "blue"), ("x-raw-bin", b"\xff\0"), ("y-other", "1")]
            stub.ModelInfer(request, metadata=metadata)
            list(stub.ModelStreamInfer(iter([request]), metadata=metadata))
            for received in frontend.server.models["echo"].received:
                assert received.parameters == {"own": 1, "x-tenant": "blue", "x-raw-bin": "ÿ\0"}
            code, text = fails(stub.ModelInfer, request, metadata=[("triton_x", "1")])
            assert (code, text) == (
                "INVALID_ARGUMENT", "Header 'triton_x' is reserved for Triton usage and cannot be forwarded.",
            )  # fmt: skip


def test_exiting_server_takes_no_calls(frontend, stub):
    frontend.server.exiting = True
    stopping = (
        "UNAVAILABLE", "GRPC server is shutting down and has stopped accepting new requests.",
    )  # fmt: skip
    assert fails(stub.ModelInfer, text_request("echo", "x")) == stopping
    assert fails(stub.ServerLive, pb.ServerLiveRequest()) == ("UNAVAILABLE", "Server exiting")
    assert fails(stub.ServerReady, pb.ServerReadyRequest()) == ("UNAVAILABLE", "Server exiting")
