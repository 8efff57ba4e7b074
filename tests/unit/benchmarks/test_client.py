"""The load generator of the benchmark of text generation, against a server that makes up its answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.generation.alone import Loop
from benchmarks.generation.client import Target, drive
from benchmarks.generation.trace import Ask, Load
from tests.unit.backends.generation.fake_engine import FakeEngine


class Stub(BaseHTTPRequestHandler):
    """llama.cpp's protocol; answers ``prompt`` once for each token, and has no answer for ``bad``."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.prompts.append(body["prompt"])
        if body["prompt"] == "bad":
            self.send_error(400, "a bad prompt")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(body["n_predict"]):
            self._chunk({"content": body["prompt"]})
        self._chunk({"content": "", "stop": True, "tokens_predicted": body["n_predict"]})
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *values: Any) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.prompts = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def target(server: Any) -> Target:
    return Target(f"127.0.0.1:{server.server_port}", "llama", "m")


def test_a_closed_loop_asks_everything_once(stub: Any) -> None:
    asks = [Ask(f"p{number} ", 3) for number in range(10)]
    records = drive(target(stub), Load(asks, 4))
    assert sorted(stub.prompts) == sorted(ask.prompt for ask in asks)
    assert sorted(record.text for record in records) == sorted(ask.prompt * 3 for ask in asks)
    assert [record.counted for record in records] == [3] * 10


def test_a_closed_loop_gives_each_connection_its_least(stub: Any) -> None:
    records = drive(target(stub), Load([Ask("p", 2)] * 100, 3, seconds=0, least=2))
    assert len(records) == 6


def test_arrivals_come_on_top_of_the_closed_loop(stub: Any) -> None:
    load = Load([Ask("closed", 2)] * 3, 1, arrivals=[(0.0, Ask("open", 1)), (0.01, Ask("open", 1))])
    records = drive(target(stub), load)
    assert sorted((record.text, record.arrival) for record in records) == [
        *[("closedclosed", False)] * 3,
        *[("open", True)] * 2,
    ]
    due = sorted(record.due for record in records if record.arrival)
    assert due[1] - due[0] == 10_000_000


def test_an_error_ends_the_run_with_what_the_server_says(stub: Any) -> None:
    with pytest.raises(RuntimeError, match="HTTP 400"):
        drive(target(stub), Load([Ask("good", 1), Ask("bad", 1)], 1))


def test_no_listener_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="llama: "):
        drive(Target("127.0.0.1:1", "llama", "m"), Load([Ask("p", 1)], 1))


def test_the_engine_alone_has_as_many_sequences_as_there_are_connections() -> None:
    engine = FakeEngine()
    loop = Loop(engine, [([ord("a")], 5)] * 10, Load(connections=3))
    assert loop.run() > 0
    assert loop.tokens == 50
    assert engine.most == 3
    assert not engine.busy


def test_the_engine_alone_stops_when_each_place_has_had_its_least() -> None:
    loop = Loop(FakeEngine(), [([ord("a")], 5)] * 10, Load(connections=3, seconds=0, least=2))
    loop.run()
    assert loop.tokens == 30
