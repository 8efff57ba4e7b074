"""Plain gRPC calls and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from tests.conformance.grpc_cases import Call


@dataclass(frozen=True)
class Outcome:
    """The status code's name, its details, and the messages received."""

    code: str
    details: str
    messages: list[Any]


def call(address: str, case: Call, timeout: float = 30) -> Outcome:
    """Make one call over a new channel, and wait for its end."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        method = getattr(stub, case.method)
        messages: list[Any] = []
        try:
            if isinstance(case.request, list):
                messages.extend(method(iter(case.request), timeout=timeout, metadata=case.metadata))
            else:
                messages.append(method(case.request, timeout=timeout, metadata=case.metadata))
        except grpc.RpcError as error:
            return Outcome(error.code().name, error.details() or "", messages)
        return Outcome("OK", "", messages)
