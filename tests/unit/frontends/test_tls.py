"""TLS contexts from flags: what is missing or unusable is said in one sentence, for both protocols."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest

from conch.frontends.listening import make_context
from conch.options.settings import Settings
from tests.refusals import refused_argument

Protocol = Literal["http", "grpc"]


def flags(protocol: Protocol, **values: object) -> Settings:
    named: dict[str, Any] = {f"{protocol}_{name}": value for name, value in values.items()}
    return Settings(**named)


def files(folder: Path) -> dict[str, object]:
    return {"use_ssl": True, "server_cert": str(folder / "server.pem"), "server_key": str(folder / "server.key")}


def refusal(protocol: Protocol, **values: object) -> str:
    return refused_argument(make_context, flags(protocol, **values), protocol)


def test_without_the_flag_nothing_is_encrypted() -> None:
    assert make_context(Settings(http_server_cert="absent"), "http") is None


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_clients_are_asked_for_certificates_only_by_mutual_tls(protocol: Protocol, certificates: Path) -> None:
    context = make_context(flags(protocol, **files(certificates)), protocol)
    assert context is not None and context.verify_mode is ssl.CERT_NONE
    given = files(certificates) | {"use_ssl": False, "use_ssl_mutual": True}
    context = make_context(flags(protocol, **given, root_cert=str(certificates / "client.pem")), protocol)
    assert context is not None and context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_files_that_are_missing_or_unusable_are_named(protocol: Protocol, certificates: Path, tmp_path: Path) -> None:
    good = files(certificates)
    text, locked, empty = tmp_path / "text.pem", tmp_path / "locked.key", tmp_path / "empty.pem"
    text.write_text("not a certificate")
    empty.write_bytes(b"")
    subprocess.run(
        ["openssl", "ec", "-in", str(good["server_key"]), "-aes256", "-passout", "pass:secret", "-out", locked],
        check=True, capture_output=True,
    )  # fmt: skip
    f = f"--{protocol}-"
    assert refusal(protocol, use_ssl=True) == f"{f}use-ssl needs {f}server-cert and {f}server-key"
    assert (
        refusal(protocol, **good, use_ssl_mutual=True)
        == f"{f}use-ssl-mutual needs {f}root-cert, with which clients are checked"
    )
    for change, why in (
        ({"server_cert": "absent.pem"}, "No such file or directory"),
        ({"server_cert": str(tmp_path)}, "Is a directory"),
        ({"server_cert": str(text)}, "not PEM of that kind, or with a password"),
        ({"server_key": str(certificates / "client.key")}, "key values mismatch"),
        ({"server_key": str(locked)}, "password"),
    ):
        given = good | change
        message = refusal(protocol, **given)
        start = f"{f}server-cert {given['server_cert']} and {f}server-key {given['server_key']} cannot be used: "
        assert message.startswith(start)
        assert why in message and len(message) > len(start)
    message = refusal(protocol, **good, root_cert=str(empty))
    assert message.startswith(f"{f}root-cert {empty} cannot be used: ")
