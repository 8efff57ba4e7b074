"""``inference.GRPCInferenceService`` for Ray Serve's proxy, which keeps messages as they were sent.

Ray Serve sends messages from process to process by pickle, and those of ``tritonclient`` cannot be pickled.
"""

from __future__ import annotations

from typing import Any, Final

import grpc

SERVICE: Final = "inference.GRPCInferenceService"
#: What ``serve.start`` takes to have its proxy speak the protocol.
SERVICER: Final = "conch.deploy.ray.service.add_servicer"

UNARY: Final = (
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "ModelInfer",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "SystemSharedMemoryStatus",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
    "TraceSetting",
    "LogSettings",
)
STREAM: Final = "ModelStreamInfer"


class RawMessage:
    """The bytes of an answer, with the method by which Ray Serve asks messages for theirs."""

    __slots__ = ("_content",)

    def __init__(self, content: bytes) -> None:
        self._content = content

    def SerializeToString(self) -> bytes:
        return self._content


def add_servicer(servicer: Any, server: Any) -> None:
    """Have ``server`` take the service's calls.  Ray Serve puts handlers of its own in place of these."""
    handlers = {name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name)) for name in UNARY}
    handlers[STREAM] = grpc.stream_stream_rpc_method_handler(getattr(servicer, STREAM))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
