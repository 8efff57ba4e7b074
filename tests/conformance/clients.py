"""``tritonclient`` for HTTP and gRPC behind one interface, so that one suite covers both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.conftest import Server
from tests.oracle import TritonServer

Arrays = Mapping[str, np.ndarray]

HTTP_STATUS = {
    "UNKNOWN": "400", "INTERNAL": "500", "NOT_FOUND": "404", "INVALID_ARG": "400", "UNAVAILABLE": "503",
    "UNSUPPORTED": "501", "ALREADY_EXISTS": "400", "CANCELLED": "400",
}  # fmt: skip
GRPC_STATUS = {name: f"StatusCode.{name}" for name in HTTP_STATUS} | {
    "INVALID_ARG": "StatusCode.INVALID_ARGUMENT",
    "UNSUPPORTED": "StatusCode.UNIMPLEMENTED",
}


@dataclass(frozen=True)
class Result:
    """An inference response: arrays by output name in the order of the response, and the other fields."""

    outputs: dict[str, np.ndarray]
    datatypes: dict[str, str]
    model_name: str
    model_version: str
    id: str

    def __getitem__(self, name: str) -> np.ndarray:
        return self.outputs[name]


class Client:
    """One server over one protocol (``http`` or ``grpc``)."""

    def __init__(self, protocol: str, server: Server) -> None:
        self.protocol = protocol
        self.server = server
        self.kind = "triton" if isinstance(server, TritonServer) else "conch"
        self.module: Any = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
        self.api: Any = self.module.InferenceServerClient(getattr(server, protocol))
        self.statuses = HTTP_STATUS if protocol == "http" else GRPC_STATUS

    def infer(
        self,
        model: str,
        inputs: Arrays,
        outputs: Sequence[str] | None = None,
        *,
        binary: bool = True,
        datatypes: Mapping[str, str] | None = None,
        classes: int = 0,
        **options: Any,
    ) -> Result:
        """Send arrays; ``binary=False`` sends and requests JSON if the protocol supports it."""
        tensors = [self.input(name, value, binary, (datatypes or {}).get(name)) for name, value in inputs.items()]
        json_only = {"binary_data": binary} if self.protocol == "http" else {}
        wanted = [self.module.InferRequestedOutput(n, class_count=classes, **json_only) for n in outputs or ()]
        if self.protocol == "grpc":
            options.setdefault("client_timeout", 30)
        return self.result(self.api.infer(model, tensors, outputs=wanted or None, **options))

    def input(self, name: str, value: np.ndarray, binary: bool = True, datatype: str | None = None) -> Any:
        tensor = self.module.InferInput(name, list(value.shape), datatype or np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value, *([binary] if self.protocol == "http" else []))
        return tensor

    def result(self, answer: Any) -> Result:
        response = answer.get_response() if self.protocol == "http" else answer.get_response(as_json=True)
        described = response.get("outputs", [])
        return Result(
            {output["name"]: answer.as_numpy(output["name"]) for output in described},
            {output["name"]: output["datatype"] for output in described},
            response["model_name"],
            response["model_version"],
            response.get("id", ""),
        )

    def get(self, what: str, *arguments: Any, **options: Any) -> Any:
        """Make a control-plane call; returns its JSON response, with 64-bit integers as integers."""
        json_option = {} if self.protocol == "http" else {"as_json": True}
        return as_integers(getattr(self.api, f"get_{what}")(*arguments, **options, **json_option))

    @contextmanager
    def refused(self, code: str, message: str) -> Iterator[None]:
        """Assert that the block raises an error with exactly this code and message."""
        try:
            yield
        except InferenceServerException as error:
            assert (error.status(), error.message()) == (self.statuses[code], message)
        else:
            raise AssertionError(f"nothing raised; expected {code}: {message}")


def as_integers(value: Any) -> Any:
    """Convert the strings of digits under names of counts, as which protobuf's JSON writes 64-bit integers."""
    text = json.dumps(value)
    return json.loads(text, object_hook=_convert)


def _convert(members: dict[str, Any]) -> dict[str, Any]:
    counts = ("count", "ns", "inference_count", "execution_count", "batch_size", "last_inference")
    converted = {k: int(v) if k in counts and isinstance(v, str) else v for k, v in members.items()}
    if isinstance(converted.get("shape"), list):
        converted["shape"] = [int(n) for n in converted["shape"]]
    return converted


def strings(*values: str | bytes) -> np.ndarray:
    """Return a one-dimensional BYTES array."""
    return np.array(values, dtype=np.object_)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)
