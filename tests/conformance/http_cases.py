"""HTTP requests to send to both servers, by name, grouped by the section of the protocol that they test.

No request affects later ones; the settings changed at the end are restored.
"""

# ruff: noqa: E501  (one case a line)
from __future__ import annotations

import gzip
import json
import struct
import zlib
from typing import Any

from tests.conformance.raw import Request, binary_body, pack_strings, tensor

ONES = [1] * 16
ADD_SUB = [tensor("INPUT0", "INT32", list(range(16))), tensor("INPUT1", "INT32", ONES)]
FP32 = struct.pack("<3f", 0.1, -2.5, 1e30)


def get(path: str, **headers: str) -> Request:
    return Request("GET", path, headers=headers)


def post(path: str, body: Any = b"", **headers: str) -> Request:
    return Request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})


def infer(model: str, inputs: Any, *, version: str = "", headers: dict[str, str] | None = None, **more: Any) -> Request:
    """Return a JSON inference request; ``more`` are additional members of the body."""
    return Request("POST", f"/v2/models/{model}{version}/infer", {"inputs": inputs, **more}, headers or {})


def text(*values: str) -> list[Any]:
    return [tensor("TEXT", "BYTES", values, [len(values), 1])]


def binary(model: str, header: Any, *blobs: bytes, **headers: str) -> Request:
    body, framing = binary_body(header, *blobs)
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request("POST", f"/v2/models/{model}/infer", body, {**framing, **more})


def floats(**more: Any) -> list[Any]:
    return [{"name": "INPUT", "shape": [3], "datatype": "FP32", "parameters": {"binary_data_size": 12}, **more}]


def typed(datatype: str, data: list[Any], shape: list[int] | None = None) -> Request:
    return infer("types", [tensor(f"IN_{datatype}", datatype, data, shape)])


def generate(model: str, body: Any, endpoint: str = "generate", **headers: str) -> Request:
    return Request("POST", f"/v2/models/{model}/{endpoint}", body, headers)


def echo(**more: Any) -> Request:
    return infer("echo_request", [tensor("INPUT", "BYTES", ["x"])], outputs=[{"name": "REQUEST"}], **more)


ROUTING = {
    "root": get("/"),
    "v2": get("/v2"),
    "v2 with slash": get("/v2/"),
    "v2 by post": post("/v2"),
    "v1": get("/v1"),
    "double slash": get("//v2"),
    "query string": get("/v2?a=b"),
    "infer query string": post("/v2/models/add_sub/infer?x=1", {"inputs": ADD_SUB}),
    "encoded path": get("/v2/models/add%5Fsub"),
    "live": get("/v2/health/live"),
    "ready": get("/v2/health/ready"),
    "live by post": post("/v2/health/live"),
    "live with slash": get("/v2/health/live/"),
    "health": get("/v2/health"),
    "unknown endpoint": get("/v2/models/add_sub/nothing"),
    "put": Request("PUT", "/v2/health/live", b""),
    "delete": Request("DELETE", "/v2/models/add_sub"),
    "head": Request("HEAD", "/v2/health/live"),
    "options": Request("OPTIONS", "/v2/health/live"),
    "infer by get": get("/v2/models/add_sub/infer"),
    "generate by get": get("/v2/models/generate/generate"),
    "index by get": get("/v2/repository/index"),
    "load by get": get("/v2/repository/models/add_sub/load"),
    "models": get("/v2/models"),
    "metrics on the http port": get("/metrics"),
    "very long path": get("/v2/models/" + "m" * 3000),
}

METADATA = {
    "model ready": get("/v2/models/add_sub/ready"),
    "model version ready": get("/v2/models/add_sub/versions/1/ready"),
    "model version not ready": get("/v2/models/add_sub/versions/7/ready"),
    "unknown model ready": get("/v2/models/absent/ready"),
    "model ready by post": post("/v2/models/add_sub/ready"),
    "metadata": get("/v2/models/add_sub"),
    "metadata with slash": get("/v2/models/add_sub/"),
    "metadata of a version": get("/v2/models/version_all/versions/2"),
    "metadata of all versions": get("/v2/models/version_all"),
    "metadata of the latest": get("/v2/models/version_latest"),
    "metadata of two versions": get("/v2/models/version_two"),
    "metadata of some versions": get("/v2/models/version_some"),
    "metadata of a version out of policy": get("/v2/models/version_some/versions/2"),
    "metadata of version 0": get("/v2/models/add_sub/versions/0"),
    "metadata of a text version": get("/v2/models/add_sub/versions/one"),
    "metadata of a negative version": get("/v2/models/add_sub/versions/-1"),
    "metadata of a huge version": get("/v2/models/add_sub/versions/99999999999999999999"),
    "metadata of a big version": get("/v2/models/add_sub/versions/9223372036854775807"),
    "metadata of no version": get("/v2/models/add_sub/versions/"),
    "metadata with leading zero": get("/v2/models/add_sub/versions/01"),
    "metadata of a batching model": get("/v2/models/identity_batched"),
    "metadata of every datatype": get("/v2/models/types"),
    "metadata of reshape": get("/v2/models/reshape"),
    "metadata of an ensemble": get("/v2/models/diamond"),
    "metadata of a decoupled ensemble": get("/v2/models/repeated"),
    "metadata of a completed model": get("/v2/models/auto_complete"),
    "metadata of an unknown model": get("/v2/models/absent"),
    "config of an unknown model": get("/v2/models/absent/config"),
    "config of an unknown version": get("/v2/models/add_sub/versions/5/config"),
    "stats of an unknown model": get("/v2/models/absent/stats"),
    "stats of an unknown version": get("/v2/models/add_sub/versions/5/stats"),
    "config by post": post("/v2/models/add_sub/config"),
    "stats by post": post("/v2/models/stats"),
}

CONFIGS = {
    f"config of {model}": get(f"/v2/models/{model}/config")
    for model in [
        "add_sub",
        "accumulate",
        "accumulate_state",
        "auto_complete",
        "classify",
        "diamond",
        "gate_bounded",
        "generate_shapes",
        "instances",
        "no_config",
        "optional",
        "repeated",
        "reshape",
        "types",
        "version_all",
        "version_some",
        "version_two",
        "echo_chain",
    ]
}

INFER = {
    "infer": infer("add_sub", ADD_SUB),
    "infer of a version": infer("version_all", [tensor("INPUT", "BYTES", ["x"])], version="/versions/99"),
    "infer with id": infer("add_sub", ADD_SUB, id="my id"),
    "infer with empty id": infer("add_sub", ADD_SUB, id=""),
    "infer with number as id": infer("add_sub", ADD_SUB, id=7),
    "infer with null id": infer("add_sub", ADD_SUB, id=None),
    "one output": infer("add_sub", ADD_SUB, outputs=[{"name": "OUTPUT1"}]),
    "outputs in another order": infer("add_sub", ADD_SUB, outputs=[{"name": "OUTPUT1"}, {"name": "OUTPUT0"}]),
    "no outputs": infer("add_sub", ADD_SUB, outputs=[]),
    "outputs null": infer("add_sub", ADD_SUB, outputs=None),
    "outputs not an array": infer("add_sub", ADD_SUB, outputs={"name": "OUTPUT0"}),
    "unknown output": infer("add_sub", ADD_SUB, outputs=[{"name": "OUTPUT9"}]),
    "output without name": infer("add_sub", ADD_SUB, outputs=[{}]),
    "output twice": infer("add_sub", ADD_SUB, outputs=[{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]),
    "inputs in another order": infer("add_sub", ADD_SUB[::-1]),
    "unknown model": infer("absent", ADD_SUB),
    "unknown version": infer("add_sub", ADD_SUB, version="/versions/8"),
    "empty body": post("/v2/models/add_sub/infer"),
    "body is no json": post("/v2/models/add_sub/infer", b"nonsense"),
    "body is half a json": post("/v2/models/add_sub/infer", b'{"inputs": ['),
    "json misses a comma": post("/v2/models/add_sub/infer", b'{"a": 1 "b": 2}'),
    "json and more": post("/v2/models/add_sub/infer", json.dumps({"inputs": ADD_SUB}).encode() + b" trailing"),
    "body is an array": post("/v2/models/add_sub/infer", b"[]"),
    "body is a string": post("/v2/models/add_sub/infer", b'"inputs"'),
    "body is null": post("/v2/models/add_sub/infer", b"null"),
    "no inputs member": post("/v2/models/add_sub/infer", b"{}"),
    "inputs empty": infer("add_sub", []),
    "inputs null": infer("add_sub", None),
    "inputs an object": infer("add_sub", {"a": 1}),
    "input is no object": infer("add_sub", [1]),
    "input without name": infer("add_sub", [{"shape": [16], "datatype": "INT32", "data": ONES}]),
    "input name is a number": infer("add_sub", [{"name": 1, "shape": [16], "datatype": "INT32", "data": ONES}]),
    "input without datatype": infer("add_sub", [{"name": "INPUT0", "shape": [16], "data": ONES}]),
    "input without shape": infer("add_sub", [{"name": "INPUT0", "datatype": "INT32", "data": ONES}]),
    "input without data": infer("add_sub", [{"name": "INPUT0", "shape": [16], "datatype": "INT32"}]),
    "shape is no array": infer("add_sub", [tensor("INPUT0", "INT32", ONES) | {"shape": 16}, ADD_SUB[1]]),
    "shape negative": infer("add_sub", [tensor("INPUT0", "INT32", ONES, [-1]), ADD_SUB[1]]),
    "shape fractional": infer("add_sub", [tensor("INPUT0", "INT32", ONES) | {"shape": [16.5]}, ADD_SUB[1]]),
    "shape of strings": infer("add_sub", [tensor("INPUT0", "INT32", ONES) | {"shape": ["16"]}, ADD_SUB[1]]),
    "shape empty": infer("add_sub", [tensor("INPUT0", "INT32", [1]) | {"shape": []}, ADD_SUB[1]]),
    "shape zero": infer("identity_fp32", [tensor("INPUT", "FP32", [], [0])]),
    "shape zero with data": infer("identity_fp32", [tensor("INPUT", "FP32", [1.5], [0])]),
    "shape overflows": infer("identity_fp32", [tensor("INPUT", "FP32", [1.0], [2**40, 2**40])]),
    "shape too large": infer("identity_fp32", [tensor("INPUT", "FP32", [1.0], [2**62])]),
    "wrong shape": infer("add_sub", [tensor("INPUT0", "INT32", [1] * 8), ADD_SUB[1]]),
    "wrong rank": infer("add_sub", [tensor("INPUT0", "INT32", ONES, [1, 16]), ADD_SUB[1]]),
    "wrong datatype": infer("add_sub", [tensor("INPUT0", "FP32", ONES), ADD_SUB[1]]),
    "unknown datatype": infer("add_sub", [tensor("INPUT0", "INT31", ONES), ADD_SUB[1]]),
    "lower-case datatype": infer("add_sub", [tensor("INPUT0", "int32", ONES), ADD_SUB[1]]),
    "config's datatype name": infer("add_sub", [tensor("INPUT0", "TYPE_INT32", ONES), ADD_SUB[1]]),
    "one input missing": infer("add_sub", ADD_SUB[:1]),
    "one input missing with id": infer("add_sub", ADD_SUB[:1], id="abc"),
    "one input too many": infer("add_sub", [*ADD_SUB, tensor("INPUT2", "INT32", ONES)]),
    "unknown input": infer("add_sub", [ADD_SUB[0], tensor("OTHER", "INT32", ONES)]),
    "input twice": infer("add_sub", [ADD_SUB[0], ADD_SUB[0]]),
    "too few elements": infer("add_sub", [tensor("INPUT0", "INT32", [1] * 15, [16]), ADD_SUB[1]]),
    "too many elements": infer("add_sub", [tensor("INPUT0", "INT32", [1] * 17, [16]), ADD_SUB[1]]),
    "nested data": infer("add_sub", [tensor("INPUT0", "INT32", [[1] * 8, [2] * 8], [16]), ADD_SUB[1]]),
    "data unevenly nested": infer("add_sub", [tensor("INPUT0", "INT32", [[1], [[2] * 14], 3], [16]), ADD_SUB[1]]),
    "data is no array": infer("add_sub", [tensor("INPUT0", "INT32", ONES) | {"data": 5}, ADD_SUB[1]]),
    "data of strings for int": infer("add_sub", [tensor("INPUT0", "INT32", ["1"] * 16), ADD_SUB[1]]),
    "data of floats for int": infer("add_sub", [tensor("INPUT0", "INT32", [1.5] * 16), ADD_SUB[1]]),
    "data of nulls": infer("add_sub", [tensor("INPUT0", "INT32", [None] * 16), ADD_SUB[1]]),
    "data of bools for int": infer("add_sub", [tensor("INPUT0", "INT32", [True] * 16), ADD_SUB[1]]),
    "extra members": infer("add_sub", [ADD_SUB[0] | {"extra": 1}, ADD_SUB[1]], other={"a": [1]}),
    "member inputs twice": post("/v2/models/add_sub/infer", b'{"inputs":[],"inputs":[]}'),
    "input parameters no object": infer("add_sub", [ADD_SUB[0] | {"parameters": 5}, ADD_SUB[1]]),
    "input unknown parameter": infer("add_sub", [ADD_SUB[0] | {"parameters": {"any": [1]}}, ADD_SUB[1]]),
    "infer of a decoupled model": infer("repeat", [tensor("IN", "INT32", [1])]),
    "batch of two": infer("identity_batched", [tensor("INPUT", "FP32", [1, 2, 3, 4], [2, 2])]),
    "batch too large": infer("identity_batched", [tensor("INPUT", "FP32", [1] * 9, [9, 1])]),
    "batch of zero": infer("identity_batched", [tensor("INPUT", "FP32", [], [0, 1])]),
    "batch dimension missing": infer("add_sub_fp32", [tensor("INPUT0", "FP32", ONES), tensor("INPUT1", "FP32", ONES)]),
    "batches differ": infer(
        "add_sub_fp32", [tensor("INPUT0", "FP32", ONES, [1, 16]), tensor("INPUT1", "FP32", ONES * 2, [2, 16])]
    ),
    "wrong shape with batch": infer(
        "add_sub_fp32", [tensor("INPUT0", "FP32", [1] * 8, [1, 8]), tensor("INPUT1", "FP32", ONES, [1, 16])]
    ),
    "no shape with batch": infer("identity_batched", [tensor("INPUT", "FP32", [1]) | {"shape": []}]),
    "ragged": infer("ragged", [tensor("X", "FP32", [1, 2, 3], [1, 3])]),
    "optional given": infer("optional", [tensor("A", "FP32", [1], [1, 1]), tensor("C", "FP32", [1], [1, 1])]),
    "optional absent": infer("optional", [tensor("A", "FP32", [1], [1, 1])]),
    "required absent": infer("optional", [tensor("B", "FP32", [1], [1, 1])]),
    "nothing given with optionals": infer("optional", []),
    "too many with optionals": infer("optional", [tensor(n, "FP32", [1], [1, 1]) for n in "ABCD"]),
    "reshaped": infer("reshape", [tensor("SCALAR", "FP32", [1], [1, 1]), tensor("MATRIX", "FP32", ONES[:12], [1, 4, 3])]),
    "wrong correlation type": infer("accumulate", [tensor("INPUT", "INT32", [1], [1, 1])], parameters={"sequence_id": "text", "sequence_start": True}),
    "sequence without id": infer("accumulate", [tensor("INPUT", "INT32", [1], [1, 1])]),
    "sequence without start": infer("accumulate", [tensor("INPUT", "INT32", [1], [1, 1])], parameters={"sequence_id": 99}),
    "sequence batch of two": infer("accumulate", [tensor("INPUT", "INT32", [1, 2], [2, 1])], parameters={"sequence_id": 98, "sequence_start": True}),
    "sequence of one": infer("accumulate", [tensor("INPUT", "INT32", [4], [1, 1])], parameters={"sequence_id": 97, "sequence_start": True, "sequence_end": True}),
    "implicit state": infer("accumulate_state", [tensor("INPUT", "INT32", [4], [1, 1])], parameters={"sequence_id": 97, "sequence_start": True, "sequence_end": True}),
}  # fmt: skip

DATATYPES = {
    "bool": typed("BOOL", [True, False]),
    "bool from int": typed("BOOL", [1, 0]),
    "uint8": typed("UINT8", [0, 255]),
    "uint8 out of range": typed("UINT8", [256, 511]),
    "uint8 negative": typed("UINT8", [-1]),
    "uint16": typed("UINT16", [0, 65535]),
    "uint32": typed("UINT32", [0, 2**32 - 1]),
    "uint64": typed("UINT64", [0, 2**64 - 1]),
    "uint64 out of range": typed("UINT64", [2**64]),
    "int8": typed("INT8", [-128, 127]),
    "int8 out of range": typed("INT8", [128]),
    "int16": typed("INT16", [-32768, 32767]),
    "int32": typed("INT32", [-(2**31), 2**31 - 1]),
    "int32 out of range": typed("INT32", [2**31]),
    "int64": typed("INT64", [-(2**63), 2**63 - 1]),
    "int64 out of range": typed("INT64", [2**63]),
    "int of float value": typed("INT64", [1.0]),
    "fp16": typed("FP16", [1.0]),
    "bf16": typed("BF16", [1.0]),
    "fp32": typed("FP32", [0.1, 1, -2.5e-10, 3.4e38, 16777217]),
    "fp32 out of range": typed("FP32", [1e300]),
    "fp32 not finite": typed("FP32", [float("nan"), float("inf"), float("-inf")]),
    "fp32 from string": typed("FP32", ["1.5"]),
    "fp32 from bool": typed("FP32", [True]),
    "fp64": typed("FP64", [0.1, 1e300, -5]),
    "bytes": typed("BYTES", ["", "text", "ä€😀", 'quote " and \\ and \n']),
    "bytes with nul": typed("BYTES", ["a\u0000b"]),
    "bytes from int": typed("BYTES", [1]),
    "bytes from null": typed("BYTES", [None]),
    "bytes with control characters": typed("BYTES", ["\u0001\u001f\u007f"]),
    "bytes matrix": infer("types", [tensor("IN_BYTES", "BYTES", [["a", "b"]], [2])]),
    "several types": infer("types", [tensor("IN_INT8", "INT8", [1]), tensor("IN_FP64", "FP64", [2.5])]),
    "add strings": infer("add_strings", [tensor(n, "BYTES", ["3"] * 16) for n in ("INPUT0", "INPUT1")]),
}

BINARY = {
    "binary in": binary("identity_fp32", {"inputs": floats()}, FP32),
    "binary in and out": binary("identity_fp32", {"inputs": floats(), "parameters": {"binary_data_output": True}}, FP32),
    "binary output named": binary("identity_fp32", {"inputs": floats(), "outputs": [{"name": "OUTPUT", "parameters": {"binary_data": True}}]}, FP32),
    "binary output of json input": infer("add_sub", ADD_SUB, parameters={"binary_data_output": True}),
    "one output binary": infer("add_sub", ADD_SUB, outputs=[{"name": "OUTPUT0"}, {"name": "OUTPUT1", "parameters": {"binary_data": True}}]),
    "default overridden": infer("add_sub", ADD_SUB, parameters={"binary_data_output": True}, outputs=[{"name": "OUTPUT0"}, {"name": "OUTPUT1", "parameters": {"binary_data": False}}]),
    "default with empty parameters": infer("add_sub", ADD_SUB, parameters={"binary_data_output": True}, outputs=[{"name": "OUTPUT0", "parameters": {}}]),
    "default with outputs named": infer("add_sub", ADD_SUB, parameters={"binary_data_output": True}, outputs=[{"name": "OUTPUT0"}]),
    "binary data is no bool": infer("add_sub", ADD_SUB, outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": 1}}]),
    "binary data output is no bool": infer("add_sub", ADD_SUB, parameters={"binary_data_output": "yes"}),
    "binary empty output": binary("identity_fp32", {"inputs": [{"name": "INPUT", "shape": [0], "datatype": "FP32", "parameters": {"binary_data_size": 0}}], "parameters": {"binary_data_output": True}}),
    "binary empty input without header": infer("identity_fp32", [{"name": "INPUT", "shape": [0], "datatype": "FP32", "parameters": {"binary_data_size": 0}}]),
    "binary strings": binary("string_pair", {"inputs": [{"name": "INPUT", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 13}}], "parameters": {"binary_data_output": True}}, pack_strings(b"\xff\x00", b"abc")),
    "binary strings to json": binary("string_pair", {"inputs": [{"name": "INPUT", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 13}}]}, pack_strings(b"ab", b"abc")),
    "binary fp16 to json": binary("types", {"inputs": [{"name": "IN_FP16", "shape": [2], "datatype": "FP16", "parameters": {"binary_data_size": 4}}]}, b"\0\x3c\0\x40"),
    "binary fp16": binary("types", {"inputs": [{"name": "IN_FP16", "shape": [2], "datatype": "FP16", "parameters": {"binary_data_size": 4}}], "parameters": {"binary_data_output": True}}, b"\0\x3c\0\x40"),
    "binary bf16": binary("types", {"inputs": [{"name": "IN_BF16", "shape": [2], "datatype": "BF16", "parameters": {"binary_data_size": 4}}], "parameters": {"binary_data_output": True}}, b"\x80\x3f\0\x40"),
    "binary bf16 to json": binary("types", {"inputs": [{"name": "IN_BF16", "shape": [2], "datatype": "BF16", "parameters": {"binary_data_size": 4}}]}, b"\x80\x3f\0\x40"),
    "binary string cut in its length": binary("string_pair", {"inputs": [{"name": "INPUT", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 8}}]}, pack_strings(b"ab") + b"\1\0"),
    "binary string cut": binary("string_pair", {"inputs": [{"name": "INPUT", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 12}}]}, pack_strings(b"ab") + b"\7\0\0\0ab"),
    "binary too few strings": binary("string_pair", {"inputs": [{"name": "INPUT", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 6}}]}, pack_strings(b"ab")),
    "binary too many strings": binary("string_pair", {"inputs": [{"name": "INPUT", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 15}}]}, pack_strings(b"a", b"b", b"c")),
    "binary size mismatch": binary("identity_fp32", {"inputs": [{"name": "INPUT", "shape": [4], "datatype": "FP32", "parameters": {"binary_data_size": 12}}]}, FP32),
    "binary body short": binary("identity_fp32", {"inputs": floats()}, FP32[:8]),
    "binary body long": binary("identity_fp32", {"inputs": floats()}, FP32 + b"more"),
    "binary without header": infer("identity_fp32", floats()),
    "binary and data": binary("identity_fp32", {"inputs": floats(data=[1, 2, 3])}, FP32),
    "binary size negative": binary("identity_fp32", {"inputs": [{"name": "INPUT", "shape": [3], "datatype": "FP32", "parameters": {"binary_data_size": -1}}]}, FP32),
    "binary size a string": binary("identity_fp32", {"inputs": [{"name": "INPUT", "shape": [3], "datatype": "FP32", "parameters": {"binary_data_size": "12"}}]}, FP32),
    "header length zero of two inputs": post("/v2/models/add_sub/infer", bytes(64), Inference_Header_Content_Length="0"),
    "header length not a number": post("/v2/models/add_sub/infer", {"inputs": ADD_SUB}, Inference_Header_Content_Length="abc"),
    "header length negative": post("/v2/models/add_sub/infer", {"inputs": ADD_SUB}, Inference_Header_Content_Length="-5"),
    "header length beyond body": post("/v2/models/add_sub/infer", {"inputs": ADD_SUB}, Inference_Header_Content_Length="100000"),
    "header length beyond any int": post("/v2/models/add_sub/infer", {"inputs": ADD_SUB}, Inference_Header_Content_Length="99999999999"),
    "header length empty": post("/v2/models/add_sub/infer", {"inputs": ADD_SUB}, Inference_Header_Content_Length=""),
    "header length lower case": post("/v2/models/add_sub/infer", json.dumps({"inputs": ADD_SUB}).encode(), **{"inference-header-content-length": str(len(json.dumps({"inputs": ADD_SUB})))}),
    "raw": post("/v2/models/identity_fp32/infer", FP32, Inference_Header_Content_Length="0"),
    "raw with version": post("/v2/models/identity_fp32/versions/1/infer", FP32, Inference_Header_Content_Length="0"),
    "raw empty": post("/v2/models/identity_fp32/infer", b"", Inference_Header_Content_Length="0"),
    "raw odd size": post("/v2/models/identity_fp32/infer", b"abcde", Inference_Header_Content_Length="0"),
    "raw string": post("/v2/models/identity_string/infer", b"some text", Inference_Header_Content_Length="0"),
    "raw batching": post("/v2/models/identity_batched/infer", FP32, Inference_Header_Content_Length="0"),
    "raw two variable dimensions": post("/v2/models/two_variable/infer", FP32, Inference_Header_Content_Length="0"),
    "raw strings of two": post("/v2/models/string_pair/infer", b"some text", Inference_Header_Content_Length="0"),
    "raw classification labels": post("/v2/models/classify/infer", struct.pack("<4f", 1, 2, 3, 4), Inference_Header_Content_Length="0"),
}  # fmt: skip

PARAMETERS = {
    "parameters": echo(parameters={"text": "x", "int": 5, "negative": -5, "bool": True, "double": 0.5}),
    "parameter null": echo(parameters={"a": None}),
    "parameter array": echo(parameters={"a": [1]}),
    "parameter object": echo(parameters={"a": {}}),
    "parameter huge integer": echo(parameters={"a": 2**63}),
    "parameter reserved": echo(parameters={"triton_x": 1}),
    "parameters no object": echo(parameters=[1]),
    "parameters null": echo(parameters=None),
    "parameters empty": echo(parameters={}),
    "sequence id": echo(parameters={"sequence_id": 42, "sequence_start": True, "sequence_end": False}),
    "sequence id text": echo(parameters={"sequence_id": "abc", "sequence_end": True}),
    "sequence id negative": echo(parameters={"sequence_id": -1}),
    "sequence id bool": echo(parameters={"sequence_id": True}),
    "sequence start number": echo(parameters={"sequence_start": 1}),
    "sequence end number": echo(parameters={"sequence_end": 1}),
    "priority and timeout": echo(parameters={"priority": 3, "timeout": 1000000}),
    "priority text": echo(parameters={"priority": "1"}),
    "priority negative": echo(parameters={"priority": -1}),
    "timeout text": echo(parameters={"timeout": "1"}),
    "timeout negative": echo(parameters={"timeout": -1}),
    "id seen by the model": echo(id="the id"),
    "all outputs seen by the model": infer("echo_request", [tensor("INPUT", "BYTES", ["x"])]),
    "header as parameter": echo(parameters={"headers": 1}),
}

CLASSIFICATION = {
    "classes": infer("classify", [tensor("INPUT", "FP32", [0.1, 0.4, 0.3, 0.2], [1, 4])], outputs=[{"name": "OUTPUT", "parameters": {"classification": 2}}]),
    "classes more than there are": infer("classify", [tensor("INPUT", "FP32", [1, 2, 3, 4], [1, 4])], outputs=[{"name": "OUTPUT", "parameters": {"classification": 9}}]),
    "classes of a batch": infer("classify", [tensor("INPUT", "FP32", [1, 2, 3, 4, 4, 3, 2, 1], [2, 4])], outputs=[{"name": "OUTPUT", "parameters": {"classification": 1}}]),
    "classes of zero": infer("classify", [tensor("INPUT", "FP32", [1, 2, 3, 4], [1, 4])], outputs=[{"name": "OUTPUT", "parameters": {"classification": 0}}]),
    "classes negative": infer("classify", [tensor("INPUT", "FP32", [1, 2, 3, 4], [1, 4])], outputs=[{"name": "OUTPUT", "parameters": {"classification": -1}}]),
    "classes text": infer("classify", [tensor("INPUT", "FP32", [1, 2, 3, 4], [1, 4])], outputs=[{"name": "OUTPUT", "parameters": {"classification": "1"}}]),
    "classes of integers": infer("add_sub", ADD_SUB, outputs=[{"name": "OUTPUT0", "parameters": {"classification": 3}}]),
    "classes with ties": infer("add_sub", ADD_SUB[1:] + [tensor("INPUT0", "INT32", ONES)], outputs=[{"name": "OUTPUT0", "parameters": {"classification": 3}}]),
    "classes as binary": infer("add_sub", ADD_SUB, outputs=[{"name": "OUTPUT0", "parameters": {"classification": 1, "binary_data": True}}]),
    "classes of strings": infer("identity_string", text("a"), outputs=[{"name": "OUTPUT", "parameters": {"classification": 1}}]),
    "classes of bools": infer("types", [tensor("IN_BOOL", "BOOL", [True])], outputs=[{"name": "OUT_BOOL", "parameters": {"classification": 1}}]),
    "classes of doubles": infer("types", [tensor("IN_FP64", "FP64", [1e10, 0.1234567, -3])], outputs=[{"name": "OUT_FP64", "parameters": {"classification": 3}}]),
    "classes of an ensemble": infer("labelled", [tensor("IN", "FP32", [1, 2, 3, 4], [1, 4])], outputs=[{"name": "OUT", "parameters": {"classification": 2}}]),
    "classes and shared memory": infer("classify", [tensor("INPUT", "FP32", [1, 2, 3, 4], [1, 4])], outputs=[{"name": "OUTPUT", "parameters": {"classification": 2, "shared_memory_region": "r", "shared_memory_byte_size": 4}}]),
    "binary and shared memory": infer("classify", [tensor("INPUT", "FP32", [1, 2, 3, 4], [1, 4])], outputs=[{"name": "OUTPUT", "parameters": {"binary_data": True, "shared_memory_region": "r", "shared_memory_byte_size": 4}}]),
    "shared memory unknown": infer("classify", [{"name": "INPUT", "datatype": "FP32", "shape": [1, 4], "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}}]),
    "shared memory and data": infer("classify", [tensor("INPUT", "FP32", [1, 2, 3, 4], [1, 4], parameters={"shared_memory_region": "r", "shared_memory_byte_size": 16})]),
    "shared memory output unknown": infer("classify", [tensor("INPUT", "FP32", [1, 2, 3, 4], [1, 4])], outputs=[{"name": "OUTPUT", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 4}}]),
}  # fmt: skip

PLAIN = json.dumps({"inputs": ADD_SUB}).encode()
COMPRESSION = {
    "gzip in": post("/v2/models/add_sub/infer", gzip.compress(PLAIN), Content_Encoding="gzip"),
    "deflate in": post("/v2/models/add_sub/infer", zlib.compress(PLAIN), Content_Encoding="deflate"),
    "gzip of nonsense": post("/v2/models/add_sub/infer", b"this is not gzip", Content_Encoding="gzip"),
    "deflate of nonsense": post("/v2/models/add_sub/infer", b"this is not deflate", Content_Encoding="deflate"),
    "gzip cut": post("/v2/models/add_sub/infer", gzip.compress(PLAIN)[:-12], Content_Encoding="gzip"),
    "brotli in": post("/v2/models/add_sub/infer", PLAIN, Content_Encoding="br"),
    "identity in": post("/v2/models/add_sub/infer", PLAIN, Content_Encoding="identity"),
    "gzip out": post("/v2/models/add_sub/infer", PLAIN, Accept_Encoding="gzip"),
    "deflate out": post("/v2/models/add_sub/infer", PLAIN, Accept_Encoding="deflate"),
    "gzip before deflate": post("/v2/models/add_sub/infer", PLAIN, Accept_Encoding="gzip, deflate"),
    "weights": post("/v2/models/add_sub/infer", PLAIN, Accept_Encoding="gzip;q=0.2, deflate;q=0.8"),
    "weight zero": post("/v2/models/add_sub/infer", PLAIN, Accept_Encoding="gzip;q=0"),
    "any encoding": post("/v2/models/add_sub/infer", PLAIN, Accept_Encoding="*"),
    "unknown encoding out": post("/v2/models/add_sub/infer", PLAIN, Accept_Encoding="br"),
    "identity first": post("/v2/models/add_sub/infer", PLAIN, Accept_Encoding="identity, gzip"),
    "gzip error out": post("/v2/models/add_sub/infer", b"{}", Accept_Encoding="gzip"),
    "gzip both ways, binary": binary("identity_fp32", {"inputs": floats(), "parameters": {"binary_data_output": True}}, FP32, Accept_Encoding="gzip"),
    "metadata compressed": get("/v2/models/add_sub", **{"Accept-Encoding": "gzip"}),
}  # fmt: skip

FAULTS = {
    f"fault {mode}": infer("faults", [tensor("MODE", "BYTES", [mode], [1, 1])])
    for mode in [
        "ok",
        "default",
        "UNKNOWN",
        "INTERNAL",
        "NOT_FOUND",
        "INVALID_ARG",
        "UNAVAILABLE",
        "UNSUPPORTED",
        "ALREADY_EXISTS",
        "CANCELLED",
        "with_outputs",
        "raise",
        "raise_triton",
        "not_list",
        "not_response",
        "too_few",
        "too_many",
        "nothing",
        "reschedule",
        "reschedule and more",
        "undeclared",
        "no_outputs",
    ]
} | {
    f"sender {mode}": infer("sender", [tensor("MODE", "BYTES", [mode])])
    for mode in [
        "returned",
        "direct",
        "thread",
        "late_final",
        "bad_flag",
        "no_response",
        "final_first",
        "error",
        "twice",
        "closed",
    ]
}

ENSEMBLES = {
    "ensemble": infer("chain", [tensor("X", "FP32", [1, 2], [1, 2])]),
    "ensemble with id": infer("chain", [tensor("X", "FP32", [1, 2], [1, 2])], id="e"),
    "ensemble batch": infer("diamond", [tensor("X", "FP32", [1, 2], [2, 1])]),
    "ensemble one output": infer("diamond", [tensor("X", "FP32", [1, 2], [2, 1])], outputs=[{"name": "P"}]),
    "ensemble mixed": infer("mixed", [tensor("X", "FP32", [1, 2])]),
    "ensemble optional given": infer("optional_chain", [tensor(n, "FP32", [1], [1, 1]) for n in "XB"]),
    "ensemble optional absent": infer("optional_chain", [tensor("X", "FP32", [1], [1, 1])]),
    "ensemble member fails": infer("failing", [tensor("MODE", "BYTES", ["NOT_FOUND"], [1, 1])]),
    "ensemble member raises": infer("failing", [tensor("MODE", "BYTES", ["raise"], [1, 1])], id="e"),
    "ensemble member succeeds": infer("failing", [tensor("MODE", "BYTES", ["ok"], [1, 1])]),
    "ensemble member gives nothing": infer("failing", [tensor("MODE", "BYTES", ["no_outputs"], [1, 1])]),
    "ensemble missing input": infer("chain", []),
    "ensemble wrong datatype": infer("chain", [tensor("X", "INT32", [1, 2], [1, 2])]),
    "ensemble wrong batch": infer("chain", [tensor("X", "FP32", [1] * 9, [9, 1])]),
    "ensemble unknown output": infer("chain", [tensor("X", "FP32", [1, 2], [1, 2])], outputs=[{"name": "middle"}]),
    "ensemble decoupled": infer("repeated", [tensor("IN", "INT32", [1])]),
    "ensemble passes parameters": infer("echo_chain", [tensor("IN", "BYTES", ["x"])], id="e", parameters={"a": 1, "sequence_id": 5, "timeout": 9000000}),
}  # fmt: skip

GENERATE = {
    "generate": generate("generate", {"PROMPT": "hello"}),
    "generate with id": generate("generate", {"PROMPT": "hello", "id": "g"}),
    "generate with parameter": generate("generate", {"PROMPT": "hello", "times": 1, "other": "x"}),
    "generate nested parameters": generate("generate", {"PROMPT": "hello", "parameters": {"times": 1}}),
    "generate by a version": Request("POST", "/v2/models/generate/versions/1/generate", {"PROMPT": "hello"}),
    "generate unknown version": Request("POST", "/v2/models/generate/versions/2/generate", {"PROMPT": "hello"}),
    "generate of an unknown model": generate("absent", {"PROMPT": "hello"}),
    "generate two responses": generate("generate", {"PROMPT": "hello", "times": 2}),
    "generate no response": generate("generate", {"PROMPT": "hello", "times": 0}),
    "generate fails": generate("generate", {"PROMPT": "hello", "fail_at": 0}),
    "generate string list": generate("generate", {"PROMPT": ["a", "b"]}),
    "generate number for string": generate("generate", {"PROMPT": 5}),
    "generate null for string": generate("generate", {"PROMPT": None}),
    "generate object for string": generate("generate", {"PROMPT": {"a": 1}}),
    "generate missing input": generate("generate", {"text": "hello"}),
    "generate bool input": generate("generate", {"PROMPT": "x", "STREAM": True}),
    "generate bool input wrong": generate("generate", {"PROMPT": "x", "STREAM": "yes"}),
    "generate empty body": generate("generate", b""),
    "generate no json": generate("generate", b"nonsense"),
    "generate array body": generate("generate", [1]),
    "generate parameter list": generate("generate", {"PROMPT": "x", "times": [1]}),
    "generate parameter null": generate("generate", {"PROMPT": "x", "times": None}),
    "generate parameters no object": generate("generate", {"PROMPT": "x", "parameters": 5}),
    "generate nested bad parameter": generate("generate", {"PROMPT": "x", "parameters": {"a": [1]}}),
    "generate input in parameters": generate("generate", {"parameters": {"PROMPT": "nested"}}),
    "generate input twice": generate("generate", {"PROMPT": "x", "parameters": {"PROMPT": "y"}}),
    "generate key twice": generate("generate", b'{"PROMPT": "x", "PROMPT": "y"}'),
    "generate key twice with id": generate("generate", b'{"id": "q", "PROMPT": "x", "PROMPT": "y"}'),
    "generate parameter twice": generate("generate", b'{"PROMPT": "x", "other": 1, "other": 2}'),
    "generate key twice, once in an object": generate("generate", b'{"PROMPT": "x", "parameters": {"PROMPT": "y"}}'),
    "generate deeper parameters": generate("generate", {"PROMPT": "x", "parameters": {"parameters": {"times": 1}}}),
    "generate id number": generate("generate", {"PROMPT": "x", "id": 5}),
    "generate keyword is an input": generate("generate_keyword", {"parameters": "x"}),
    "generate keyword is an object": generate("generate_keyword", {"parameters": {"x": 1}}),
    "generate non-decoupled": generate("generate_shapes", {"A": 1}),
    "generate shapes": generate("generate_shapes", {"A": 1, "B": [1, 2, 3, 4], "C": ["a", "b"], "E": [True, False]}),
    "generate shape not divisible": generate("generate_shapes", {"A": 1, "B": [1, 2, 3]}),
    "generate shape too many": generate("generate_shapes", {"A": [1, 2]}),
    "generate shape nested": generate("generate_shapes", {"A": 1, "B": [[1, 2], [3, 4]]}),
    "generate fp16": generate("generate_shapes", {"A": 1, "D": 1.0}),
    "generate empty array": generate("generate_shapes", {"A": 1, "E": []}),
    "generate float for int": generate("generate_shapes", {"A": 1.5}),
    "generate of an ensemble": generate("chain", {"X": [1, 2]}),
    "generate faults": generate("faults", {"MODE": "UNSUPPORTED"}),
    "generate compressed": generate("generate", gzip.compress(b'{"PROMPT": "x"}'), **{"Content-Encoding": "gzip"}),
    "generate accepts gzip": generate("generate", {"PROMPT": "x"}, **{"Accept-Encoding": "gzip"}),
    "generate reserved parameter": generate("generate", {"PROMPT": "x", "triton_a": 1}),
    "generate sequence parameter": generate("echo_request", {"INPUT": "x", "sequence_id": 5, "priority": 1, "timeout": 7}),
    "generate custom types": generate("echo_request", {"INPUT": "x", "a": 1.5, "b": True, "c": -1, "d": "s"}),
    "stream": generate("generate", {"PROMPT": "hello", "times": 3}, "generate_stream"),
    "stream one": generate("generate", {"PROMPT": "hello"}, "generate_stream"),
    "stream none": generate("generate", {"PROMPT": "hello", "times": 0}, "generate_stream"),
    "stream with id": generate("generate", {"PROMPT": "hello", "times": 2, "id": "s"}, "generate_stream"),
    "stream fails at once": generate("generate", {"PROMPT": "x", "times": 2, "fail_at": 0}, "generate_stream"),
    "stream fails later": generate("generate", {"PROMPT": "x", "times": 3, "fail_at": 1}, "generate_stream"),
    "stream missing input": generate("generate", {"text": "x"}, "generate_stream"),
    "stream no json": generate("generate", b"nonsense", "generate_stream"),
    "stream of an unknown model": generate("absent", {"text": "x"}, "generate_stream"),
    "stream non-decoupled": generate("generate_shapes", {"A": 1}, "generate_stream"),
    "stream non-decoupled fails": generate("faults", {"MODE": "raise"}, "generate_stream"),
    "stream with orca header": generate("generate", {"PROMPT": "x"}, "generate_stream", **{"endpoint-load-metrics-format": "text"}),
}  # fmt: skip

REPOSITORY = {
    "index": post("/v2/repository/index"),
    "index ready": post("/v2/repository/index", {"ready": True}),
    "index not only ready": post("/v2/repository/index", {"ready": False}),
    "index ready text": post("/v2/repository/index", {"ready": "yes"}),
    "index no json": post("/v2/repository/index", b"nonsense"),
    "index of a repository": post("/v2/repository/some/index"),
    "load when not explicit": post("/v2/repository/models/add_sub/load"),
    "unload when not explicit": post("/v2/repository/models/add_sub/unload"),
    "load unknown when not explicit": post("/v2/repository/models/absent/load"),
    "load from a repository": post("/v2/repository/some/models/add_sub/load"),
    "unload from a repository": post("/v2/repository/some/models/add_sub/unload"),
    "load no json": post("/v2/repository/models/add_sub/load", b"nonsense"),
    "load bad parameter": post("/v2/repository/models/add_sub/load", {"parameters": {"other": 1}}),
    "unload bad parameter": post("/v2/repository/models/add_sub/unload", {"parameters": {"unload_dependents": 1}}),
}

SHARED_MEMORY = {
    "shm status": get("/v2/systemsharedmemory/status"),
    "shm status of unknown": get("/v2/systemsharedmemory/region/x/status"),
    "shm unregister all": post("/v2/systemsharedmemory/unregister"),
    "shm unregister unknown": post("/v2/systemsharedmemory/region/x/unregister"),
    "shm register without key": post("/v2/systemsharedmemory/region/x/register", {"byte_size": 4}),
    "shm register without size": post("/v2/systemsharedmemory/region/x/register", {"key": "/k"}),
    "shm register without region": post("/v2/systemsharedmemory/register", {"key": "/k", "byte_size": 4}),
    "shm register absent": post("/v2/systemsharedmemory/region/x/register", {"key": "/no_such_key", "byte_size": 4}),
    "shm register by get": get("/v2/systemsharedmemory/region/x/register"),
    "cuda status": get("/v2/cudasharedmemory/status"),
    "cuda status of unknown": get("/v2/cudasharedmemory/region/x/status"),
    "cuda register without handle": post("/v2/cudasharedmemory/region/x/register", {"device_id": 0, "byte_size": 4}),
    "cuda unregister all": post("/v2/cudasharedmemory/unregister"),
}

SETTINGS = {
    "logging": get("/v2/logging"),
    "logging set": post("/v2/logging", {"log_verbose_level": 1, "log_info": False}),
    "logging is set": get("/v2/logging"),
    "logging null": post("/v2/logging", {"log_verbose_level": None}),
    "logging bad bool": post("/v2/logging", {"log_info": 1}),
    "logging bad level": post("/v2/logging", {"log_verbose_level": "1"}),
    "logging negative level": post("/v2/logging", {"log_verbose_level": -1}),
    "logging file": post("/v2/logging", {"log_file": "/tmp/x"}),
    "logging format": post("/v2/logging", {"log_format": "ISO8601"}),
    "logging bad format": post("/v2/logging", {"log_format": "xml"}),
    "logging unknown setting": post("/v2/logging", {"other": 1}),
    "logging no json": post("/v2/logging", b"nonsense"),
    "logging empty body": post("/v2/logging"),
    "logging put back": post("/v2/logging", {"log_verbose_level": 0, "log_info": True, "log_format": "default"}),
    "trace": get("/v2/trace/setting"),
    "trace of a model": get("/v2/models/add_sub/trace/setting"),
    "trace of an unknown model": get("/v2/models/absent/trace/setting"),
    "trace of a version": get("/v2/models/add_sub/versions/1/trace/setting"),
    "trace set": post("/v2/trace/setting", {"trace_rate": "10", "trace_count": "5", "log_frequency": "2"}),
    "trace inherited": get("/v2/models/add_sub/trace/setting"),
    "trace of a model set": post("/v2/models/add_sub/trace/setting", {"trace_rate": "3"}),
    "trace global unchanged": get("/v2/trace/setting"),
    "trace of a model cleared": post("/v2/models/add_sub/trace/setting", {"trace_rate": None}),
    "trace put back": post("/v2/trace/setting", {"trace_rate": None, "trace_count": None, "log_frequency": None}),
    "trace empty body": post("/v2/trace/setting"),
    "trace number": post("/v2/trace/setting", {"trace_rate": 5}),
    "trace text rate": post("/v2/trace/setting", {"trace_rate": "five"}),
    "trace huge rate": post("/v2/trace/setting", {"trace_rate": "99999999999999999999999"}),
    "trace count below": post("/v2/trace/setting", {"trace_count": "-2"}),
    "trace text count": post("/v2/trace/setting", {"trace_count": "x"}),
    "trace text frequency": post("/v2/trace/setting", {"log_frequency": "x"}),
    "trace file": post("/v2/trace/setting", {"trace_file": "/tmp/t"}),
    "trace level off and on": post("/v2/trace/setting", {"trace_level": ["OFF", "TIMESTAMPS"]}),
    "trace level without file": post("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
    "trace level no array": post("/v2/trace/setting", {"trace_level": "OFF"}),
    "trace unknown level": post("/v2/trace/setting", {"trace_level": ["LOUD"]}),
    "trace unknown setting": post("/v2/trace/setting", {"other": "1"}),
}

HTTP_CASES: dict[str, Request] = {
    **ROUTING, **METADATA, **CONFIGS, **INFER, **DATATYPES, **BINARY, **PARAMETERS, **CLASSIFICATION, **COMPRESSION,
    **FAULTS, **ENSEMBLES, **GENERATE, **REPOSITORY, **SHARED_MEMORY, **SETTINGS,
}  # fmt: skip
