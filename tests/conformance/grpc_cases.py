"""gRPC calls to send to both servers, by name; a list of requests is a ``ModelStreamInfer`` stream."""

# ruff: noqa: E501  (one case a line)
from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from tests.conformance.raw import pack_strings

I16 = struct.pack("<16i", *range(16))
ONES = struct.pack("<16i", *[1] * 16)


@dataclass(frozen=True)
class Call:
    """One call; ``metadata`` as the client sends it."""

    method: str
    request: Any
    metadata: tuple[tuple[str, str], ...] = field(default=())


def parameter(value: Any) -> pb.InferParameter:
    match value:
        case pb.InferParameter():
            return value
        case bool():
            return pb.InferParameter(bool_param=value)
        case int():
            return pb.InferParameter(int64_param=value)
        case float():
            return pb.InferParameter(double_param=value)
        case _:
            return pb.InferParameter(string_param=value)


def unsigned(value: int) -> pb.InferParameter:
    return pb.InferParameter(uint64_param=value)


def tensor(
    name: str, datatype: str, shape: list[int], parameters: dict[str, Any] | None = None, **contents: Any
) -> Any:
    made = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    if contents:
        made.contents.CopyFrom(pb.InferTensorContents(**contents))
    for key, value in (parameters or {}).items():
        made.parameters[key].CopyFrom(parameter(value))
    return made


def output(name: str, **parameters: Any) -> Any:
    made = pb.ModelInferRequest.InferRequestedOutputTensor(name=name)
    for key, value in parameters.items():
        made.parameters[key].CopyFrom(parameter(value))
    return made


def request(
    model: str, inputs: list[Any], raw: list[bytes] | None = None, parameters: dict[str, Any] | None = None, **more: Any
) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=model, inputs=inputs, raw_input_contents=raw or [], **more)
    for key, value in (parameters or {}).items():
        made.parameters[key].CopyFrom(parameter(value))
    return made


def infer(*args: Any, **more: Any) -> Call:
    return Call("ModelInfer", request(*args, **more))


def typed(datatype: str, shape: list[int], **contents: Any) -> Call:
    return infer("types", [tensor(f"IN_{datatype}", datatype, shape, **contents)])


def raw(datatype: str, shape: list[int], data: bytes) -> Call:
    return infer("types", [tensor(f"IN_{datatype}", datatype, shape)], [data])


PAIR = [tensor("INPUT0", "INT32", [16]), tensor("INPUT1", "INT32", [16])]
TEXT = tensor("INPUT", "BYTES", [1], bytes_contents=[b"x"])


def echo(**more: Any) -> Call:
    return infer("echo_request", [TEXT], outputs=[output("REQUEST")], **more)


def repeat(*values: int, **more: Any) -> pb.ModelInferRequest:
    return request("repeat", [tensor("IN", "INT32", [len(values)], int_contents=values)], **more)


def square(n: int, **more: Any) -> pb.ModelInferRequest:
    return request("square", [tensor("IN", "INT32", [1], int_contents=[n])], **more)


def add_sub(**more: Any) -> pb.ModelInferRequest:
    return request("add_sub", PAIR, [I16, ONES], **more)


EMPTY_FINAL = {"triton_enable_empty_final_response": True}


def trace(model: str = "", **settings: list[str]) -> Call:
    made = pb.TraceSettingRequest(model_name=model)
    for key, values in settings.items():
        made.settings[key].value.extend(values)
    return Call("TraceSetting", made)


def log(**settings: Any) -> Call:
    made = pb.LogSettingsRequest()
    for key, value in settings.items():
        field_name = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
        setattr(made.settings[key], field_name, value)
    return Call("LogSettings", made)


def load(model: str, **parameters: Any) -> Call:
    made = pb.RepositoryModelLoadRequest(model_name=model)
    for key, value in parameters.items():
        field_name = {bool: "bool_param", int: "int64_param", str: "string_param", bytes: "bytes_param"}[type(value)]
        setattr(made.parameters[key], field_name, value)
    return Call("RepositoryModelLoad", made)


CALLS: dict[str, Call] = {
    "live": Call("ServerLive", pb.ServerLiveRequest()),
    "ready": Call("ServerReady", pb.ServerReadyRequest()),
    "server metadata": Call("ServerMetadata", pb.ServerMetadataRequest()),
    "model ready": Call("ModelReady", pb.ModelReadyRequest(name="add_sub")),
    "model version ready": Call("ModelReady", pb.ModelReadyRequest(name="add_sub", version="1")),
    "model version not ready": Call("ModelReady", pb.ModelReadyRequest(name="add_sub", version="4")),
    "model ready, no number": Call("ModelReady", pb.ModelReadyRequest(name="add_sub", version="one")),
    "unknown model ready": Call("ModelReady", pb.ModelReadyRequest(name="absent")),
    "nameless model ready": Call("ModelReady", pb.ModelReadyRequest()),
    "metadata": Call("ModelMetadata", pb.ModelMetadataRequest(name="identity_batched")),
    "metadata of an ensemble": Call("ModelMetadata", pb.ModelMetadataRequest(name="diamond")),
    "metadata of versions": Call("ModelMetadata", pb.ModelMetadataRequest(name="version_all")),
    "metadata of a version": Call("ModelMetadata", pb.ModelMetadataRequest(name="version_all", version="10")),
    "metadata of a negative version": Call("ModelMetadata", pb.ModelMetadataRequest(name="version_all", version="-1")),
    "metadata of a text version": Call("ModelMetadata", pb.ModelMetadataRequest(name="version_all", version="x")),
    "metadata of an unknown version": Call("ModelMetadata", pb.ModelMetadataRequest(name="version_all", version="3")),
    "metadata of an unknown model": Call("ModelMetadata", pb.ModelMetadataRequest(name="absent")),
    "metadata of nothing": Call("ModelMetadata", pb.ModelMetadataRequest()),
    **{
        f"config of {model}": Call("ModelConfig", pb.ModelConfigRequest(name=model))
        for model in ["add_sub", "accumulate_state", "auto_complete", "classify", "diamond", "instances", "no_config", "reshape"]
    },
    "config of an unknown model": Call("ModelConfig", pb.ModelConfigRequest(name="absent")),
    "statistics of an unknown model": Call("ModelStatistics", pb.ModelStatisticsRequest(name="absent")),
    "statistics of an unknown version": Call("ModelStatistics", pb.ModelStatisticsRequest(name="add_sub", version="9")),
    "index": Call("RepositoryIndex", pb.RepositoryIndexRequest()),
    "index ready": Call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True)),
    "index of a repository": Call("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="x")),
    "load when not explicit": load("add_sub"),
    "load unknown parameter": load("add_sub", other="x"),
    "load config of wrong type": load("add_sub", config=True),
    "load file of wrong type": load("add_sub", **{"file:1/model.py": "x"}),
    "load from a repository": Call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(repository_name="x", model_name="add_sub")),
    "unload when not explicit": Call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="add_sub")),
    "infer": Call("ModelInfer", add_sub()),
    "infer with id": Call("ModelInfer", add_sub(id="an id")),
    "infer a version": Call("ModelInfer", add_sub(model_version="1")),
    "infer an unknown version": Call("ModelInfer", add_sub(model_version="2")),
    "infer a text version": Call("ModelInfer", add_sub(model_version="one")),
    "infer one output": Call("ModelInfer", add_sub(outputs=[output("OUTPUT1")])),
    "infer outputs in another order": Call("ModelInfer", add_sub(outputs=[output("OUTPUT1"), output("OUTPUT0")])),
    "infer unknown output": Call("ModelInfer", add_sub(outputs=[output("OUTPUT9")])),
    "infer an unknown model": infer("absent", PAIR, [I16, ONES]),
    "infer a nameless model": infer("", PAIR, [I16, ONES]),
    "infer a decoupled model": Call("ModelInfer", repeat(1)),
    "infer without inputs": infer("add_sub", []),
    "infer one input": infer("add_sub", PAIR[:1], [I16]),
    "infer input twice": infer("add_sub", [PAIR[0], PAIR[0]], [I16, I16]),
    "infer unknown input": infer("add_sub", [PAIR[0], tensor("OTHER", "INT32", [16])], [I16, ONES]),
    "infer without data": infer("add_sub", PAIR),
    "infer too little raw data": infer("add_sub", PAIR, [I16]),
    "infer too much raw data": infer("add_sub", PAIR, [I16, ONES, ONES]),
    "infer raw and contents": infer("add_sub", [tensor("INPUT0", "INT32", [16], int_contents=[1] * 16), PAIR[1]], [I16, ONES]),
    "infer size mismatch": infer("add_sub", PAIR, [I16, ONES[:60]]),
    "infer wrong shape": infer("add_sub", [tensor("INPUT0", "INT32", [4, 4]), PAIR[1]], [I16, ONES]),
    "infer negative shape": infer("add_sub", [tensor("INPUT0", "INT32", [-1]), PAIR[1]], [I16, ONES]),
    "infer wrong datatype": infer("add_sub", [tensor("INPUT0", "FP32", [16]), PAIR[1]], [I16, ONES]),
    "infer unknown datatype": infer("add_sub", [tensor("INPUT0", "INT31", [16]), PAIR[1]], [I16, ONES]),
    "infer no datatype": infer("add_sub", [tensor("INPUT0", "", [16]), PAIR[1]], [I16, ONES]),
    "infer batch too large": infer("identity_batched", [tensor("INPUT", "FP32", [9, 1])], [bytes(36)]),
    "infer no shape": infer("identity_batched", [tensor("INPUT", "FP32", [])], [bytes(4)]),
    "contents bool": typed("BOOL", [2], bool_contents=[True, False]),
    "contents int8": typed("INT8", [2], int_contents=[-128, 127]),
    "contents int8 out of range": typed("INT8", [1], int_contents=[300]),
    "contents int16": typed("INT16", [1], int_contents=[-5]),
    "contents int32": typed("INT32", [1], int_contents=[-5]),
    "contents int64": typed("INT64", [1], int64_contents=[-(2**63)]),
    "contents uint8": typed("UINT8", [1], uint_contents=[255]),
    "contents uint16": typed("UINT16", [1], uint_contents=[65535]),
    "contents uint32": typed("UINT32", [1], uint_contents=[2**32 - 1]),
    "contents uint64": typed("UINT64", [1], uint64_contents=[2**64 - 1]),
    "contents fp32": typed("FP32", [2], fp32_contents=[0.1, float("inf")]),
    "contents fp64": typed("FP64", [1], fp64_contents=[0.1]),
    "contents bytes": typed("BYTES", [3], bytes_contents=[b"a", b"", b"\xff"]),
    "contents of another type": typed("INT32", [1], fp32_contents=[1.0]),
    "contents of int64 for int32": typed("INT32", [1], int64_contents=[1]),
    "contents of two types": typed("INT32", [1], int_contents=[1], int64_contents=[1]),
    "contents fp16": typed("FP16", [1], fp32_contents=[1.0]),
    "contents too few": typed("INT32", [2], int_contents=[1]),
    "contents too many bytes": typed("BYTES", [1], bytes_contents=[b"a", b"b"]),
    "contents empty": typed("INT32", [0], int_contents=[]),
    "raw fp16": raw("FP16", [2], b"\0\x3c\0\x40"),
    "raw bf16": raw("BF16", [2], b"\x80\x3f\0\x40"),
    "raw bytes": raw("BYTES", [2], pack_strings(b"a", b"bc")),
    "raw bytes cut": raw("BYTES", [1], b"\5\0\0\0ab"),
    "raw bytes cut in length": raw("BYTES", [1], b"\5\0"),
    "raw bytes too few": raw("BYTES", [2], pack_strings(b"a")),
    "raw empty": raw("FP32", [0], b""),
    "parameters": echo(parameters={"a": 1, "b": True, "c": "x", "d": 0.5}),
    "parameter unsigned": echo(parameters={"a": unsigned(5)}),
    "parameter unset": echo(parameters={"a": pb.InferParameter()}),
    "sequence": echo(parameters={"sequence_id": 7, "sequence_start": True, "sequence_end": True}),
    "sequence text": echo(parameters={"sequence_id": "abc"}),
    "sequence id bool": echo(parameters={"sequence_id": True}),
    "sequence id unsigned": echo(parameters={"sequence_id": unsigned(7)}),
    "sequence start number": echo(parameters={"sequence_start": 1}),
    "sequence end number": echo(parameters={"sequence_end": 1}),
    "priority": echo(parameters={"priority": 1}),
    "priority unsigned": echo(parameters={"priority": unsigned(1)}),
    "priority negative": echo(parameters={"priority": -1}),
    "priority text": echo(parameters={"priority": "1"}),
    "timeout": echo(parameters={"timeout": 1000000}),
    "timeout unsigned": echo(parameters={"timeout": unsigned(1)}),
    "timeout text": echo(parameters={"timeout": "1"}),
    "binary data output": echo(parameters={"binary_data_output": True}),
    "reserved": echo(parameters={"triton_x": 1}),
    "empty final for one response": echo(parameters=EMPTY_FINAL),
    "empty final number": echo(parameters={"triton_enable_empty_final_response": 1}),
    "classification": infer("classify", [tensor("INPUT", "FP32", [1, 4], fp32_contents=[1, 2, 3, 4])], outputs=[output("OUTPUT", classification=2)]),
    "classification zero": infer("classify", [tensor("INPUT", "FP32", [1, 4], fp32_contents=[1, 2, 3, 4])], outputs=[output("OUTPUT", classification=0)]),
    "classification negative": infer("classify", [tensor("INPUT", "FP32", [1, 4], fp32_contents=[1, 2, 3, 4])], outputs=[output("OUTPUT", classification=-1)]),
    "classification text": infer("classify", [tensor("INPUT", "FP32", [1, 4], fp32_contents=[1, 2, 3, 4])], outputs=[output("OUTPUT", classification="1")]),
    "shared memory unknown": infer("identity_fp32", [tensor("INPUT", "FP32", [1], {"shared_memory_region": "r", "shared_memory_byte_size": 4})]),
    "shared memory without size": infer("identity_fp32", [tensor("INPUT", "FP32", [1], {"shared_memory_region": "r"})]),
    "shared memory offset only": infer("identity_fp32", [tensor("INPUT", "FP32", [1], {"shared_memory_offset": 0})]),
    "shared memory region number": infer("identity_fp32", [tensor("INPUT", "FP32", [1], {"shared_memory_region": 1})]),
    "shared memory and contents": infer("identity_fp32", [tensor("INPUT", "FP32", [1], {"shared_memory_region": "r", "shared_memory_byte_size": 4}, fp32_contents=[1])]),
    "shared memory and classification": infer("classify", [tensor("INPUT", "FP32", [1, 4], fp32_contents=[1, 2, 3, 4])], outputs=[output("OUTPUT", classification=1, shared_memory_region="r", shared_memory_byte_size=4)]),
    "shared memory status": Call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
    "shared memory status unknown": Call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="x")),
    "shared memory unregister": Call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest()),
    "shared memory register": Call("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="x", key="/absent", byte_size=4)),
    "cuda status": Call("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
    **{
        f"fault {mode}": infer("faults", [tensor("MODE", "BYTES", [1, 1], bytes_contents=[mode.encode()])])
        for mode in ["ok", "default", "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED", "raise", "not_list", "too_few", "no_outputs"]
    },
    "ensemble": infer("chain", [tensor("X", "FP32", [1, 1], fp32_contents=[1])]),
    "ensemble fails": infer("failing", [tensor("MODE", "BYTES", [1, 1], bytes_contents=[b"NOT_FOUND"])]),
    "ensemble decoupled": infer("repeated", [tensor("IN", "INT32", [1], int_contents=[1])]),
    "sequence without start": infer("accumulate", [tensor("INPUT", "INT32", [1, 1], int_contents=[1])], parameters={"sequence_id": 3}),
    "trace": trace(),
    "trace of an unknown model": trace("absent"),
    "trace set": trace(trace_rate=["7"]),
    "trace of a model inherits": trace("add_sub"),
    "trace cleared": trace(trace_rate=[]),
    "trace two values": trace(trace_rate=["7", "8"]),
    "trace no number": trace(trace_rate=["x"]),
    "trace file": trace(trace_file=["/tmp/x"]),
    "trace level both": trace(trace_level=["OFF", "TENSORS"]),
    "log": log(),
    "log set": log(log_verbose_level=1, log_warning=False),
    "log is set": log(),
    "log bool of int": log(log_info=1),
    "log level of bool": log(log_verbose_level=True),
    "log format of bool": log(log_format=True),
    "log bad format": log(log_format="xml"),
    "log file": log(log_file="/tmp/x"),
    "log put back": log(log_verbose_level=0, log_warning=True),
}  # fmt: skip

STRICT = (("triton_grpc_error", "true"),)

STREAMS: dict[str, Call] = {
    name: Call("ModelStreamInfer", requests, metadata)
    for name, requests, metadata in [
        ("nothing", [], ()),
        ("one response", [add_sub(id="1")], ()),
        ("three requests", [add_sub(id=str(n)) for n in range(3)], ()),
        ("decoupled", [repeat(4, 2, 0, 1, id="r")], ()),
        ("decoupled without response", [repeat(id="r")], ()),
        ("empty final", [repeat(4, 2, id="r", parameters=EMPTY_FINAL)], ()),
        ("only an empty final", [repeat(id="r", parameters=EMPTY_FINAL)], ()),
        ("final with the last response", [square(3, id="s")], ()),
        ("final with the last response, empty final", [square(3, id="s", parameters=EMPTY_FINAL)], ()),
        ("square of zero", [square(0, id="s")], ()),
        ("square of zero, empty final", [square(0, id="s", parameters=EMPTY_FINAL)], ()),
        ("decoupled raises", [square(-1, id="s")], ()),
        ("error response", [repeat(1, -1, 2, id="r")], ()),
        ("empty final for one response", [add_sub(id="1", parameters=EMPTY_FINAL)], ()),
        ("unknown model", [request("absent", PAIR, [I16, ONES], id="u")], ()),
        ("unknown model then another", [request("absent", PAIR, [I16, ONES], id="u"), add_sub(id="2")], ()),
        ("missing input", [request("add_sub", PAIR[:1], [I16], id="m")], ()),
        ("bad parameter", [add_sub(id="p", parameters={"sequence_start": 1})], ()),
        ("bad data", [request("add_sub", PAIR, [I16], id="d")], ()),
        ("execution fails", [request("faults", [tensor("MODE", "BYTES", [1, 1], bytes_contents=[b"NOT_FOUND"])], id="f")], ()),
        ("one version", [add_sub(id="v", model_version="1")], ()),
        ("fails with a version", [request("faults", [tensor("MODE", "BYTES", [1, 1], bytes_contents=[b"raise"])], id="f", model_version="1")], ()),
        ("one output", [add_sub(id="o", outputs=[output("OUTPUT1")])], ()),
        ("strict, unknown model", [request("absent", PAIR, [I16, ONES], id="u"), add_sub(id="2")], STRICT),
        ("strict, execution fails", [request("faults", [tensor("MODE", "BYTES", [1, 1], bytes_contents=[b"NOT_FOUND"])], id="f")], STRICT),
        ("strict, all well", [add_sub(id="1")], STRICT),
        ("sequence", [request("accumulate", [tensor("INPUT", "INT32", [1, 1], int_contents=[n])], id=str(n), parameters={"sequence_id": 61, "sequence_start": n == 1, "sequence_end": n == 3}) for n in (1, 2, 3)], ()),
    ]
}  # fmt: skip

GRPC_CASES: dict[str, Call] = {**CALLS, **{f"stream: {name}": call for name, call in STREAMS.items()}}
