"""The method and the status of a gRPC call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import NamedTuple
from urllib.parse import unquote

from conch.http2 import Field
from conch.measure.perf.senders.calls import TimedCall
from conch.measure.perf.senders.records import Outcome


@dataclass(frozen=True, slots=True)
class Rpc:
    """A gRPC method: its path, the metadata of each call, and the compression of messages (empty: none)."""

    path: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    encoding: str = ""


class RpcStatus(NamedTuple):
    """The status in a header block: that of HTTP, and that of gRPC if the block has it."""

    http: int | None
    grpc: int | None
    message: str


def status_of(fields: Sequence[Field]) -> RpcStatus:
    """Return the status in a block of headers or trailers."""
    headers = dict(fields)
    http, grpc = headers.get(b":status"), headers.get(b"grpc-status")
    message = unquote(headers.get(b"grpc-message", b"").decode("latin-1"))
    return RpcStatus(int(http) if http is not None else None, int(grpc) if grpc is not None else None, message)


def finish(call: TimedCall, outcome: Outcome, code: int, error: str, end: int = 0) -> None:
    """Set the result and the end time (ns, 0 for now) of a call, and call its ``on_end``."""
    call.end = end or monotonic_ns()
    call.outcome = outcome
    call.code = code
    call.error = error
    call.on_end(call)
