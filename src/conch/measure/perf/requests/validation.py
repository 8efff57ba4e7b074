"""Compares responses with ``validation_data`` of perf_analyzer's files.

Pure. Channels call it after the end of a request has been timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import orjson

from conch.wire.json.tensor import from_json

#: The expected outputs of a payload, by name, in wire format.
Expected = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class RightAnswers:
    """The validator; ``expected`` is by payload number, and ``form`` the protocol of the responses."""

    expected: Sequence[Expected]
    form: Literal["http", "grpc"]

    def __call__(self, payload: int, answer: bytes, json_size: int = 0) -> str:
        """Return the difference of a response from the expected one, empty if none; other outputs are ignored.

        ``answer`` is a ``ModelInferResponse``, or an HTTP body with a JSON part of ``json_size`` bytes (0: all of it).
        """
        expected = self.expected[payload]
        if not expected:
            return ""
        try:
            outputs = _of_http(answer, json_size) if self.form == "http" else _of_grpc(answer)
        except (ValueError, KeyError, TypeError) as error:
            return f"the answer cannot be read: {error}"
        for name, right in expected.items():
            if name not in outputs:
                return f"output '{name}' is not in the answer"
            if outputs[name] != right:
                return f"output '{name}' is not as in validation_data"
        return ""


def _of_http(body: bytes, json_size: int) -> dict[str, bytes]:
    document: dict[str, Any] = orjson.loads(body[:json_size] if json_size else body)
    outputs, at = {}, json_size
    for output in document["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None:
            outputs[output["name"]] = body[at : at + size]
            at += size
        elif "data" in output:
            count = prod(output["shape"])
            outputs[output["name"]] = from_json(output["name"], output["datatype"], count, output["data"])
    return outputs


def _of_grpc(message: bytes) -> dict[str, bytes]:
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelInferResponse.FromString(message)
    return {output.name: data for output, data in zip(response.outputs, response.raw_output_contents, strict=False)}
