"""The HTTP client of remote models, against servers that answer what the test says."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from conch.client.transport import LostError, UnreachableError
from conch.config.remote import RemoteSettings, read_url
from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import WireTensor
from conch.server.execution.remote.executor import RemoteTransport, connecting
from tests import certificates


class HttpServer:
    """Answers every request by what ``answer`` returns for its head; keeps heads and bodies."""

    def __init__(self, answer: Callable[[str], bytes]) -> None:
        self.answer = answer
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    def close_connections(self) -> None:
        for writer in self.writers:
            writer.close()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line[16:]) for line in head.split("\r\n") if line.startswith("content-length: ")), 0)
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(length))
                answer = self.answer(head)
                if not answer:
                    break
                if answer != b"hang":
                    writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            writer.close()


def response(status: int, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@asynccontextmanager
async def serving(
    answer: Callable[[str], bytes], tls: ssl.SSLContext | None = None, folder: Path = Path(), **settings: object
) -> AsyncIterator[tuple[HttpServer, RemoteTransport]]:
    fake = HttpServer(answer)
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    settings = {"connect_timeout": 60.0, **settings}  # a busy machine answers late
    chosen = RemoteSettings((), "m", **settings)  # type: ignore[arg-type]
    connect = await connecting(chosen, folder, decoupled=False)
    transport = connect(read_url(f"{'https' if tls else 'http'}://127.0.0.1:{port}/base"))
    try:
        yield fake, transport
    finally:
        await transport.close()
        server.close()


def request() -> InferRequest:
    inputs = {"x": WireTensor("x", "FP32", (1,), b"\0\0\x80\x3f")}
    return InferRequest("local", inputs, lambda response: None, outputs=("y",))


async def infer(transport: RemoteTransport, seconds: float | None = None) -> InferResponse:
    found: list[InferResponse] = []
    await transport.infer(request(), seconds, found.append)
    (only,) = found
    return only


def binary(head: str) -> bytes:
    document = json.dumps(
        {
            "model_name": "m",
            "model_version": "3",
            "parameters": {"k": 1, "odd": []},
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}],
        }
    ).encode()
    return response(200, document + b"\0\0\0\x40", f"Inference-Header-Content-Length: {len(document)}")


async def test_tensors_travel_in_binary_over_a_kept_connection() -> None:
    async with serving(binary, version=3) as (fake, transport):
        for _ in range(3):
            answer = await infer(transport)
            assert (bytes(answer.outputs[0].data), answer.parameters) == (b"\0\0\0\x40", {"k": 1})
        assert fake.connections == 1
        assert fake.heads[0].startswith("POST /base/v2/models/m/versions/3/infer HTTP/1.1\r\n")
        assert fake.bodies[0].endswith(b"\0\0\x80\x3f")


@pytest.mark.parametrize("interim", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 X\r\nLink: </a>\r\n\r\n" * 2])
async def test_interim_responses_are_not_taken_for_the_answer(interim: bytes) -> None:
    async with serving(lambda head: interim + binary(head), version=3) as (fake, transport):
        for _ in range(2):
            answer = await infer(transport)
            assert answer.outputs[0].data == b"\0\0\0\x40"
        assert fake.connections == 1


async def test_outputs_in_json_are_read_too() -> None:
    body = b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}'
    async with serving(lambda head: response(200, body)) as (_, transport):
        assert bytes((await infer(transport)).outputs[0].data) == b"\0\0\x80\x3f\0\0\0\x40"


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (response(503, b'{"error": "too busy"}'), Code.UNAVAILABLE, "too busy"),
        (response(404, b'{"error": "no such row"}'), Code.NOT_FOUND, "no such row"),
        (response(502, b"<html>Bad  Gateway</html>"), Code.UNKNOWN, "<html>Bad Gateway</html>"),
        (response(401), Code.UNAVAILABLE, "it requires other credentials (HTTP 401; 'authorization_env' names them)"),
        (response(403, b"no"), Code.UNAVAILABLE, "it forbids the request (HTTP 403)"),
        (response(200, b"[]"), Code.INTERNAL, "the response is not an inference response: TypeError"),
        (response(200, b"<html>"), Code.INTERNAL, "the response is not an inference response: it is not JSON"),
        (b"SMTP ready\r\n", Code.UNAVAILABLE, "it is not a server for this protocol (the response is not HTTP)"),
    ],
)
async def test_what_a_server_refuses_is_said_in_its_words(answer: bytes, code: Code, message: str) -> None:
    async with serving(lambda head: answer) as (_, transport):
        with pytest.raises(ConchError) as raised:
            await infer(transport)
        assert (raised.value.code, raised.value.message.startswith(message)) == (code, True), raised.value


async def test_a_connection_that_breaks_before_the_answer_is_lost() -> None:
    async with serving(lambda head: b"") as (_, transport):
        with pytest.raises(LostError, match="the connection broke"):
            await infer(transport)


async def test_an_answer_that_takes_too_long_closes_the_connection() -> None:
    async with serving(lambda head: b"hang") as (fake, transport):
        with pytest.raises(TimeoutError):
            await infer(transport, 0.05)
        await fake.closed.wait()


async def test_a_request_that_is_cancelled_closes_the_connection() -> None:
    async with serving(lambda head: b"hang") as (fake, transport):
        task = asyncio.create_task(infer(transport))
        while not fake.bodies:
            await asyncio.sleep(0.001)
        task.cancel()
        await fake.closed.wait()


async def test_a_server_that_closes_an_idle_connection_is_suspected() -> None:
    async with serving(lambda head: binary(head)) as (fake, transport):
        broken = asyncio.Event()
        transport.on_broken = broken.set
        await infer(transport)
        fake.close_connections()
        await broken.wait()


async def test_more_requests_than_connections_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conch.server.execution.remote.http_calls.MOST_CONNECTIONS", 2)
    async with serving(binary) as (fake, transport):
        answers = await asyncio.gather(*(infer(transport) for _ in range(10)))
        assert (len(answers), fake.connections) == (10, 2)


async def test_the_question_is_asked_again_where_an_idle_connection_was_closed() -> None:
    answers = iter([response(200), b"", response(200)])
    async with serving(lambda head: next(answers)) as (fake, transport):
        await transport.check()
        await transport.check()
        assert fake.connections == 2


async def test_an_absent_server_is_not_reached() -> None:
    connect = await connecting(RemoteSettings((), "m"), Path(), decoupled=False)
    with pytest.raises(UnreachableError, match="no connection: "):
        await infer(connect(read_url("http://127.0.0.1:1")))


async def test_a_host_without_an_address_is_not_reached() -> None:
    connect = await connecting(RemoteSettings((), "m"), Path(), decoupled=False)
    with pytest.raises(UnreachableError, match=r"no connection: no address is known for 'no-such-host\.invalid'"):
        await infer(connect(read_url("http://no-such-host.invalid")))


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"ready": response(200)}, ""),
        ({"ready": response(400), "m": response(200, b"{}")}, "model 'm' is not ready there"),
        (
            {"ready": response(400), "m": response(404, b'{"error":"Request for unknown model: \'m\' is not found"}')},
            "it has no model 'm' (Request for unknown model: 'm' is not found)",
        ),
        ({"ready": response(403)}, "it forbids the request (HTTP 403)"),
        ({"ready": response(404, b"nginx"), "m": response(404, b"nginx")}, "it is not a server for this protocol "),
    ],
)
async def test_the_question_whether_a_model_is_ready_says_what_is_wrong(answers: dict[str, bytes], reason: str) -> None:
    async with serving(lambda head: answers[head.split()[1].rpartition("/")[2]]) as (_, transport):
        if not reason:
            await transport.check()
            return
        with pytest.raises(ConchError) as raised:
            await transport.check()
        assert raised.value.message.startswith(reason)


async def test_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOTE_TOKEN", "Bearer secret\n")
    monkeypatch.setenv("REMOTE_HEADERS", "X-Team: blue\nx-other: 1")
    options = {"authorization_env": "REMOTE_TOKEN", "headers_env": "REMOTE_HEADERS"}
    async with serving(binary, **options) as (fake, transport):
        await infer(transport)
        for line in ("authorization: Bearer secret", "x-team: blue", "x-other: 1"):
            assert f"\r\n{line}\r\n" in fake.heads[0]


async def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REMOTE_TOKEN", raising=False)
    with pytest.raises(ConchError, match="environment variable 'REMOTE_TOKEN', which parameter 'authorization_env'"):
        await connecting(RemoteSettings((), "m", authorization_env="REMOTE_TOKEN"), Path(), decoupled=False)


async def test_certificates_are_checked_against_the_file(tmp_path: Path) -> None:
    certificates.make(tmp_path, "server", "client", "stranger")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    context.load_verify_locations(tmp_path / "client.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    own = {"certificate_file": "client.pem", "key_file": "client.key"}
    async with serving(binary, context, tmp_path, ca_file="server.pem", **own) as (_, transport):
        assert (await infer(transport)).outputs
    async with serving(binary, context, tmp_path, ca_file="stranger.pem", **own) as (_, transport):
        with pytest.raises(UnreachableError, match=r"its certificate is not accepted: .*self.signed"):
            await infer(transport)


async def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"nobody\.pem cannot be used as CA certificates: .*No such file"):
        await connecting(RemoteSettings((), "m", ca_file="nobody.pem"), tmp_path, decoupled=False)
    (tmp_path / "empty.pem").write_text("nothing\n")
    with pytest.raises(ConchError, match=r"empty\.pem cannot be used as CA certificates: "):
        await connecting(RemoteSettings((), "m", ca_file="empty.pem"), tmp_path, decoupled=False)


async def test_a_configuration_of_a_newer_server_is_read_without_its_new_fields() -> None:
    document = {"name": "m", "max_batch_size": 4, "invented_later": {"count": 1}}
    async with serving(lambda head: response(200, json.dumps(document).encode())) as (_, transport):
        assert (await transport.config()).max_batch_size == 4
