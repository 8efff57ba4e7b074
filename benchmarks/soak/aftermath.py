"""What has to be as before once the clients have gone and nothing is broken any more."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Final

import psutil

from tests.e2e.processes import alive
from tests.servers import ConchServer

#: How long (s) the server may take to clear up.
_GRACE: Final = 30.0


def still_kept(server: ConchServer) -> list[str]:
    """What a server that runs still keeps of requests that are over."""
    return [*_late(lambda: _pending(server)), *_late(lambda: _regions(server))]


def processes(server: ConchServer) -> list[psutil.Process]:
    """The server's children, and theirs."""
    assert server.process is not None
    return list(psutil.Process(server.process.pid).children(recursive=True))


def still_running(children: list[psutil.Process]) -> list[str]:
    """Which children of a server that has ended have not."""
    return _late(lambda: [f"process {child.pid} outlived the server" for child in children if alive(child)])


def unread_traces(folder: Path) -> list[str]:
    """Which trace files cannot be read; one that the disk had no room for is empty."""
    files = [path for path in folder.glob("trace.json*") if path.stat().st_size]
    problems = [] if files else ["the server wrote no traces"]
    for path in files:
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            problems.append(f"{path.name}: {error}")
    return problems


def _late(look: Callable[[], list[str]]) -> list[str]:
    """What ``look`` still finds when time is up."""
    until = monotonic() + _GRACE
    while (remaining := look()) and monotonic() < until:
        sleep(0.1)
    return remaining


def _pending(server: ConchServer) -> list[str]:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        metrics = page.read().decode()
    return [f"still pending: {line}" for line in re.findall(r"nv_inference_pending_request_count.* [1-9]\d*", metrics)]


def _regions(server: ConchServer) -> list[str]:
    with urllib.request.urlopen(f"http://{server.http}/v2/systemsharedmemory/status") as reply:
        return [f"still registered: {region['name']}" for region in json.load(reply)]
