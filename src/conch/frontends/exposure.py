"""Warns if remote clients can run code on the server; called once, before the ports open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from typing import Final

from conch.options.settings import Settings
from conch.options.triton_values import Restriction

_CONTROL: Final = "model-repository"


def warnings(settings: Settings) -> Iterator[str]:
    """Yield a warning for each front end over which remote clients may load models with their own files."""
    if settings.model_control_mode != "explicit" or settings.model_load_overrides != "files":
        return
    http = settings.http_restricted_api, "http-restricted-api"
    grpc = settings.grpc_restricted_protocol, "grpc-restricted-protocol"
    rows = (("HTTP", "http", *http), ("gRPC", "grpc", *grpc),
            ("Vertex AI", "vertex-ai", *http), ("OCI Data Science", "oci", *http))  # fmt: skip
    for title, name, restrictions, flag in rows:
        listener = settings.listeners[name]
        if listener.allowed and not is_local(listener.address) and not _restricts_control(restrictions):
            yield (
                f"{title} clients at {listener.address} can run code on this machine: with "
                f"--model-control-mode=explicit "
                "a client may load a model with its own files; set --model-load-overrides=none, or "
                f"--{flag}={_CONTROL}:<header>=<secret>"
            )


def is_local(address: str) -> bool:
    """Whether ``address`` is reachable from this machine only."""
    try:
        return ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def _restricts_control(restrictions: Iterable[Restriction]) -> bool:
    return any(_CONTROL in restriction.apis for restriction in restrictions)
