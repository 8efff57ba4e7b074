"""Reads metadata, configurations and statistics from the server, over the measured protocol.

Called before and after windows, never while the same process times requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from conch.client.deadline import Deadline, DeadlineError
from conch.client.http import HttpTransport
from conch.client.requests import version_number
from conch.client.transport import ConnectionFailedError, Transport
from conch.config import render
from conch.core.errors import Code, ConchError, internal, not_found, unavailable, unsupported
from conch.measure.perf.senders.channels.connecting import Address

_SECONDS: Final = 10.0
#: The codes of errors for an unknown model; INVALID_ARG is that of Triton over HTTP.
_UNKNOWN: Final = (Code.NOT_FOUND, Code.INVALID_ARG)
_Result = TypeVar("_Result")


def transport_to(
    address: Address, *, grpc: bool, prefix: str = "", headers: Mapping[str, str] | None = None
) -> Transport:
    """Return a client of the server, which connects when it is used; raises INVALID_ARG for unusable TLS files."""
    if grpc:
        from conch.client.grpc import GrpcTransport  # imports the gRPC library, which most measurements do not need

        return GrpcTransport(address.host, address.port, address.files if address.encrypted else None, headers)
    # A connection that stays open would be one of the server's during the measurement.
    return HttpTransport(address.host, address.port, prefix, address.tls(), {**(headers or {}), "Connection": "close"})


class ServerApi:
    """The server's metadata, configurations and statistics, as in the JSON of the HTTP protocol, over HTTP or gRPC."""

    def __init__(
        self, address: Address, *, grpc: bool, prefix: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self._transport = transport_to(address, grpc=grpc, prefix=prefix, headers=headers)
        self._where = f"{address.shown}{prefix}"

    def __enter__(self) -> ServerApi:
        return self

    def __exit__(self, *raised: object) -> None:
        self._transport.close()

    def server(self) -> Mapping[str, Any]:
        """Return ``name``, ``version`` and ``extensions`` of the server; raises UNAVAILABLE if it cannot be reached."""
        return self._call(lambda deadline: self._transport.metadata("", -1, deadline))

    def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        """Return the inputs and outputs of a model; raises NOT_FOUND if the server does not serve it."""
        number = version_number(version)
        metadata = self._call(lambda deadline: self._transport.metadata(model, number, deadline))
        if "name" not in metadata:  # a web server that returns the same page for every path
            raise internal(f"{self._where} does not describe model '{model}': is this a server of the KServe protocol?")
        return metadata

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        """Return the configuration of a model; empty if the server does not provide it."""
        number = version_number(version)
        config = self._optional(lambda deadline: self._transport.config(model, number, deadline))
        return json.loads(render.to_json(config)) if config is not None else {}

    def statistics(self) -> list[dict[str, Any]]:
        """Return ``model_stats`` of all models; empty if the server has no statistics."""
        return self._optional(lambda deadline: self._transport.statistics("", -1, deadline)) or []

    def register_memory(self, region: str, key: str, size: int) -> None:
        """Register system shared memory of ``size`` bytes under ``key``."""
        self._call(lambda deadline: self._transport.register_memory(region, key, size, deadline))

    def unregister_memory(self, region: str) -> None:
        """Unregister a region."""
        self._call(lambda deadline: self._transport.unregister_memory(region, deadline))

    def _optional(self, call: Callable[[Deadline], _Result]) -> _Result | None:
        """Return the response of an extension; None if the server does not implement it."""
        try:
            return self._call(call)
        except ConchError as error:
            if error.code in (Code.NOT_FOUND, Code.UNSUPPORTED):
                return None
            raise

    def _call(self, call: Callable[[Deadline], _Result]) -> _Result:
        try:
            return call(Deadline.after(_SECONDS))
        except ConnectionFailedError as error:
            raise unavailable(f"no server responds at {self._where}: {error.cause}") from None
        except DeadlineError as error:
            raise unavailable(f"no server responds at {self._where}: {error.message}") from None
        except ConchError as error:
            if error.code in _UNKNOWN:
                raise not_found(error.message) from None
            if error.code is Code.UNSUPPORTED:
                raise unsupported(f"{self._where}: {error.message}") from None
            raise internal(f"{self._where}: {error.message}") from None
