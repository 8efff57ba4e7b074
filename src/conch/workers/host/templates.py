"""Worker templates: processes that import modules for workers, and fork workers that share the imported memory.

The program is ``workers/child/template.py``. Owned by the server; runs on its event loop in the main thread: templates
are killed when the thread that started them ends.

This process adopts forked workers, which would otherwise become children of init. It also adopts and reaps unrelated
processes that become orphans during a fork. The event loops of all servers in this process share that state.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import Condition, Lock, Thread, current_thread
from time import monotonic
from typing import Any, Final

from conch.machine import logs
from conch.machine.memory import children_of
from conch.machine.processes import Activity, activity
from conch.workers.child.template import MAX_MESSAGE
from conch.workers.host.liveness import own_time
from conch.workers.host.spawn import ChildProcess, Spawn, SpawnedProcess, WorkerOutput, spawn_template

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

#: Interval at which possibly adopted children are checked (s).
CHECK_SECONDS = 10.0
#: Time for which an ended child is left to other code in this process, which may have started it (s).
CLAIM_SECONDS = 60.0

_lock = Lock()
_forks = 0
_before = 0
#: Children that existed before the forks, or that the code that started them waits for.
_known: set[int] = set()


@contextmanager
def adopting() -> Iterator[set[int]]:
    """Adopt descendants whose parents end during the block. Linux only; raises OSError.

    The caller adds the ids of the processes that it waits for itself to the yielded set.
    """
    global _forks, _before, _known
    with _lock:
        if _forks == 0:
            _before = _adopts()
            _known = _children()
            _adopt(1)
        _forks += 1
    try:
        yield _known
    finally:
        with _lock:
            _forks -= 1
            if _forks == 0:
                _adopt(_before)
                _REAPER.watch(_children() - _known)


class _Reaper:
    """Reaps adopted children that no other code waits for, in a thread that ends when none are left.

    A child that appeared during a fork was either adopted or started by other code in this process. The two cannot be
    distinguished, so that an ended child is first left to its owner for ``CLAIM_SECONDS``.
    """

    def __init__(self) -> None:
        #: When each child was first seen to have ended (s), by process id; None while it runs.
        self._ended: dict[int, float | None] = {}
        self._changed = Condition()
        self._thread: Thread | None = None

    def watch(self, pids: set[int]) -> None:
        with self._changed:
            self._ended.update(dict.fromkeys(pids))
            if self._ended and self._thread is None:
                self._thread = Thread(target=self._run, name="conch-reaper", daemon=True)
                self._thread.start()

    def settle(self) -> None:
        """Forget the children that have been waited for, and end the thread if no others are left."""
        with self._changed:
            self._check_all()
            if self._ended or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._changed.notify()
        thread.join()

    def _run(self) -> None:
        with self._changed:
            while self._ended and self._thread is current_thread():
                self._changed.wait(CHECK_SECONDS)
                self._check_all()
            if self._thread is current_thread():
                self._thread = None

    def _check_all(self) -> None:
        for pid in list(self._ended):
            self._check(pid)

    def _check(self, pid: int) -> None:
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # its owner has waited for it
            del self._ended[pid]
            return
        if ended is None:
            return
        since = self._ended[pid] = self._ended[pid] or monotonic()
        if monotonic() - since >= CLAIM_SECONDS:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            del self._ended[pid]


_REAPER = _Reaper()


def _children() -> set[int]:
    """Return the children of all threads of this process; empty if the kernel does not list them."""
    children: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            children.update(map(int, path.read_text().split()))
    return children


def _adopts() -> int:
    value = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return value.value


def _adopt(value: int) -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(value))


def _prctl(option: int, argument: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot adopt others")


LOG = logging.getLogger("conch")

#: Timeouts of a template's forks and imports (s); time in which other processes use the processor does not count.
FORK_SECONDS: Final = 20.0
IMPORT_SECONDS: Final = 120.0
#: Interval between checks whether a template is ready to run (s).
WATCH_SECONDS: Final = 1.0
#: Consecutive failures of a template kind after which its workers are spawned without a template for a time (s).
ATTEMPTS: Final = 3
PAUSE_SECONDS: Final = 600.0

#: A variable that is read when a model initializes its device, after all imports, so templates need not match it.
_READ_LATER: Final = "CUDA_VISIBLE_DEVICES"

#: The exit status reported if the real one is unknown.
_UNKNOWN: Final = 255


@dataclass(frozen=True, slots=True)
class TemplateKind:
    """The properties that workers must have in common to share a template.

    The template imports ``modules``. ``environment`` holds the variables of its start, or those that were set when
    ``base`` forked it.
    """

    modules: tuple[str, ...]
    environment: frozenset[tuple[str, str]]
    python: str = ""
    base: TemplateKind | None = None

    def sharing(self, modules: Sequence[str], environment: Mapping[str, str]) -> TemplateKind:
        """Return the kind based on this one that sets ``environment`` and then also imports ``modules``."""
        return TemplateKind(tuple(modules), frozenset(environment.items()), base=self)


class Templates:
    """Starts templates on demand and ends them after ``idle_seconds`` without use; 0 disables templates.

    A template with two or more running workers is kept, because the next worker will share memory with them. With a
    single worker, the template would only cost memory.
    """

    def __init__(self, idle_seconds: float, spawn: Spawn = spawn_template) -> None:
        self._idle_seconds = idle_seconds
        self._spawn = spawn
        self._made: dict[TemplateKind, asyncio.Task[Template | None]] = {}
        self._failures: Counter[TemplateKind] = Counter()
        #: When the next attempt may be made, for kinds that have failed too often.
        self._paused_until: dict[TemplateKind, float] = {}
        self._running: set[Template] = set()
        self._enabled = idle_seconds > 0 and sys.platform == "linux" and hasattr(os, "pidfd_open")
        self._loop = asyncio.get_running_loop()

    @property
    def pids(self) -> list[int]:
        """The process ids of running templates."""
        return [template.process.pid for template in self._running]

    def kind_of(self, python: str, environment: Mapping[str, str], module: str) -> TemplateKind | None:
        """Return the kind for workers that import ``module``; None if they cannot use a template.

        Workers under an interpreter other than the server's never use one.
        """
        if not self._enabled or python != sys.executable:
            return None
        read = frozenset((name, value) for name, value in environment.items() if name != _READ_LATER)
        return TemplateKind((module,), read, python)

    async def fork(self, kind: TemplateKind, environment: Mapping[str, str]) -> ForkedProcess | None:
        """Fork a worker, which the caller takes over or discards; None if it must be spawned instead."""
        template = await self._template(kind)
        if template is None:
            return None
        later = {_READ_LATER: environment[_READ_LATER]} if _READ_LATER in environment else {}
        return await self._forked(template, "worker", later)

    async def close(self) -> None:
        """End all templates and wait until they have ended."""
        self._enabled = False
        making = list(self._made.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        running = list(self._running)
        for template in running:
            template.close()
        await asyncio.gather(*(template.ended.wait() for template in running))
        _REAPER.settle()

    async def _template(self, kind: TemplateKind) -> Template | None:
        if self._loop.time() < self._paused_until.get(kind, 0.0):
            return None
        task = self._made.get(kind)
        if task is None:
            task = self._made[kind] = self._loop.create_task(self._make(kind))
        # A cancelled load does not cancel the template for other loads that wait for it.
        return await asyncio.shield(task)

    async def _make(self, kind: TemplateKind) -> Template | None:
        """Start a template of the kind; None if it cannot be started or must not fork."""
        spawn: Spawn | None = self._spawn
        if kind.base is not None:
            base = await self._template(kind.base)
            forked = await self._forked(base, "template", dict(kind.environment)) if base is not None else None
            spawn = forked.take if forked is not None else None
        if spawn is not None:
            try:
                template = Template(spawn, kind, self._idle_seconds, self._closed, self._running.discard)
                self._running.add(template)
                problem = await template.import_modules()
                if not problem:
                    return template
                self._paused_until[kind] = inf  # the same imports would run the same threads
                template.close()
            except (OSError, TimeoutError) as error:
                self._count_failure(kind)
                problem = str(error) or "its worker template does not respond"
            LOG.info("a worker that needs %s imports it without a worker template: %s", kind.modules[0], problem)
        if self._made.get(kind) is asyncio.current_task():
            del self._made[kind]
        return None

    async def _forked(self, template: Template, role: str, environment: Mapping[str, str]) -> ForkedProcess | None:
        forking = self._loop.create_task(template.fork(role, environment))
        try:
            forked = await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_discard)
            raise
        except (OSError, TimeoutError) as error:
            LOG.warning(
                "a worker could not be forked and is spawned: %s", error or "its worker template does not respond"
            )
            if template.closed:  # otherwise, this process had no free descriptor
                self._count_failure(template.kind)
            return None
        self._failures.pop(template.kind, None)
        return forked

    def _count_failure(self, kind: TemplateKind) -> None:
        self._failures[kind] += 1
        if self._failures[kind] >= ATTEMPTS:
            self._paused_until[kind] = self._loop.time() + PAUSE_SECONDS

    def _closed(self, template: Template) -> None:
        self._made.pop(template.kind, None)


class Template:
    """The server's side of a template, which ``spawn`` starts. Raises OSError if it cannot be started.

    ``on_closed`` is called once when it stops forking, ``on_exit`` once when its process has ended.
    """

    def __init__(
        self,
        spawn: Spawn,
        kind: TemplateKind,
        idle_seconds: float,
        on_closed: Callable[[Template], None],
        on_exit: Callable[[Template], None],
    ) -> None:
        self.kind = kind
        self.ended = asyncio.Event()
        self._idle_seconds = idle_seconds
        self._on_closed = on_closed
        self._on_exit = on_exit
        self._closed = False
        self._pending_messages = 0
        self._workers = 0
        self._lines = 0
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.process, self._control = spawn(kind.python, dict(kind.environment), self._exited, self._printed)
        self._control.setblocking(False)

    @property
    def closed(self) -> bool:
        """Whether the template no longer forks processes."""
        return self._closed

    async def import_modules(self) -> str:
        """Import the modules of its kind; return the reason why it must not fork, empty if it may."""
        reply = await self._request({"op": "import", "modules": self.kind.modules}, [], IMPORT_SECONDS)
        problem: str = reply["problem"]
        return problem

    async def fork(self, role: str, environment: Mapping[str, str]) -> ForkedProcess:
        """Fork a process, which becomes a child of the server.

        Raises OSError or TimeoutError. The template is closed unless this process had no free descriptor.
        """
        kind = socket.SOCK_SEQPACKET if role == "template" else socket.SOCK_STREAM
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        try:
            with theirs:
                output, printing = os.pipe()
                try:
                    request = {"op": "fork", "as": role, "environment": dict(environment)}
                    reply = await self._request(request, [theirs.fileno(), printing], FORK_SECONDS, adopting)
                except BaseException:
                    os.close(output)
                    raise
                finally:
                    os.close(printing)
        except BaseException:
            ours.close()
            raise
        self._workers += 1
        self._consider_end()
        return ForkedProcess(self, reply["pid"], ours, output)

    def lost_one(self) -> None:
        """Record the end of a process that this template forked."""
        self._workers -= 1
        self._consider_end()

    def close(self) -> None:
        """End the template; the processes that it forked keep running."""
        if not self._closed:
            self._closed = True
            self._consider_end()
            self._on_closed(self)
            self.process.kill()

    async def _request(
        self,
        message: Mapping[str, Any],
        fds: Sequence[int],
        seconds: float,
        meanwhile: Callable[[], AbstractContextManager[set[int] | None]] = nullcontext,
    ) -> dict[str, Any]:
        """Send a message and return the reply; ``meanwhile`` is active until then, but not for other messages.

        The process id of a forked process is added to the set that it yields, if any.
        """
        self._pending_messages += 1
        self._consider_end()
        try:
            async with self._lock:
                if self._closed:
                    raise OSError("its template has ended")
                with meanwhile() as children:
                    socket.send_fds(self._control, [json.dumps(message).encode()], fds)
                    data = await self._receive(seconds)
                    if not data:
                        raise OSError("its template has ended")
                    reply: dict[str, Any] = json.loads(data)
                    if children is not None:
                        children.add(reply["pid"])
            return reply
        except (OSError, TimeoutError):
            self.close()
            raise
        finally:
            self._pending_messages -= 1
            self._consider_end()
            if self.ended.is_set():
                self._control.close()

    async def _receive(self, seconds: float) -> bytes:
        """Return the next message; TimeoutError after ``seconds`` in which the template ran or was not ready to run."""
        receiving = self._loop.create_task(self._loop.sock_recv(self._control, MAX_MESSAGE))
        try:
            last, looked = self._activity(), self._loop.time()
            while seconds > 0:
                await asyncio.wait((receiving,), timeout=min(seconds, WATCH_SECONDS))
                if receiving.done():
                    return receiving.result()
                seen, now = self._activity(), self._loop.time()
                # A late check, after the server itself did not run, counts as one interval.
                seconds -= own_time(min(now - looked, WATCH_SECONDS), last, seen)
                last, looked = seen, now
            raise TimeoutError
        finally:
            receiving.cancel()

    def _activity(self) -> Activity | None:
        """Return the activity of the template, or of the process that forks in its place."""
        pid = self.process.pid
        return activity(next(iter(children_of(pid)), pid))

    def _consider_end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._closed and self._pending_messages == 0 and self._workers < 2:
            self._timer = self._loop.call_later(self._idle_seconds, self.close)

    def _printed(self, line: str) -> None:
        self._lines += 1
        logs.emit_from_worker("INFO", "output", self._lines, line, "template", self.process.pid)

    def _exited(self) -> None:
        self.close()
        if self._lock.locked():
            # Forked processes may still hold the other end, so the pending ``_request`` would not see EOF.
            self._control.shutdown(socket.SHUT_RDWR)
        else:
            self._control.close()
        self.ended.set()
        self._on_exit(self)


class ForkedProcess:
    """A process forked by ``template``, without an owner yet; ``output`` is the reading end of its output pipe."""

    def __init__(self, template: Template, pid: int, connection: socket.socket, output: int) -> None:
        self._template = template
        self._pid = pid
        self.connection = connection
        self.output = output

    def take(
        self,
        python: str,
        environment: Mapping[str, str],
        on_exit: Callable[[], None],
        on_line: Callable[[str], None],
    ) -> tuple[ChildProcess, socket.socket]:
        """Take over the process, as a :data:`Spawn`. If it cannot be watched, kills it and raises OSError."""

        def exited() -> None:
            self._template.lost_one()
            on_exit()

        output = WorkerOutput(self.output, on_line)
        try:
            return SpawnedProcess(self._pid, self._wait, output, exited), self.connection
        except OSError:
            self._end()
            output.close()
            raise

    def discard(self) -> None:
        """Kill the process because it is no longer needed."""
        self._end()
        os.close(self.output)

    def _end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self._wait()
        self.connection.close()
        self._template.lost_one()

    def _wait(self) -> int:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        except ChildProcessError:  # other code in this process has waited for it
            return _UNKNOWN


def _discard(forking: asyncio.Task[ForkedProcess]) -> None:
    if not forking.cancelled() and forking.exception() is None:
        forking.result().discard()
