"""The protocol interface of ``conch.Client``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from conch.client.deadline import Deadline
from conch.client.requests import OutgoingRequest
from conch.client.results import InferResult
from conch.client.service import ResultStream
from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError


class ConnectionFailedError(ConchError):
    """No response, because the connection failed; the message names the server at ``address`` unless it is empty.

    Over gRPC, also the server's own error UNAVAILABLE, which looks the same.
    """

    def __init__(self, reason: str, address: str = "") -> None:
        super().__init__(f"{address} does not respond: {reason}" if address else reason, Code.UNAVAILABLE)
        self.cause = reason


class UnreachableError(ConnectionFailedError):
    """No connection could be made; the server has not received the request."""


class LostError(ConnectionFailedError):
    """The connection broke before the response; the server may have run the request."""


class Transport(Protocol):
    """Calls to a server over one protocol; any thread may call. Version -1 means any.

    Every method raises ConchError: UNAVAILABLE if the server cannot be reached or does not respond by the deadline,
    otherwise the server's error.
    """

    def live(self, deadline: Deadline) -> bool: ...

    def ready(self, model: str, version: int, deadline: Deadline) -> bool: ...

    def metadata(self, model: str, version: int, deadline: Deadline) -> dict[str, Any]: ...

    def config(self, model: str, version: int, deadline: Deadline) -> ModelConfig: ...

    def statistics(self, model: str, version: int, deadline: Deadline) -> list[dict[str, Any]]: ...

    def index(self, deadline: Deadline) -> list[dict[str, str]]: ...

    def load(self, model: str, config: str | None, files: Mapping[str, bytes], deadline: Deadline) -> None: ...

    def unload(self, model: str, dependents: bool, deadline: Deadline) -> None: ...

    def register_memory(self, region: str, key: str, size: int, deadline: Deadline) -> None:
        """Register system shared memory of ``size`` bytes under ``key``."""

    def unregister_memory(self, region: str, deadline: Deadline) -> None: ...

    def infer(self, request: OutgoingRequest) -> InferResult: ...

    def stream(self, request: OutgoingRequest) -> ResultStream: ...

    def close(self) -> None: ...
