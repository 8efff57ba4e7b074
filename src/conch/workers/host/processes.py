"""Creates, watches and ends all worker processes of a server, so that none outlives it; does not restart them.

Owned by the server; runs on its event loop, as the watchdog and the guard do. A check of the watchdog reads a few bytes
of shared memory per worker; /proc is read only for workers that are silent or loading.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

from conch.core.errors import unavailable
from conch.machine.guarded_server import start_guard
from conch.machine.processes import Activity, activity, children_activity
from conch.telemetry.custom import CustomMetrics
from conch.workers.host.liveness import DEFAULT_WORKER_TIMEOUTS, Cause, Liveness, WorkerTimeouts
from conch.workers.host.process import WorkerProcess
from conch.workers.host.spawn import ChildProcess, Spawn, spawn, spawn_at_terminal

#: Interval between checks (s).
INTERVAL: Final = 0.5


class WatchClock:
    """A clock that counts only while the server runs: time while the server was suspended does not count."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.now = 0.0

    def advance(self, now: float) -> float:
        """Return the time of a check at ``now`` (s, any clock); a late check advances it by less than an interval."""
        elapsed = now - self._last if self._last is not None else 0.0
        self._last = now
        self.now += elapsed if elapsed < 2 * INTERVAL else INTERVAL / 4
        return self.now


class WorkerWatch:
    """Watchdog: checks ``processes`` between ``start`` and ``stop``; ``read`` returns the activity of a process id."""

    def __init__(self, processes: Collection[WorkerProcess], read: Callable[[int], Activity | None] = activity) -> None:
        self._processes = processes
        self._read = read
        self._liveness: WeakKeyDictionary[WorkerProcess, Liveness] = WeakKeyDictionary()
        self._clock = WatchClock()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the checks; does nothing if they are running."""
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL, self._check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        now = self._clock.advance(self._loop.time())
        self._timer = self._loop.call_later(INTERVAL, self._check)
        for process in [process for process in self._processes if process.alive]:
            liveness = self._liveness.get(process)
            if liveness is None:
                liveness = self._liveness[process] = Liveness(now, process.timeouts)
            reads = partial(self._read, process.pid), partial(children_activity, process.pid)
            process.apply_verdict(liveness.check(now, process.sample, *reads))


LOG = logging.getLogger("conch")

#: Time to wait for the guard process to end (s).
_END_SECONDS: Final = 5.0


class Guard:
    """Runs the guard process (``machine/guard.py``) and reports running workers to it.

    The process starts with the first worker, and is restarted if it has been killed.
    """

    def __init__(self) -> None:
        self._workers: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def watched(self, spawn: Spawn) -> Spawn:
        """Wrap ``spawn`` so that each worker is registered with the guard while it runs."""

        def start(
            python: str, environment: Mapping[str, str], on_exit: Callable[[], None], on_line: Callable[[str], None]
        ) -> tuple[ChildProcess, socket.socket]:
            def exited() -> None:
                self.forget(process.pid)
                on_exit()

            process, connection = spawn(python, environment, exited, on_line)
            self.watch(process.pid)
            return process, connection

        return start

    def watch(self, pid: int) -> None:
        """Register a worker that has started; its process id is also that of its process group."""
        self._workers.add(pid)
        if self._process is None or not self._tell(f"+{pid}\n"):
            self._start()

    def forget(self, pid: int) -> None:
        """Unregister a worker after it and its process group have ended."""
        self._workers.discard(pid)
        self._tell(f"-{pid}\n")

    async def close(self) -> None:
        """End the guard process, which kills the process groups that are still registered."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.write(b".\n")  # EOF is not enough: forked processes may keep the pipe open
            process.stdin.close()
            await asyncio.to_thread(_end, process)

    def _start(self) -> None:
        if sys.platform != "linux":
            return
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        try:
            self._process = start_guard()
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        except OSError as error:
            LOG.warning("processes started by models may outlive a killed server: %s", error)
            self._process = None
            return
        self._tell("".join(f"+{pid}\n" for pid in self._workers))

    def _tell(self, lines: str) -> bool:
        """Write to the guard process; return False if it does not run."""
        if self._process is None or self._process.stdin is None:
            return False
        try:
            self._process.stdin.write(lines.encode())
        except OSError:
            return False
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process to end; kill it if it does not, for example because it is stopped."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class WorkerProcesses:
    """Creates workers, watches them, and kills the remaining ones in :meth:`close`.

    ``kills`` counts the workers that the server killed, by model and cause; ``metrics`` are the models' custom metrics.
    """

    def __init__(
        self,
        new: Callable[[str, Spawn], WorkerProcess] = WorkerProcess,
        timeouts: WorkerTimeouts = DEFAULT_WORKER_TIMEOUTS,
        metrics: CustomMetrics | None = None,
    ) -> None:
        self._new = new
        self._timeouts = timeouts
        self._metrics = metrics or CustomMetrics({})
        self._made: WeakSet[WorkerProcess] = WeakSet()
        self._watched: WeakSet[WorkerProcess] = WeakSet()
        self._watch = WorkerWatch(self._watched)
        self._closed = False
        self.kills: Counter[tuple[str, Cause]] = Counter()
        self._guard = Guard()

    def new(self, name: str, spawn: Spawn = spawn, *, debugged: bool = False) -> WorkerProcess:
        """Create a worker that ``spawn`` will start. Raises UNAVAILABLE after :meth:`close`.

        A ``debugged`` worker uses the server's terminal. It is not watched, because a debugger may stop it for any
        time, and not guarded, because it is in the server's process group.
        """
        if self._closed:
            raise unavailable(f"worker '{name}' is not started: the server is stopping")
        process = self._new(name, spawn_at_terminal if debugged else self._guard.watched(spawn))
        process.timeouts = self._timeouts
        process.on_kill = self._count
        process.calls.show_metrics(self._metrics)
        self._made.add(process)
        if not debugged:
            self._watched.add(process)
            self._watch.start()
        return process

    @property
    def pids(self) -> list[int]:
        """The process ids of running workers."""
        return [process.pid for process in self._made if process.alive]

    async def close(self) -> None:
        """Kill the workers that still run, such as those of a cancelled load, and wait until they have ended."""
        self._closed = True
        left = [process for process in self._made if process.alive]
        for process in left:
            process.kill()
        await asyncio.gather(*(process.ended() for process in left))
        await self._guard.close()
        self._watch.stop()

    def _count(self, process: WorkerProcess, cause: Cause) -> None:
        self.kills[process.model or process.name, cause] += 1
