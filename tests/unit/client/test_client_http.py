"""``conch.Client`` over HTTP, with servers that stall, drip, disconnect and die."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conch
from conch.client.http import fetch
from conch.core.errors import Code, ConchError

CONFIG = {
    "name": "m",
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
}
DECOUPLED = {**CONFIG, "model_transaction_policy": {"decoupled": True}}
INPUTS = {"x": [1.0]}
#: Calls with their arguments.
WITH_TIMEOUT = [
    ("metadata",), ("metadata", "m"), ("config", "m"), ("statistics",), ("models",), ("load", "m"), ("unload", "m"),
]  # fmt: skip
HEALTH = [("live",), ("ready",), ("ready", "m")]


class Connection:
    """The server's end of a connection."""

    def __init__(self, accepted: socket.socket, closing: threading.Event) -> None:
        self._socket = accepted
        self._file = accepted.makefile("rb")
        self.closing = closing

    def read(self) -> str:
        """Read a request; returns its method and path, nothing where the client has hung up."""
        first, *_ = self._file.readline().decode().split(" HTTP/")
        length = 0
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            if name.lower() == "content-length":
                length = int(value)
        self._file.read(length)
        return first

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self, document: dict[str, Any] | list[Any]) -> None:
        body = json.dumps(document).encode()
        self.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    def drip(self, data: bytes) -> None:
        """Write ``data`` again and again, a little at a time, until the test ends or the client disconnects."""
        while not self.closing.wait(0.02):
            self.write(data)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@contextmanager
def listening(*connections: Callable[[Connection], None]) -> Iterator[str]:
    """The address of a server whose connections are dealt with by these functions, in turn."""
    closing = threading.Event()

    def serve() -> None:
        for handle in connections:
            try:
                accepted, _ = listener.accept()
                connection = Connection(accepted, closing)
                try:
                    handle(connection)
                finally:
                    connection.close()
            except OSError:  # the client or the test has gone
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            closing.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def served(*connections: Callable[[Connection], None]) -> Iterator[conch.Client]:
    """A client of a server whose connections are dealt with by these functions, in turn."""
    with listening(*connections) as address, conch.Client(f"http://{address}") as client:
        yield client


def silent(connection: Connection) -> None:
    connection.read()
    connection.closing.wait()


def test_a_server_that_does_not_say_what_its_model_takes_has_the_timeout_of_the_call() -> None:
    with (
        served(silent) as client,
        pytest.raises(ConchError, match=r"no response from model 'm' within 0\.2 s") as caught,
    ):
        client.infer("m", INPUTS, timeout=0.2)
    assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("arguments", WITH_TIMEOUT, ids=lambda arguments: arguments[0])
def test_every_call_has_its_timeout(arguments: tuple[str, ...]) -> None:
    name, *given = arguments
    with served(silent) as client, pytest.raises(ConchError, match=r"no response from .* within 0\.2 s") as caught:
        getattr(client, name)(*given, timeout=0.2)
    assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("arguments", HEALTH, ids=" ".join)
def test_a_server_that_does_not_answer_in_time_is_not_live_or_ready(arguments: tuple[str, ...]) -> None:
    name, *given = arguments
    with served(silent) as client:
        assert getattr(client, name)(*given, timeout=0.2) is False


def test_interim_responses_are_skipped() -> None:
    def hinting(connection: Connection) -> None:
        for _ in range(2):
            connection.read()
            connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            connection.write(b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n" * 2)
            connection.answer(CONFIG)

    with served(hinting) as client:
        assert [client.config("m")["name"] for _ in range(2)] == ["m", "m"]


def test_a_server_that_changes_the_protocol_gives_no_answer() -> None:
    def changing(connection: Connection) -> None:
        connection.read()
        connection.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")

    with served(changing) as client, pytest.raises(ConchError, match="HTTP status 101"):
        client.config("m")


@pytest.mark.parametrize(
    ("head", "more"),
    [(b"HTTP/1.1 200 OK\r\nX: ", b"x"), (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" ")],
    ids=["head", "body"],
)
def test_a_response_that_drips_has_the_timeout_of_the_call(head: bytes, more: bytes) -> None:
    def dripping(connection: Connection) -> None:
        connection.read()
        connection.answer(CONFIG)
        connection.read()
        connection.write(head)
        connection.drip(more)

    with served(dripping) as client, pytest.raises(ConchError, match=r"no response from model 'm' within 0\.3 s"):
        client.infer("m", INPUTS, timeout=0.3)


def test_a_stream_that_drips_has_the_timeout_of_the_call() -> None:
    def dripping(connection: Connection) -> None:
        connection.read()
        connection.answer(DECOUPLED)
        connection.read()
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\ndata: ")
        connection.drip(b" ")

    with served(dripping) as client, pytest.raises(ConchError, match=r"no response from model 'm' within 0\.3 s"):
        next(client.infer_stream("m", INPUTS, timeout=0.3))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"shape": [2], "parameters": {"binary_data_size": 8}}, "the response lacks 8 bytes of its outputs"),
        ({"data": [1.0]}, "the response is not an inference response: KeyError 'shape'"),
        ({"shape": [1]}, "output 'y' of model 'm' has no data"),
        ({"shape": [2], "data": [1.0]}, r"output 'y' of the response is not FP32 of shape \[2\]"),
        ({"shape": [1], "data": ["a"]}, r"output 'y' of the response is not FP32 of shape \[1\]"),
        ({"shape": [1], "data": [1], "datatype": "BYTES"}, r"output 'y' of the response is not BYTES of shape \[1\]"),
        ({"shape": [1], "data": [1], "datatype": "X"}, r"output 'y' of the response is not X of shape \[1\]"),
    ],
)
def test_response_without_a_part_of_an_output_is_an_error_of_the_server(output: dict[str, Any], message: str) -> None:
    def responding(connection: Connection) -> None:
        while request := connection.read():
            response = {
                "model_name": "m",
                "model_version": "1",
                "outputs": [{"name": "y", "datatype": "FP32", **output}],
            }
            connection.answer(CONFIG if request.startswith("GET") else response)

    with served(responding) as client, pytest.raises(ConchError, match=message) as caught:
        client.infer("m", INPUTS)
    assert caught.value.code is Code.INTERNAL


@pytest.mark.parametrize("name", ["priority", "sequence_id"])
@pytest.mark.parametrize("number", [-1, 2**64, 1.5, np.int64(1)])
def test_numbers_that_some_protocol_cannot_carry_are_refused(name: str, number: Any) -> None:
    with served(lambda connection: connection.answer(CONFIG) if connection.read() else None) as client:
        with pytest.raises(ConchError, match=f"^{name} must be ") as caught:
            client.infer("m", INPUTS, **{name: number})
    assert caught.value.code is Code.INVALID_ARG


CALLS: dict[str, Callable[[conch.Client], object]] = {
    "infer": lambda client: client.infer("m", INPUTS),
    "sequence": lambda client: client.infer("m", INPUTS, sequence_id=1, sequence_start=True),
    "load": lambda client: client.load("m"),
    "unload": lambda client: client.unload("m"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_request_whose_connection_breaks_after_it_was_sent_is_not_sent_again(
    call: Callable[[conch.Client], object],
) -> None:
    changes: list[str] = []

    def dying(connection: Connection) -> None:
        while (request := connection.read()).startswith("GET"):
            connection.answer(CONFIG)
        changes.append(request)

    def living(connection: Connection) -> None:
        while request := connection.read():
            if request != "POST /v2/repository/index":
                changes.append(request)
            connection.answer([])

    with served(dying, living) as client:
        client.config("m")
        with pytest.raises(ConchError, match="does not respond: the server closed the connection") as caught:
            call(client)
        assert client.models() == []
    assert caught.value.code is Code.UNAVAILABLE
    assert len(changes) == 1


@pytest.mark.parametrize("call", [conch.Client.live, conch.Client.models])
def test_a_query_whose_connection_breaks_is_retried(call: Callable[[conch.Client], object]) -> None:
    asked: list[str] = []

    def dying(connection: Connection) -> None:
        asked.append(connection.read())
        connection.answer([])
        asked.append(connection.read())

    def living(connection: Connection) -> None:
        asked.append(connection.read())
        connection.answer([])

    with served(dying, living) as client:
        assert call(client) == call(client)
    assert len(asked) == 3


def test_a_load_on_a_connection_that_the_server_has_closed_is_sent_on_another() -> None:
    closed = threading.Event()
    loads: list[str] = []

    def leaving(connection: Connection) -> None:
        connection.read()
        connection.answer(CONFIG)
        connection.close()
        closed.set()

    def living(connection: Connection) -> None:
        loads.append(connection.read())
        connection.answer({})

    with served(leaving, living) as client:
        client.config("m")
        closed.wait()
        client.load("m")
    assert loads == ["POST /v2/repository/models/m/load"]


def test_a_web_page_in_place_of_a_document_is_an_error_of_the_server() -> None:
    def page(connection: Connection) -> None:
        while connection.read():
            connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>")

    with served(page) as client:
        for call in (client.metadata, client.statistics):
            with pytest.raises(ConchError, match="does not return a JSON object") as caught:
                call("m")
            assert caught.value.code is Code.INTERNAL
        with pytest.raises(ConchError, match="POST /v2/repository/index does not return a JSON array") as caught:
            client.models()
        assert caught.value.code is Code.INTERNAL


@pytest.mark.parametrize(
    ("response", "code", "message"),
    [
        (b"503 No\r\nContent-Type: text/html\r\n\r\n<html>\n<p>Try later\n", Code.UNAVAILABLE, "<html> <p>Try later"),
        (b'404 No\r\nContent-Type: application/json\r\n\r\n{"error":\n"no m"}', Code.NOT_FOUND, "no m"),
        (b'400 No\r\nContent-Type: text/event-stream\r\n\r\ndata: {"error":"no"}\n\n', Code.INVALID_ARG, "no"),
        (b"200 OK\r\nContent-Type: text/html\r\n\r\n<html>\n", Code.INTERNAL, "an event without a response: b'<html>'"),
        (b"200 OK\r\n\r\ndata: [1]\n\n", Code.INTERNAL, r"an event without a response: b'\[1\]'"),
    ],
)
def test_response_that_is_not_a_stream_is_an_error_of_the_server(response: bytes, code: Code, message: str) -> None:
    def responding(connection: Connection) -> None:
        connection.read()
        connection.answer(DECOUPLED)
        connection.read()
        connection.write(b"HTTP/1.1 " + response)

    with served(responding) as client, client.infer_stream("m", INPUTS) as stream:
        with pytest.raises(ConchError, match=message) as caught:
            next(stream)
        assert caught.value.code is code and list(stream) == []


def test_a_configuration_of_a_newer_server_is_read_without_its_new_fields() -> None:
    def newer(connection: Connection) -> None:
        connection.read()
        connection.answer({**CONFIG, "invented_later": {"count": 1}})

    with served(newer) as client:
        assert client.config("m")["name"] == "m"


def test_a_page_is_fetched_with_a_timeout_for_all_of_it() -> None:
    def page(connection: Connection) -> None:
        assert connection.read() == "GET /metrics?x=1"
        connection.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone")

    def dripping(connection: Connection) -> None:
        connection.read()
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        connection.drip(b" ")

    with listening(page, dripping) as address:
        assert fetch(f"http://{address}/metrics?x=1", 10) == (404, b"none")
        with pytest.raises(ConchError, match=r"no response from the server within 0\.2 s"):
            fetch(f"http://{address}", 0.2)


@pytest.mark.parametrize("url", ["ftp://localhost/", "http://", "http://localhost:port/"])
def test_a_page_with_another_kind_of_url_is_refused(url: str) -> None:
    with pytest.raises(ConchError, match="is not an HTTP URL") as caught:
        fetch(url, 1)
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("scheme", ["grpcs", "https"])
@pytest.mark.parametrize(
    ("option", "message"),
    [("authorities", "cannot be used as CA certificates"), ("certificate", "cannot be used as a client certificate")],
)
def test_a_file_without_certificates_is_refused(scheme: str, option: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "file.pem"
    file.write_text("nothing")

    with pytest.raises(ConchError, match=f"file.pem {message}") as caught:
        conch.Client(f"{scheme}://localhost:1", **{option: str(file)})
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("call", [lambda url: conch.Client(url).metadata(), lambda url: fetch(url, 10)])
def test_an_unreachable_server_is_named_as_in_its_url_without_credentials(call: Callable[[str], object]) -> None:
    with pytest.raises(ConchError, match=r"^\[::1\]:1 does not respond: "):
        call("http://user:secret@[::1]:1")
