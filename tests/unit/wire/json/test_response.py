"""Responses of infer requests: JSON, binary tensors behind it, classification."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest

from conch.core.errors import ConchError
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import WireTensor, pack_bytes
from conch.wire.json.infer import JsonOutputPlan, RequestedOutput, encode_infer


def encode(
    *outputs: WireTensor,
    plan: JsonOutputPlan | None = None,
    labels: dict[str, list[str]] | None = None,
    **response: Any,
) -> tuple[bytes, list[Any]]:
    request = InferRequest("m", {}, lambda response: None, model_version=3, id=response.pop("id", ""))
    return encode_infer(request, InferResponse(outputs, **response), plan or JsonOutputPlan(), (labels or {}).get)


def test_response_is_written_in_tritons_order() -> None:
    first = WireTensor("A", "INT32", (1, 2), struct.pack("<2i", 1, -2))
    second = WireTensor("B", "BYTES", (2,), pack_bytes([b"x", "é".encode()]))
    body, blobs = encode(first, second, id="q", parameters={"p": 1, "f": math.nan})
    assert body.decode() == (
        '{"id":"q","model_name":"m","model_version":"3","parameters":{"p":1,"f":NaN},"outputs":['
        '{"name":"A","datatype":"INT32","shape":[1,2],"data":[1,-2]},'
        '{"name":"B","datatype":"BYTES","shape":[2],"data":["x","é"]}]}'
    )
    assert blobs == []


def test_response_without_outputs_names_the_model() -> None:
    assert encode()[0] == b'{"model_name":"m","model_version":"3","outputs":[]}'


@pytest.mark.parametrize(
    ("datatype", "data", "shown"),
    [
        ("BOOL", b"\0\1", "[false,true]"),
        ("UINT64", b"\xff" * 8, "[18446744073709551615]"),
        ("FP32", struct.pack("<f", 0.1), "[0.10000000149011612]"),
        ("FP32", struct.pack("<4f", math.nan, math.inf, -math.inf, 1), "[NaN,Infinity,-Infinity,1.0]"),
        ("FP64", struct.pack("<d", 0.1), "[0.1]"),
        ("INT32", b"", "[]"),
        ("BYTES", pack_bytes([b'a\0"\\\n']), r'["a\u0000\"\\\n"]'),
    ],
)
def test_data_is_written_flat(datatype: str, data: bytes, shown: str) -> None:
    body, _ = encode(WireTensor("A", datatype, (1,), memoryview(data)))
    assert f'"data":{shown}}}'.encode() in body


def test_text_that_is_not_utf8_is_written_as_it_is() -> None:
    body, _ = encode(WireTensor("A", "BYTES", (2,), pack_bytes([b'a\xff"', b"c"])))
    assert body.endswith(b'"data":["a\xff\\"","c"]}]}')


def test_binary_outputs_follow_the_json_uncopied() -> None:
    data = bytearray(struct.pack("<2i", 1, 2))
    outputs = [
        WireTensor("A", "INT32", (2,), data),
        WireTensor("B", "INT32", (1,), bytes(4)),
        WireTensor("C", "INT32", (0,), b""),
    ]
    plan = JsonOutputPlan(outputs={"A": RequestedOutput(True), "B": RequestedOutput(False), "C": RequestedOutput(True)})
    body, blobs = encode(*outputs, plan=plan)
    written = json.loads(body)["outputs"]
    assert [output.get("parameters") for output in written] == [{"binary_data_size": 8}, None, {"binary_data_size": 0}]
    assert len(blobs) == 1 and blobs[0] is data


def test_only_requested_outputs_are_written() -> None:
    outputs = [WireTensor(name, "INT8", (1,), b"\1") for name in "CBA"]
    body, _ = encode(*outputs, plan=JsonOutputPlan(outputs={"A": RequestedOutput(False), "C": RequestedOutput(False)}))
    assert [output["name"] for output in json.loads(body)["outputs"]] == ["C", "A"]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_written_in_binary_only(datatype: str) -> None:
    tensor = WireTensor("A", datatype, (1,), b"ab")
    assert encode(tensor, plan=JsonOutputPlan(binary=True))[1] == [b"ab"]
    with pytest.raises(ConchError) as caught:
        encode(tensor)
    assert caught.value.message == (
        f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
    )


def test_classification_replaces_the_output() -> None:
    tensor = WireTensor("A", "FP32", (2, 3), struct.pack("<6f", 1, 3, 2, 6, 5, 4))
    plan = JsonOutputPlan(batched=True, outputs={"A": RequestedOutput(False, 2)})
    body, _ = encode(tensor, plan=plan, labels={"A": ["cat", "", "dog"]})
    assert json.loads(body)["outputs"] == [
        {
            "name": "A",
            "datatype": "BYTES",
            "shape": [2, 2],
            "data": ["3.000000:1", "2.000000:2:dog", "6.000000:0:cat", "5.000000:1"],
        }
    ]
