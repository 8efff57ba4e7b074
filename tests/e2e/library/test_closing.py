"""What is left when a server in the process has ended, in whatever way: nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import conch
from conch import Code, ConchError
from conch.library.app import loop_factory
from tests import certificates
from tests.events import Events, eventually
from tests.models import build, write

ROWS = {"INPUT0": list(range(16)), "INPUT1": list(range(16))}
BROKEN = 'backend: "python"\noutput { name: "O" data_type: TYPE_INT32 dims: [ 1 ] }'


def held() -> dict[str, Any]:
    """Everything that a server takes: processes, threads, descriptors and files.

    The threads that compute are the process's, and stay for the next server.
    """
    gc.collect()
    process = psutil.Process()
    threads = [thread.name for thread in threading.enumerate()]
    return {
        "children": process.children(recursive=True),
        "threads": sorted(name for name in threads if not name.startswith("computing_")),
        "descriptors": process.num_fds(),
        "files": sorted(Path(tempfile.gettempdir()).glob("conch-*")),
    }


def names(processes: Iterable[psutil.Process]) -> list[str]:
    return sorted(process.name() for process in processes)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Compare what there is after the test with what there was before."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    if (factory := loop_factory()) is not None:
        factory().close()  # the first loop of libuv opens a pipe that the process keeps
    before = held()
    yield
    with suppress(AssertionError):  # clients' own threads close their descriptors later on a busy machine
        eventually(lambda: held() == before, "the end")
    assert held() == before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build(tmp_path / "models", "add_sub")


def test_after_success(folder: Path) -> None:
    others = set(psutil.Process().children())  # of other tests of this session
    with conch.Server(model_repository=folder) as server:
        assert server.infer("add_sub", ROWS)["OUTPUT0"].tolist() == list(range(0, 32, 2))
        expected = ["conch-guard", "conch-template", "conch-worker"]
        eventually(lambda: names(set(psutil.Process().children()) - others) == expected, "their names")
    server.close()
    for call in (lambda: server.infer("add_sub", ROWS), server.metadata, server.start):
        with pytest.raises(ConchError) as raised:
            call()
        assert raised.value.code is Code.UNAVAILABLE
    assert not server.live()
    assert not server.ready("add_sub")


def test_after_ports_and_clients(folder: Path) -> None:
    with conch.Server(model_repository=folder, http_port=0, grpc_port=0, metrics_port=0) as server:
        assert sorted(server.urls) == ["grpc", "http", "metrics"]
        for kind in ("grpc", "http"):
            with conch.Client(server.urls[kind]) as client:
                client.infer("add_sub", ROWS)


def test_after_encrypted_ports_whose_urls_a_client_can_use(folder: Path, tmp_path: Path) -> None:
    certificates.make(tmp_path, "server")
    files = {"server_cert": str(tmp_path / "server.pem"), "server_key": str(tmp_path / "server.key")}
    flags: dict[str, Any] = {f"{kind}_{name}": value for kind in ("http", "grpc") for name, value in files.items()}
    flags |= {"http_use_ssl": True, "grpc_use_ssl": True}
    with conch.Server(model_repository=folder, http_port=0, grpc_port=0, metrics_port=0, **flags) as server:
        assert [server.urls[kind].partition(":")[0] for kind in ("http", "grpc", "metrics")] == [
            "https", "grpcs", "http",
        ]  # fmt: skip
        for kind in ("http", "grpc"):
            with conch.Client(server.urls[kind], authorities=files["server_cert"]) as client:
                client.infer("add_sub", ROWS)


def test_after_a_large_request(folder: Path) -> None:
    body = {"inputs": [{"name": name, "datatype": "INT32", "shape": [16], "data": row} for name, row in ROWS.items()]}
    body["parameters"] = {"filler": "x" * (1 << 20)}  # such that a process decodes it
    with conch.Server(model_repository=folder, http_port=0) as server:
        url = f"{server.urls['http']}/v2/models/add_sub/infer"
        with urllib.request.urlopen(url, json.dumps(body).encode()) as response:
            assert json.load(response)["outputs"][0]["data"] == list(range(0, 32, 2))


def test_after_an_exception_in_the_body(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), conch.Server(model_repository=folder):
        _ = 1 / 0


def test_after_a_model_that_does_not_load(folder: Path) -> None:
    write(folder, "broken", BROKEN, {"1/model.py": "raise SystemError('no')"})
    with pytest.raises(ConchError, match=r"failed to load all models .*SystemError: no"):
        conch.Server(model_repository=folder).start()


def test_after_a_port_that_is_taken(folder: Path) -> None:
    with conch.Server(model_repository=folder, http_port=0) as server:
        port = int(server.urls["http"].rpartition(":")[2])
        with pytest.raises(ConchError, match="already in use"):
            conch.Server(model_repository=folder, http_port=port, grpc_port=0).start()


def test_after_several_servers_at_the_same_time(folder: Path) -> None:
    with conch.Server(model_repository=folder) as one, conch.Server(model_repository=folder) as other:
        one.close()
        other.infer("add_sub", ROWS)


def test_call_that_is_interrupted_raises_the_interruption(folder: Path, tmp_path: Path) -> None:
    build(folder, "gate")
    code = (
        "import os, pathlib, signal, sys, threading, conch\n"
        "from tests.events import Events\n"
        "events = Events(pathlib.Path(sys.argv[2]))\n"
        # A shell's background jobs are started with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def interrupt():\n"
        "    events.wait('asked.started')\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "with conch.Server(model_repository=sys.argv[1]) as server:\n"
        "    threading.Thread(target=interrupt).start()\n"
        "    try:\n"
        "        server.infer('gate', {'EVENTS': sys.argv[2], 'NAME': 'asked'})\n"
        "    except KeyboardInterrupt:\n"
        "        events.wait('asked.cancelled')\n"
        "        print('interrupted')\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("interrupted\n", "")


def test_server_that_was_closed_does_not_start(folder: Path) -> None:
    async def start() -> None:
        server = conch.AsyncServer(model_repository=folder)
        await server.close()
        assert not await server.live()
        assert not await server.ready()
        with pytest.raises(ConchError, match="can be started only once"):
            await server.start()

    asyncio.run(start())


def test_calls_of_another_event_loop_are_refused(folder: Path) -> None:
    async def start() -> None:
        async with conch.AsyncServer(model_repository=folder) as server:
            for call in (lambda: server.infer("add_sub", ROWS), server.metadata, server.close):
                with pytest.raises(ConchError, match="bound to the event loop that started it"):
                    await asyncio.to_thread(asyncio.run, call())
            await server.infer("add_sub", ROWS)

    asyncio.run(start())


def test_after_garbage_collection(folder: Path) -> None:
    server = conch.Server(model_repository=folder).start()
    server.infer("add_sub", ROWS)
    with pytest.warns(ResourceWarning, match="unclosed server <conch.library.server.Server"):
        del server
        gc.collect()


def test_after_an_unloaded_and_an_uploaded_model(folder: Path) -> None:
    source = (folder / "add_sub" / "1" / "model.py").read_bytes()
    with conch.Server(model_repository=folder, model_control_mode="explicit") as server:
        config = '{"backend": "python", "input": [], "output": []}'
        with pytest.raises(ConchError):
            server.load("mine", config, {"1/model.py": b"raise ValueError"})
        server.load("add_sub")
        server.load("add_sub", server.config("add_sub"), {"1/model.py": source})
        server.infer("add_sub", ROWS)


def test_after_one_model_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match="has no checkpoint"):
        conch.Server(tmp_path).start()


def test_after_requests_that_were_running(folder: Path, tmp_path: Path) -> None:
    build(folder, "gate")
    events = Events(tmp_path)
    answers: list[Any] = []

    def ask(server: conch.Server, name: str) -> None:
        try:
            answers.append(server.infer("gate", {"EVENTS": str(tmp_path), "NAME": name})["OUTPUT"].tolist())
        except ConchError as error:
            answers.append(error.code)

    for name, seconds in (("finished", 30), ("given-up", 0)):
        with conch.Server(model_repository=folder, exit_timeout_secs=seconds) as server:
            thread = threading.Thread(target=ask, args=(server, name))
            thread.start()
            events.wait(f"{name}.started")
            if name == "finished":
                events.set("finished.go")
        thread.join()
    assert answers[0] == [[b"finished"]]
    assert answers[1] in (Code.INTERNAL, Code.UNAVAILABLE, Code.CANCELLED)


def slow(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Events:
    build(folder, "slow_load", group="e2e")
    monkeypatch.setenv("EVENTS", str(tmp_path))
    return Events(tmp_path)


def test_after_a_start_that_was_interrupted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = slow(folder, tmp_path, monkeypatch)

    async def give_up() -> None:
        starting = asyncio.ensure_future(conch.AsyncServer(model_repository=folder).start())
        await asyncio.to_thread(events.wait, "loading")
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(give_up())


def test_after_a_load_that_was_in_progress(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = slow(folder, tmp_path, monkeypatch)

    async def leave() -> None:
        options = {"model_control_mode": "explicit", "load_model": "add_sub"}
        async with conch.AsyncServer(model_repository=folder, **options) as server:
            loading = asyncio.ensure_future(server.load("slow_load"))
            await asyncio.to_thread(events.wait, "loading")
        with pytest.raises(ConchError) as raised:
            await loading
        assert raised.value.code is Code.UNAVAILABLE

    asyncio.run(leave())


def test_after_an_async_server(folder: Path, tmp_path: Path) -> None:
    build(folder, "gate")
    events = Events(tmp_path)

    async def ask() -> None:
        async with conch.AsyncServer(model_repository=folder) as server:
            results = await asyncio.gather(*(server.infer("add_sub", ROWS) for _ in range(10)))
            assert len(results) == 10
            waiting = asyncio.ensure_future(server.infer("gate", {"EVENTS": str(tmp_path), "NAME": "given-up"}))
            await asyncio.to_thread(events.wait, "given-up.started")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(events.wait, "given-up.cancelled")
        assert not await server.live()
        assert not await server.ready("add_sub")

    asyncio.run(ask())


def test_after_garbage_collection_on_a_loop(folder: Path) -> None:
    others = set(psutil.Process().children())  # of other tests of this session

    async def forget() -> None:
        server = await conch.AsyncServer(model_repository=folder).start()
        with pytest.warns(ResourceWarning, match="unclosed server"):
            del server
            gc.collect()
        while set(psutil.Process().children()) - others:
            await asyncio.sleep(0.01)

    asyncio.run(forget())


def test_at_the_end_of_the_process(folder: Path, tmp_path: Path) -> None:
    build(folder, "gate")
    code = (
        "import os, sys, conch, psutil\n"
        f"server = conch.Server(model_repository={str(folder)!r}, exit_timeout_secs=3600).start()\n"
        f"stream = server.infer_stream('gate', {{'EVENTS': {str(tmp_path)!r}, 'NAME': 'kept'}})\n"
        "print(*(child.pid for child in psutil.Process().children()), flush=True)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 4  # two workers, what they were forked from, and the guard
    eventually(lambda: not any(map(psutil.pid_exists, pids)), "the end of the workers")
    assert "ResourceWarning: unclosed server" in result.stderr
    assert "Traceback" not in result.stderr


FORK = """
import os, sys, conch
with conch.Server(model_repository=sys.argv[1]) as server:
    pid = os.fork()
    if pid == 0:
        try:
            server.metadata()
        except conch.ConchError as error:
            print(error.code, error, flush=True)
        server.close()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print(server.infer("add_sub", {"INPUT0": range(16), "INPUT1": range(16)})["OUTPUT1"].sum())
"""


def test_fork_neither_uses_nor_closes_its_parent_s_server(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FORK, str(folder)], capture_output=True, text=True, check=True, timeout=60
    )
    refused, answer = result.stdout.splitlines()
    assert refused.startswith("Code.UNAVAILABLE the server belongs to process")
    assert answer == "0"
