"""``conch.serve`` blocks and ends as the command does."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import conch
from conch import Code, ConchError
from tests.events import eventually
from tests.models import build
from tests.oracle.run import free_ports

PROGRAM = """
import logging, os, signal, sys, conch
http, grpc = map(int, sys.argv[2:])
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, lambda number, frame: print("the program's own handler"))
logging.getLogger("conch").setLevel(logging.WARNING)
print("status", conch.serve(model_repository=sys.argv[1], http_port=http, grpc_port=grpc, allow_metrics=False))
print(logging.getLogger().handlers)
print(logging.getLevelName(logging.getLogger("conch").level))
os.kill(os.getpid(), signal.SIGTERM)
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    build(tmp_path / "models", "add_sub")
    ports = free_ports(2)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "models"), *map(str, ports)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        with conch.Client(f"http://127.0.0.1:{ports[0]}") as client:
            eventually(client.ready, "readiness", 60)
            assert client.infer("add_sub", {"INPUT0": range(16), "INPUT1": range(16)})["OUTPUT1"].tolist() == [0] * 16
        process.send_signal(number)
        output, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.splitlines() == ["status 0", "[]", "WARNING", "the program's own handler", "interrupted"]
    assert "Started HTTPService" in log
    assert f"Started Console at http://127.0.0.1:{ports[0]}/console/" in log


def test_it_is_refused_where_no_signal_comes(tmp_path: Path) -> None:
    errors: list[ConchError] = []

    def serve() -> None:
        try:
            conch.serve(model_repository=tmp_path)
        except ConchError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()

    async def on_a_loop() -> None:
        serve()

    asyncio.run(on_a_loop())
    assert [error.code for error in errors] == [Code.UNSUPPORTED] * 2
    assert "use conch.Server" in errors[0].message
    assert "use conch.AsyncServer" in errors[1].message


def test_server_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match="did you mean 'http_port'"):
        conch.serve(model_repository=tmp_path, http_prot=1)


@pytest.mark.parametrize(
    ("mode", "more"),
    [("none", "; this server runs with --model-control-mode=none: start it with explicit"), ("poll", "")],
)
def test_loads_are_refused_with_the_mode_that_takes_them(tmp_path: Path, mode: str, more: str) -> None:
    with conch.Server(model_repository=tmp_path, model_control_mode=mode, http_port=0, grpc_port=0) as server:
        for call in (server.load, server.unload):
            with pytest.raises(ConchError, match=f"'explicit' or 'on-demand'; this server has '{mode}'") as raised:
                call("m")
            assert raised.value.code is Code.UNAVAILABLE
        for protocol in ("http", "grpc"):
            with conch.Client(server.urls[protocol]) as client, pytest.raises(ConchError) as refused:
                client.load("m")
            message = "explicit model load / unload is not allowed if polling is enabled"
            assert (refused.value.code, refused.value.message) == (Code.UNAVAILABLE, message + more)
