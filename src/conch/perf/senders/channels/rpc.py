"""What is said of a gRPC call: the method it is of, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import NamedTuple
from urllib.parse import unquote

from conch.frontends.grpc.http2.headers import Field
from conch.perf.senders.calls import TimedCall
from conch.perf.senders.records import Outcome


@dataclass(frozen=True, slots=True)
class Rpc:
    """An RPC: its path, what travels beside each call of it, and how messages are compressed (empty: they are not)."""

    path: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    encoding: str = ""


class RpcStatus(NamedTuple):
    """The status in a header block: that of HTTP, and that of gRPC where the block has one."""

    http: int | None
    grpc: int | None
    message: str


def status_of(fields: Sequence[Field]) -> RpcStatus:
    """The status that a block of headers or trailers tells."""
    found = dict(fields)
    http, grpc = found.get(b":status"), found.get(b"grpc-status")
    message = unquote(found.get(b"grpc-message", b"").decode("latin-1"))
    return RpcStatus(int(http) if http is not None else None, int(grpc) if grpc is not None else None, message)


def finish(call: TimedCall, outcome: Outcome, code: int, error: str, end: int = 0) -> None:
    """Note how a call ended, and when (ns, 0 for now), and tell its owner."""
    call.end = end or monotonic_ns()
    call.outcome = outcome
    call.code = code
    call.error = error
    call.on_end(call)
