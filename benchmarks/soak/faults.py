"""Causes faults during the soak: one every second or two, chosen at random."""

from __future__ import annotations

import json
import random
import resource
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from time import sleep
from typing import Any, Final

import psutil

from benchmarks.soak.repository import replace_echo
from tests.e2e.processes import templates, workers
from tests.servers import ConchServer

#: How long (s) resources are unavailable, and how long a slowed worker is delayed.
_DROUGHT: Final = 2.0
_HELD_UP: Final = 0.3
_VANISHING: Final = 30


class Faults:
    """A thread that causes faults in ``server``, all kinds or ``only`` some; ``done`` counts the faults by name."""

    def __init__(self, server: ConchServer, repository: Path, seed: int, only: Collection[str] = ()) -> None:
        assert server.process is not None
        self.done: Counter[str] = Counter()
        self._server = server
        self._process = psutil.Process(server.process.pid)
        self._repository = repository
        self._chance = random.Random(seed)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._marks = 0
        #: Each fault, and its relative frequency.
        faults: dict[str, tuple[Callable[[], None], int]] = {
            "worker killed": (self._kill, 3),
            "worker stopped": (self._stop, 2),
            "worker slowed": (self._slow, 4),
            "template killed": (self._kill_template, 1),
            "model reloaded": (self._reload, 3),
            "model replaced": (self._replace, 3),
            "model unloaded, loaded again": (self._unload, 4),
            "clients vanished": (self._vanish, 4),
            "descriptors ran out": (self._descriptors, 1),
            "disk ran out": (self._disk, 1),
        }
        self._faults = {name: fault for name, fault in faults.items() if name in (only or faults)}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait until the last fault has ended and is repaired."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        names = list(self._faults)
        weights = [weight for _, weight in self._faults.values()]
        while not self._stopped.wait(self._chance.uniform(0.5, 2.0)):
            name = self._chance.choices(names, weights)[0]
            self._faults[name][0]()
            self.done[name] += 1

    def _worker(self) -> psutil.Process | None:
        processes = workers(self._server)
        return self._chance.choice(processes) if processes else None

    def _signal(self, number: int) -> psutil.Process | None:
        worker = self._worker()
        try:
            if worker is not None:
                worker.send_signal(number)
        except psutil.NoSuchProcess:
            return None
        return worker

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _kill_template(self) -> None:
        for template in templates(self._server)[-1:]:
            template.kill()

    def _stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def _slow(self) -> None:
        worker = self._signal(signal.SIGSTOP)
        sleep(_HELD_UP)
        if worker is not None:
            try:
                worker.send_signal(signal.SIGCONT)
            except psutil.NoSuchProcess:
                pass

    def _reload(self) -> None:
        self._control(self._chance.choice(("echo", "other", "twice", "encoder", "writer", "repeat", "relay")), "load")

    def _replace(self) -> None:
        self._marks += 1
        name = self._chance.choice(("echo", "other"))
        replace_echo(self._repository, name, self._marks)
        self._control(name, "load")

    def _unload(self) -> None:
        name = self._chance.choice(("spare", "repeat", "encoder", "cached", "limited", "ragged"))
        self._control(name, "unload")
        self._control(name, "load")

    def _vanish(self) -> None:
        """Disconnect in the middle of requests: in heads, in bodies, and while waiting for the response."""
        body = json.dumps({"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["x" * 100_000]}]})
        request = (
            f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        host, port = self._server.http.split(":")
        for _ in range(_VANISHING):
            try:
                with socket.create_connection((host, int(port)), timeout=5) as connection:
                    connection.sendall(request[: self._chance.choice((30, 50_000, len(request)))])
            except OSError:
                pass

    def _descriptors(self) -> None:
        """Limit the server to a few descriptors more than it has."""
        self._without(resource.RLIMIT_NOFILE, self._process.num_fds() + 3)

    def _disk(self) -> None:
        """Make every write to a file fail, also to shared memory files."""
        self._without(resource.RLIMIT_FSIZE, 0)

    def _without(self, limit: int, value: int) -> None:
        before = self._process.rlimit(limit)
        self._process.rlimit(limit, (value, before[1]))
        try:
            sleep(_DROUGHT)
        finally:
            self._process.rlimit(limit, before)

    def _control(self, model: str, action: str) -> None:
        """Load or unload a model; it may fail for lack of resources, and the next fault tries again."""
        url = f"http://{self._server.http}/v2/repository/models/{model}/{action}"
        request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                reply.read()
        except urllib.error.HTTPError as error:
            self.done[f"{action} failed: {_message(error)[:120]}"] += 1
        except OSError as error:
            self.done[f"{action} failed: {error!s:.80}"] += 1


def _message(error: urllib.error.HTTPError) -> str:
    body: Any = error.read()
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError):
        return repr(body)
