"""Detects stalled workers from their heartbeat, CPU time and current work.

Pure: times are passed in. They are seconds of a clock that counts only while the server itself runs, so that workers
do not look stalled after the machine was suspended. ``WorkerWatch`` calls it for every worker of the server.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from conch.core.errors import ConchError, internal
from conch.machine.processes import TICKS, Activity
from conch.telemetry.statistics import RestartReason
from conch.workers.child.heartbeat import HeartbeatSample

#: Time for which a silent worker that is stopped, or waits for a disk or memory, counts as responsive (s).
STOPPED_SECONDS: Final = 1.0
#: Time for which any other silent worker counts as responsive (s): it may be in a call that holds the interpreter lock.
SILENT_SECONDS: Final = 10.0
#: A process is working if it uses this fraction of a core, or moves this many bytes per second. The heartbeat itself
#: uses a hundredth of that.
_WORKING: Final = 0.05
_MOVING: Final = 1 << 17
#: The fraction of a core used by threads that wait for the interpreter lock: each checks for it every 5 ms.
_WAITING: Final = 0.02


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """Timeouts after which the server kills a worker (s); 0 disables a timeout, except ``finalize``.

    See the group "Workers" of the server's options. ``start`` is the time until the first heartbeat; time in which the
    worker is ready to run but other processes use the processor does not count.
    """

    stopped: float = 1.0
    silent: float = 60.0
    execution: float = 3600.0
    step: float = 300.0
    start: float = 30.0
    load_idle: float = 600.0
    load: float = 0.0
    unload: float = 300.0
    finalize: float = 10.0


DEFAULT_WORKER_TIMEOUTS: Final = WorkerTimeouts()


class Cause(StrEnum):
    """The cause for which the server killed a worker, as shown in metrics."""

    STOPPED = "stopped"
    SILENT = "silent"
    EXECUTION = "execution"
    STEP = "step"
    START = "start"
    LOAD = "load"
    UNLOAD = "unload"
    FINALIZE = "finalize"
    PROTOCOL = "protocol"


class Kill(NamedTuple):
    """The decision to kill a worker: its cause for metrics, and its reason as a clause about the worker."""

    cause: Cause
    reason: str


def not_ended(seconds: float, *, idle: bool) -> Kill:
    """Return the reason to kill a worker that did not end within ``seconds``; ``idle``: it has no requests."""
    if not idle:
        reason = "its requests did not complete in time (--unload-timeout-secs, --exit-timeout-secs)"
        return Kill(Cause.UNLOAD, reason)
    return Kill(
        Cause.FINALIZE, f"it did not exit within {seconds:g} s after the request to stop (--finalize-timeout-secs)"
    )


class WorkerEnd(NamedTuple):
    """How a worker ended: its reason for metrics, and the end as a clause about the worker."""

    reason: RestartReason
    text: str


def worker_end(status: int | None, kill: Kill | None) -> WorkerEnd:
    """Return how a worker ended; ``status`` is negative for a signal, ``kill`` is set if the server killed it."""
    if kill is not None:
        return WorkerEnd(RestartReason.KILLED, "was killed by the server")
    if status is None:  # it is still ending after it was killed because its channel had closed
        return WorkerEnd(RestartReason.EXIT, "closed its channel")
    if status >= 0:
        return WorkerEnd(RestartReason.EXIT, f"died with status {status}")
    if status == -signal.SIGKILL:
        return WorkerEnd(RestartReason.SIGKILL, "was killed by SIGKILL, possibly because memory ran out")
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    return WorkerEnd(RestartReason.SIGNAL, f"was killed by {name}")


def unhealthy(name: str, kill: Kill | None, end: WorkerEnd | None = None) -> ConchError:
    """Return the error for requests of the ended worker ``name``, with the reason if the server killed it.

    Else, it tells its ``end``, if given: that of a worker which was loading its model.
    """
    why = f" It {end.text}." if end is not None and kill is None else ""
    if kill is not None and kill.cause is not Cause.PROTOCOL:  # protocol errors are internal details
        why = f" It was killed: {kill.reason}."
    return internal(f"Stub process '{name}' is not healthy.{why}")


class LivenessSample(NamedTuple):
    """A sample of a worker's state, taken by the server.

    ``execution`` is the number of the longest-running execution, 0 for none. ``loading`` includes the warm-up.
    ``calling`` is True if the model may be waiting for other models.
    """

    heartbeat: HeartbeatSample
    execution: int = 0
    loading: bool = False
    calling: bool = False


class Verdict(NamedTuple):
    """The result of a check: whether the worker is responsive, how long its load has been idle (s), and any kill."""

    responsive: bool = True
    idle: float = 0.0
    kill: Kill | None = None


class Since:
    """Tracks how long a value has been unchanged."""

    def __init__(self, now: float) -> None:
        self._value: object = None
        self._since = now

    def seconds(self, value: object, now: float) -> float:
        """Return how long the value has been ``value`` (s)."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since


class Liveness:
    """Liveness state of one worker; ``timeouts`` may be replaced while the worker runs."""

    def __init__(self, now: float, timeouts: WorkerTimeouts) -> None:
        self.timeouts = timeouts
        self._alive = self._looked = now
        self._started = 0.0
        self._beats = 0
        self._held = 0.0
        self._cpu: int | None = None
        self._execution = Since(now)
        self._step = Since(now)
        self._load = Since(now)
        self._worked = now
        self._last: Activity | None = None
        self._last_of_children: Activity | None = None

    def check(
        self,
        now: float,
        sample: LivenessSample,
        read: Callable[[], Activity | None],
        read_children: Callable[[], Activity | None] = lambda: None,
    ) -> Verdict:
        """Check the worker and return the verdict.

        ``read`` returns the activity of the process, ``read_children`` that of its descendants; they are called only
        when needed.
        """
        beats = sample.heartbeat.beats != self._beats
        self._beats = sample.heartbeat.beats
        seen = None if beats and not sample.loading else read()
        if seen is not None and seen.state == "t":
            self._held = now - self._looked  # time does not pass for a worker that a debugger has stopped
        now -= self._held
        self._started += own_time(now - self._looked, self._last, seen)
        silence = self._silence(now, beats, seen)
        state = seen.state if seen is not None else ""
        idle = self._idle(now, sample.loading and not sample.calling, seen, read_children)
        self._looked = now
        kill = self._stopped(state, silence) or self._waiting(now, sample, silence, idle)
        timeouts = STOPPED_SECONDS if state in ("T", "D") else SILENT_SECONDS
        return Verdict(silence < timeouts and kill is None, idle, kill)

    def _silence(self, now: float, beats: bool, seen: Activity | None) -> float:
        """Return the seconds since the last heartbeat, or since the last CPU use above that of waiting threads."""
        if beats or seen is None:
            self._alive, self._cpu = now, None
        elif self._cpu is None:
            self._cpu = seen.cpu
        elif seen.cpu - self._cpu > max(1.0, _WAITING * TICKS * (now - self._alive)):
            self._alive, self._cpu = now, seen.cpu
        return now - self._alive

    def _idle(
        self, now: float, loading: bool, seen: Activity | None, read_children: Callable[[], Activity | None]
    ) -> float:
        """Return for how long a load has neither computed nor moved data, nor have its child processes (s).

        Returns 0 if the system does not report activity.
        """
        last, self._last = self._last, seen
        before, self._last_of_children = self._last_of_children, None
        seconds = now - self._looked
        if not loading or _worked(last, seen, seconds):
            self._worked = now
        else:
            self._last_of_children = children = read_children()
            if before is not None and children is not None and _worked(before, children, seconds):
                self._worked = now
        return now - self._worked

    def _stopped(self, state: str, silence: float) -> Kill | None:
        if state == "T" and over(silence, self.timeouts.stopped):
            return Kill(Cause.STOPPED, f"it was stopped by a signal for {silence:.0f} s (--stopped-worker-secs)")
        return None

    def _waiting(self, now: float, sample: LivenessSample, silence: float, idle: float) -> Kill | None:
        """Return the reason to kill the worker if something has exceeded its timeout."""
        timeouts = self.timeouts
        executing = self._execution.seconds(sample.execution, now)
        heartbeat = sample.heartbeat
        stepping = self._step.seconds(heartbeat.steps, now)
        loading = self._load.seconds(sample.loading, now)
        if sample.loading:
            if not heartbeat.beats and over(self._started, timeouts.start):
                return Kill(Cause.START, f"it has not started within {timeouts.start:g} s (stub-timeout-seconds)")
            if over(idle, timeouts.load_idle):
                return Kill(
                    Cause.LOAD,
                    f"its model has been loading for {loading:.0f} s and has been idle for {idle:.0f} s of them "
                    "(--load-idle-secs)",
                )
            if over(loading, timeouts.load):
                return Kill(Cause.LOAD, f"its model has been loading for {loading:.0f} s (--load-timeout-secs)")
        elif over(silence, timeouts.silent):
            reason = f"it has shown no heartbeat and no processor time for {silence:.0f} s (--silent-worker-secs)"
            return Kill(Cause.SILENT, reason)
        if sample.execution and over(executing, timeouts.execution):
            return Kill(Cause.EXECUTION, f"an execution has taken {executing:.0f} s (--execute-timeout-secs)")
        if heartbeat.stepping and over(stepping, timeouts.step):
            return Kill(Cause.STEP, f"a step of its engine has taken {stepping:.0f} s (--step-timeout-secs)")
        return None


def own_time(seconds: float, last: Activity | None, seen: Activity | None) -> float:
    """Return the part of the ``seconds`` between two checks in which a process ran or was not ready to run (s)."""
    if seen is None or seen.state != "R" or last is None:
        return seconds
    return min(seconds, max((seen.cpu - last.cpu) / TICKS, 0.0))


def _worked(last: Activity | None, seen: Activity | None, seconds: float) -> bool:
    """Whether a process has worked in the ``seconds`` between two checks; True if its activity is unknown."""
    if last is None or seen is None:
        return True
    computed = (seen.cpu - last.cpu) / TICKS >= _WORKING * seconds
    return bool(seconds) and (computed or seen.moved - last.moved >= _MOVING * seconds)


def over(seconds: float, limit: float) -> bool:
    """Whether a limit has been reached; 0 means no limit."""
    return bool(limit) and seconds >= limit
