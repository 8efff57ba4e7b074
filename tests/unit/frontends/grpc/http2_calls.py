"""Calls that tests of HTTP/2 send by hand."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from tests.unit.frontends.grpc.raw_client import LIVE, RawClient

LIVE_ANSWER = pb.ServerLiveResponse(live=True).SerializeToString()


def infer_request(size: int, model: str = "echo") -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="INPUT0", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(size.to_bytes(4, "little") + b"x" * size)
    return request.SerializeToString()


def infer_size(answer: Any) -> int:
    (body,) = answer.messages()
    (output,) = pb.ModelInferResponse.FromString(body).raw_output_contents
    return len(output) - 4


def is_live(client: RawClient) -> bool:
    answer = client.answer(client.request(LIVE, b""))
    return answer.messages() == [LIVE_ANSWER] and answer.status == 0
