"""The messages of the inference service, declared in ``grpc_service.proto``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from conch.core.protocol.proto_files import load, members

DESCRIPTOR: Final = load("grpc_service.proto")
globals().update(members(DESCRIPTOR))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
