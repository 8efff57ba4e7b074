"""Orphans that a fork makes children of this process, and what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conch.workers.host import templates
from conch.workers.host.templates import Templates, adopting
from tests.events import eventually

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not Path(f"/proc/self/task/{os.getpid()}/children").exists(),
    reason="this kernel adopts no orphans, or does not list them",
)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(templates, "CHECK_SECONDS", 0.01)
    yield
    eventually(lambda: not is_watching(), "the end of the thread that waits for orphans")


def begun_before() -> tuple[subprocess.Popen[bytes], int]:
    """A shell that exits on request, and the program that it leaves behind."""
    shell = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; read line"], stdin=-1, stdout=-1)
    assert shell.stdin is not None and shell.stdout is not None
    return shell, int(shell.stdout.readline())


def end(shell: subprocess.Popen[bytes]) -> None:
    assert shell.stdin is not None and shell.stdout is not None
    shell.stdin.close()
    shell.stdout.close()
    shell.wait()


def is_zombie(pid: int) -> bool:
    return psutil.pid_exists(pid) and bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def is_watching() -> bool:
    """Whether a thread waits for orphans."""
    return any(thread.name == "conch-reaper" for thread in threading.enumerate())


@pytest.mark.parametrize("begins", ["before the fork", "during the fork"])
def test_orphan_of_another_program_is_waited_for(monkeypatch: pytest.MonkeyPatch, begins: str) -> None:
    monkeypatch.setattr(templates, "CLAIM_SECONDS", 0)
    if begins == "before the fork":
        shell, orphan = begun_before()
    with adopting():
        if begins == "during the fork":
            shell, orphan = begun_before()
        end(shell)
        assert psutil.Process(orphan).ppid() == os.getpid()
    os.kill(orphan, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(orphan), "the end of the orphan")


def test_program_that_was_started_during_a_fork_is_left_to_its_starter() -> None:
    with adopting():
        started = subprocess.Popen(["sh", "-c", "exit 7"])
        shell, orphan = begun_before()
        end(shell)
    os.kill(orphan, signal.SIGKILL)
    eventually(lambda: is_zombie(started.pid), "the end of the program")
    assert started.wait() == 7
    os.waitpid(orphan, 0)


def test_child_that_the_fork_was_for_is_left_to_its_owner() -> None:
    with adopting() as children:
        started = subprocess.Popen(["sh", "-c", "exit 7"])
        children.add(started.pid)
    assert not is_watching()
    assert started.wait() == 7


async def test_closing_a_server_ends_the_thread_that_waits_for_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "CHECK_SECONDS", 1000)
    with adopting():
        started = subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE)
    await Templates(60).close()
    assert is_watching(), "the program has not ended"
    started.communicate()
    await Templates(60).close()
    assert not is_watching()


def test_orphans_are_not_adopted_otherwise() -> None:
    with adopting():
        pass
    shell, orphan = begun_before()
    end(shell)
    assert psutil.Process(orphan).ppid() != os.getpid()
    os.kill(orphan, signal.SIGKILL)
