"""Templates: real ones, which fork processes that the test owns, and their ends on a clock that is none."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from conch.machine.processes import Activity
from conch.workers.child.channel import Endpoint, write
from conch.workers.host.spawn import ChildProcess
from conch.workers.host.templates import FORK_SECONDS, Template, TemplateKind, Templates, spawn_template
from tests.events import TIMEOUT
from tests.unit.fake_clock import fake_clock, settle

MODULE = "conch.workers.child.channel"


@pytest.fixture
def patient_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a fork take longer than a test waits."""
    monkeypatch.setattr("conch.workers.host.templates.FORK_SECONDS", 10 * TIMEOUT)


class Owner:
    """Takes a forked worker, and waits for its end."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.lines: list[str] = []
        self.process: ChildProcess
        self.connection: socket.socket

    async def end(self) -> None:
        self.process.kill()
        await self.ended.wait()
        self.connection.close()

    async def start(self, templates: Templates, kind: TemplateKind | None) -> Owner:
        assert kind is not None
        forked = await templates.fork(kind, {})
        assert forked is not None
        self.process, self.connection = forked.take("", {}, self.ended.set, self.lines.append)
        return self


def kind_of(templates: Templates, module: str = MODULE, **variables: str) -> TemplateKind:
    kind = templates.kind_of(sys.executable, {**os.environ, **variables}, module)
    assert kind is not None
    return kind


async def test_what_a_template_forks_is_a_child_of_this_process_which_is_told_of_its_end() -> None:
    templates = Templates(60)
    kind = kind_of(templates)
    owners = [await Owner().start(templates, kind) for _ in range(2)]
    [template] = templates.pids
    forked = [psutil.Process(owner.process.pid) for owner in owners]
    assert [process.ppid() for process in (psutil.Process(template), *forked)] == [os.getpid()] * 3
    owners[0].process.kill()
    await owners[0].ended.wait()
    owners[1].connection.close()  # a worker without a server ends itself
    await owners[1].ended.wait()
    assert [owner.process.exit_status for owner in owners] == [-signal.SIGKILL, 1]
    owners[0].connection.close()
    await templates.close()
    assert not any(map(psutil.pid_exists, [template, *(process.pid for process in forked)]))


async def test_what_it_forked_lives_on_when_a_template_is_killed_and_the_next_comes_from_another() -> None:
    templates = Templates(60)
    kind = kind_of(templates)
    first = await Owner().start(templates, kind)
    [killed] = templates.pids
    os.kill(killed, signal.SIGKILL)
    while templates.pids:
        await asyncio.sleep(0.01)
    second = await Owner().start(templates, kind)
    assert templates.pids not in ([], [killed])
    assert not first.ended.is_set()
    await templates.close()
    await first.end()
    await second.end()


async def test_a_template_may_end_in_the_midst_of_a_fork_then_a_worker_is_spawned() -> None:
    templates = Templates(60)
    kind = kind_of(templates)
    owner = await Owner().start(templates, kind)
    os.kill(templates.pids[0], signal.SIGSTOP)
    forking = asyncio.create_task(templates.fork(kind, {}))
    await asyncio.sleep(0)
    os.kill(templates.pids[0], signal.SIGKILL)
    assert await forking is None
    await owner.end()
    await templates.close()


class FakeProcess:
    """A process that never ends by itself, and of which nobody has to be told."""

    pid = 0
    exit_status: int | None = None

    def kill(self) -> None: ...


async def test_a_fork_ends_with_its_template_even_where_another_process_holds_the_other_end(
    patient_forks: None,
) -> None:
    """As one does that it has just forked, which has not closed it yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    theirs.send(json.dumps({"problem": ""}).encode())
    ends: list[Callable[[], None]] = []

    def spawn(*arguments: Any) -> tuple[ChildProcess, socket.socket]:
        ends.append(arguments[2])
        return FakeProcess(), ours

    templates = Templates(60, spawn)
    with theirs:
        forking = asyncio.create_task(templates.fork(kind_of(templates), {}))
        loop = asyncio.get_running_loop()
        asked = [json.loads(await loop.sock_recv(theirs, 1 << 20))["op"] for _ in range(2)]
        ends[0]()
        assert await asyncio.wait_for(forking, TIMEOUT) is None
    assert asked == ["import", "fork"]
    assert ours.fileno() < 0
    await templates.close()


@pytest.mark.parametrize(("pause", "attempts"), [(600.0, 3), (0.0, 5)])
async def test_where_forks_fail_templates_are_tried_three_times_until_a_pause_is_over(
    monkeypatch: pytest.MonkeyPatch, pause: float, attempts: int
) -> None:
    @contextmanager
    def forbidden() -> Iterator[None]:
        raise PermissionError("a sandbox forbids it")
        yield

    monkeypatch.setattr("conch.workers.host.templates.adopting", forbidden)
    monkeypatch.setattr("conch.workers.host.templates.PAUSE_SECONDS", pause)
    spawned = []

    def counted(*arguments: Any) -> tuple[ChildProcess, socket.socket]:
        spawned.append(1)
        return spawn_template(*arguments)

    templates = Templates(60, counted)
    kind = kind_of(templates)
    assert [await templates.fork(kind, {}) for _ in range(5)] == [None] * 5
    assert len(spawned) == attempts
    await templates.close()


async def test_a_fork_that_is_no_longer_awaited_is_ended() -> None:
    templates = Templates(60)
    kind = kind_of(templates)
    before = await Owner().start(templates, kind)
    children = set(psutil.Process().children())
    os.kill(templates.pids[0], signal.SIGSTOP)
    forking = asyncio.create_task(templates.fork(kind, {}))
    await asyncio.sleep(0)
    forking.cancel()
    os.kill(templates.pids[0], signal.SIGCONT)
    await asyncio.gather(forking, return_exceptions=True)
    after = await Owner().start(templates, kind)  # a template forks one by one
    assert {child.pid for child in set(psutil.Process().children()) - children} == {after.process.pid}
    await before.end()
    await after.end()
    await templates.close()


async def test_a_discarded_fork_does_not_keep_its_template() -> None:
    templates = Templates(0.5)
    kind = kind_of(templates)
    owner = await Owner().start(templates, kind)
    forked = await templates.fork(kind, {})
    assert forked is not None
    forked.discard()
    while templates.pids:
        await asyncio.sleep(0.01)
    await owner.end()
    await templates.close()


UNFORKABLE = """
import os

fork, template = os.fork, os.getpid()


def limited():
    if os.getpid() != template:
        raise BlockingIOError("Resource temporarily unavailable")
    return fork()


os.fork = limited
"""


async def test_a_worker_is_spawned_at_once_when_its_template_cannot_fork_it(
    tmp_path: Path, patient_forks: None
) -> None:
    (tmp_path / "unforkable.py").write_text(UNFORKABLE)
    templates = Templates(60)
    kind = kind_of(templates, "unforkable", PYTHONPATH=str(tmp_path))
    assert await asyncio.wait_for(templates.fork(kind, {}), TIMEOUT) is None
    await templates.close()


async def test_modules_that_start_threads_are_imported_by_each_worker_for_itself(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text("import threading; threading.Thread(target=threading.Event().wait).start()")
    templates = Templates(60)
    kind = kind_of(templates, "threaded", PYTHONPATH=str(tmp_path))
    assert [await templates.fork(kind, {}), await templates.fork(kind, {})] == [None, None]
    await templates.close()


async def test_imports_that_end_the_process_are_tried_three_times(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(f"import os; open({str(tmp_path / 'tried')!r}, 'a').write('.'); os._exit(1)")
    templates = Templates(60)
    kind = kind_of(templates, PYTHONPATH=str(tmp_path)).sharing(["deadly"], {})
    assert [await templates.fork(kind, {}) for _ in range(5)] == [None] * 5
    assert (tmp_path / "tried").read_text() == "..."
    await templates.close()


async def test_a_kind_that_adds_imports_shares_those_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "telling.py").write_text("import os; print('telling', os.environ['TOLD'])")
    templates = Templates(60)
    base = kind_of(templates, PYTHONPATH=str(tmp_path))
    owner = await Owner().start(templates, base.sharing(["telling"], {"TOLD": "before the import"}))
    assert len(templates.pids) == 2
    await owner.end()
    await templates.close()


THROWING = """
import random
import numpy.random

class Backend:
    def __init__(self, channel, header):
        print(random.random())
        print(numpy.random.random())
"""


async def test_what_a_template_forks_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "throwing.py").write_text(THROWING)
    templates = Templates(60)
    kind = kind_of(templates, "throwing", PYTHONPATH=str(tmp_path))
    owners = [await Owner().start(templates, kind) for _ in range(2)]
    for owner in owners:
        write(owner.connection, Endpoint().encode({"op": "init", "backend": "throwing:Backend"}))
        while len(owner.lines) < 2:
            await asyncio.sleep(0.01)
        await owner.end()
    assert len({line for owner in owners for line in owner.lines}) == 4
    await templates.close()


@pytest.mark.parametrize(("python", "seconds"), [("/usr/bin/other", 60), (sys.executable, 0)])
async def test_other_interpreters_and_zero_seconds_share_nothing(python: str, seconds: float) -> None:
    assert Templates(seconds).kind_of(python, os.environ, MODULE) is None


def test_workers_with_different_devices_share_and_with_other_differences_do_not() -> None:
    async def kinds() -> list[TemplateKind | None]:
        templates = Templates(60)
        environments: list[dict[str, str]] = [{}, {"CUDA_VISIBLE_DEVICES": "1"}, {"OMP_NUM_THREADS": "1"}]
        return [templates.kind_of(sys.executable, environment, MODULE) for environment in environments]

    plain, on_a_device, threads = asyncio.run(kinds())
    assert plain == on_a_device != threads


class FakeTemplate:
    """The process of a template, which answers at once that it has forked this process."""

    pid = 4711
    exit_status = None

    def __init__(self) -> None:
        self.killed = False

    def spawn(
        self, python: str, environment: Mapping[str, str], on_exit: Callable[[], None], on_line: Callable[[str], None]
    ) -> tuple[FakeTemplate, socket.socket]:
        self.on_exit = on_exit
        ours, self.control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return self, ours

    def kill(self) -> None:
        self.killed = True
        self.on_exit()

    async def fork(self, template: Template) -> None:
        """Fork a worker, which is neither taken over nor discarded."""
        forking = asyncio.create_task(template.fork("worker", {}))
        await settle()
        assert json.loads(self.control.recv(4096))["op"] == "fork"
        self.control.send(b'{"pid": 1}')
        forked: Any = await forking
        forked.connection.close()
        os.close(forked.output)


@fake_clock
async def test_orphans_are_adopted_while_one_worker_is_forked_and_not_while_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adoptions: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        adoptions.append("begun")
        yield
        adoptions.append("ended")

    monkeypatch.setattr("conch.workers.host.templates.adopting", noted)
    process = FakeTemplate()
    template = Template(process.spawn, TemplateKind((), frozenset()), 60, lambda _: None, lambda _: None)
    forks = [asyncio.create_task(template.fork("worker", {})) for _ in range(2)]
    await settle()
    assert adoptions == ["begun"]
    process.control.send(b'{"pid": 1}')
    await settle()
    assert adoptions == ["begun", "ended", "begun"]
    process.control.send(b'{"pid": 1}')
    for forked in await asyncio.gather(*forks):
        fork: Any = forked
        fork.connection.close()
        os.close(fork.output)
    template.close()
    process.control.close()


@fake_clock
async def test_a_template_that_waits_for_the_processor_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    activity = Activity("R", cpu=0)
    monkeypatch.setattr("conch.workers.host.templates.activity", lambda pid: activity)
    process = FakeTemplate()
    template = Template(process.spawn, TemplateKind((), frozenset()), 60, lambda _: None, lambda _: None)
    forking = asyncio.create_task(template.fork("worker", {}))
    await asyncio.sleep(1000)
    assert not forking.done()
    activity = Activity("S", cpu=0)
    await asyncio.sleep(FORK_SECONDS + 2)
    with pytest.raises(TimeoutError):
        forking.result()
    assert process.killed
    process.control.close()


@fake_clock
async def test_a_template_stays_while_two_workers_share_it_and_ends_after_a_while_with_one() -> None:
    process = FakeTemplate()
    closed: list[Template] = []
    kind = TemplateKind((), frozenset())
    template = Template(process.spawn, kind, 60, closed.append, lambda template: None)
    await process.fork(template)
    await asyncio.sleep(59)
    await process.fork(template)
    await asyncio.sleep(1000)
    assert not process.killed
    template.lost_one()
    await asyncio.sleep(59)
    await process.fork(template)
    template.lost_one()
    await asyncio.sleep(59)
    assert not process.killed
    await asyncio.sleep(2)
    assert process.killed
    assert closed == [template]
    assert template.ended.is_set()
    process.control.close()


async def test_worker_that_cannot_be_watched_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    templates = Templates(60)
    kind = kind_of(templates)
    owner = await Owner().start(templates, kind)
    forked = await templates.fork(kind, {})
    assert forked is not None

    def without_descriptors(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    children, files = len(psutil.Process().children()), psutil.Process().num_fds()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="Too many open files"):
        patched.setattr(os, "pidfd_open", without_descriptors)
        forked.take("", {}, lambda: None, lambda line: None)
    assert len(psutil.Process().children()) == children - 1
    assert psutil.Process().num_fds() == files - 2  # its socket and its pipe
    await owner.end()
    await templates.close()


async def test_fork_without_a_descriptor_closes_its_sockets_and_keeps_the_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    templates = Templates(60)
    kind = kind_of(templates)
    owner = await Owner().start(templates, kind)
    pids = templates.pids
    made: list[socket.socket] = []
    make_pair = socket.socketpair

    def recorded(*arguments: Any) -> tuple[socket.socket, socket.socket]:
        pair = make_pair(*arguments)
        made.extend(pair)
        return pair

    def without_descriptors() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", recorded)
        patched.setattr(os, "pipe", without_descriptors)
        assert await templates.fork(kind, {}) is None
    assert [end.fileno() for end in made] == [-1, -1]
    second = await Owner().start(templates, kind)
    assert templates.pids == pids
    await second.end()
    await owner.end()
    await templates.close()
