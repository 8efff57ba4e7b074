"""Who may run code on the server by loading a model is said at its start."""

from __future__ import annotations

from typing import Any

import pytest

from conch.frontends.listening import exposure_warnings, is_local
from conch.options.settings import Settings
from conch.options.triton_values import Restriction

SECRET = (Restriction(("model-repository",), "key", "secret"),)


def lines(**changes: Any) -> list[str]:
    return list(exposure_warnings(Settings(model_control_mode="explicit", **changes)))


def test_front_ends_that_other_machines_reach_are_named_with_what_to_do() -> None:
    http, grpc = lines(http_address="0.0.0.0", grpc_address="::")
    assert http == (
        "HTTP clients at 0.0.0.0 can run code on this machine: with --model-control-mode=explicit a client may "
        "load a model with its own files; set --model-load-overrides=none, or "
        "--http-restricted-api=model-repository:<header>=<secret>"
    )
    assert "gRPC clients at ::" in grpc and "--grpc-restricted-protocol=model-repository:" in grpc


def test_ports_of_platforms_are_named_with_their_address() -> None:
    (oci,) = lines(allow_oci=True)
    assert oci.startswith("OCI Data Science clients at 0.0.0.0 can run code on this machine")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"allow_oci": True, "allow_vertex_ai": True, "vertex_ai_port": 0, "platform_address": "127.0.0.1"},
        {"http_address": "localhost", "grpc_address": "::1"},
        {"http_address": "0.0.0.0", "http_restricted_api": SECRET},
        {"grpc_address": "10.0.0.1", "grpc_restricted_protocol": SECRET},
        {"http_address": "0.0.0.0", "model_load_overrides": "config"},
        {"http_address": "0.0.0.0", "model_load_overrides": "none"},
        {"http_address": "0.0.0.0", "allow_http": False},
    ],
)
def test_server_without_remote_loads_has_no_warning(changes: dict[str, Any]) -> None:
    assert lines(**changes) == []


def test_server_without_explicit_control_has_no_warning() -> None:
    assert list(exposure_warnings(Settings(http_address="0.0.0.0"))) == []


@pytest.mark.parametrize(
    ("address", "local"), [("127.0.0.2", True), ("[::1]", True), ("LOCALHOST", True), ("host", False), ("", False)]
)
def test_addresses_of_this_machine(address: str, local: bool) -> None:
    assert is_local(address) is local
