"""The processes of a server, and their memory."""

from __future__ import annotations

import psutil

from tests.servers import ConchServer

#: What a process is called that workers are forked from.
TEMPLATE = "conch-template"


def workers(server: ConchServer) -> list[psutil.Process]:
    """The server's worker processes, oldest first."""
    assert server.process is not None
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sorted((c for c in children if is_worker(c)), key=lambda child: child.pid)


def is_worker(process: psutil.Process) -> bool:
    try:
        return process.name() != TEMPLATE and any(part.endswith("child/worker.py") for part in process.cmdline())
    except psutil.Error:
        return False


def templates(server: ConchServer) -> list[psutil.Process]:
    """The processes that the server's workers are forked from, oldest first."""
    assert server.process is not None
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sorted((c for c in children if is_template(c)), key=lambda child: child.pid)


def is_template(process: psutil.Process) -> bool:
    try:
        return bool(process.name() == TEMPLATE)
    except psutil.Error:
        return False


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
