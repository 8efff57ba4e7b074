"""Which clients may connect over gRPC with TLS, and with mutual TLS."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests import certificates
from tests.conftest import Start


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.make(tmp_path_factory.mktemp("certificates"), "server", "client", "stranger")


def outcome(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    """Return the result of a call that every server supports."""
    channel = grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
    with channel:
        live = channel.unary_unary(
            "/inference.GRPCInferenceService/ServerLive",
            pb.ServerLiveRequest.SerializeToString,
            pb.ServerLiveResponse.FromString,
        )
        try:
            assert live(pb.ServerLiveRequest(), timeout=20).live
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return]
        return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("flags", "answered"),
    [
        (("--grpc-use-ssl=true",), {"nobody", "client", "stranger"}),
        (("--grpc-use-ssl-mutual=true",), {"client"}),
        (("--grpc-use-ssl=true", "--grpc-use-ssl-mutual=true"), {"client"}),
    ],
    ids=["one way", "mutual", "both flags"],
)
def test_callers_are_known_by_their_certificates(
    flags: tuple[str, ...], answered: set[str], start: Start, files: Path, tmp_path: Path
) -> None:
    server, root = (files / "server.pem").read_bytes(), files / "client.pem"
    callers = {
        "nobody": grpc.ssl_channel_credentials(server),
        **{
            name: grpc.ssl_channel_credentials(
                server, (files / f"{name}.key").read_bytes(), (files / f"{name}.pem").read_bytes()
            )
            for name in ("client", "stranger")
        },
        "without TLS": None,
    }
    own = (f"--grpc-server-cert={files}/server.pem", f"--grpc-server-key={files}/server.key")
    with start(tmp_path, *flags, *own, f"--grpc-root-cert={root}") as running:
        outcomes = {name: outcome(running.grpc, credentials) for name, credentials in callers.items()}
    expected = {name: grpc.StatusCode.OK if name in answered else grpc.StatusCode.UNAVAILABLE for name in callers}
    assert outcomes == expected
