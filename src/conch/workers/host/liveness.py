"""Whether a worker runs, works or hangs, judged by its heartbeat, its processor time and what it has under way.

Pure: times are passed in.  They are seconds of a clock that counts only while the server itself runs, so that nothing
is held against a worker while both stood still.  ``WorkerWatch`` asks, for every worker of the server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from conch.errors import ConchError, internal
from conch.workers.child.heartbeat import HeartbeatSample
from conch.workers.host.activity import TICKS, Activity

#: How long a worker that is stopped, or waits for a disk or memory, counts as responsive (s).
STOPPED_SECONDS: Final = 1.0
#: The same for one that does neither and is silent: it may wait in a call that holds the interpreter.
SILENT_SECONDS: Final = 10.0
#: A worker works that uses this part of a core, or moves so many bytes in a second: its heartbeat takes a hundredth.
_WORKING: Final = 0.05
_MOVING: Final = 1 << 17
#: The part of a core that threads take which wait for the interpreter: each looks for it every 5 ms.
_WAITING: Final = 0.02


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """How long the server waits for workers (s) before it kills them; 0 is for ever, but for ``finalize``.

    See the group "Workers" of the server's options.  ``start`` is the time until the first heartbeat, without that in
    which other processes have the processor.
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
    """Why the server killed a worker, as metrics show it."""

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
    """Why a worker is to be killed: for metrics, and as the rest of a sentence about the worker."""

    cause: Cause
    reason: str


def not_ended(seconds: float, *, idle: bool) -> Kill:
    """Why a worker is killed that was to end, and did not within ``seconds``; ``idle`` says that it has no requests."""
    if not idle:
        reason = "its requests had not ended when they had to (--unload-timeout-secs, --exit-timeout-secs)"
        return Kill(Cause.UNLOAD, reason)
    return Kill(Cause.FINALIZE, f"it has not ended within {seconds:g} s of being asked to (--finalize-timeout-secs)")


def unhealthy(name: str, kill: Kill | None) -> ConchError:
    """What the requests of the worker ``name`` fail with when it has ended, and why, if the server killed it."""
    why = ""
    if kill is not None and kill.cause is not Cause.PROTOCOL:  # which is nobody's business
        why = f" It was killed: {kill.reason}."
    return internal(f"Stub process '{name}' is not healthy.{why}")


class LivenessSample(NamedTuple):
    """What the server knows of a worker: its pulse, the number of the execution that has run longest (0 for none), and
    whether its model is loading, with its warm-up, and whether it may be waiting for other models."""

    heartbeat: HeartbeatSample
    execution: int = 0
    loading: bool = False
    calling: bool = False


class Verdict(NamedTuple):
    """Whether a worker counts for readiness, how long its load has stood still (s), and whether it must go."""

    responsive: bool = True
    idle: float = 0.0
    kill: Kill | None = None


class Since:
    """When something that can change was first as it is."""

    def __init__(self, now: float) -> None:
        self._value: object = None
        self._since = now

    def seconds(self, value: object, now: float) -> float:
        """How long ``value`` has been the same."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since


class Liveness:
    """What is known of one worker.  ``timeouts`` may be replaced while it runs."""

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

    def look(
        self,
        now: float,
        sample: LivenessSample,
        read: Callable[[], Activity | None],
        read_children: Callable[[], Activity | None] = lambda: None,
    ) -> Verdict:
        """Judge by the signs; the functions tell the activity of the process and that of all that it has started, and
        are called only where they are needed."""
        beats = sample.heartbeat.beats != self._beats
        self._beats = sample.heartbeat.beats
        seen = None if beats and not sample.loading else read()
        if seen is not None and seen.state == "t":
            self._held = now - self._looked  # no time passes for a worker that a debugger holds
        now -= self._held
        self._started += self._own_time(now - self._looked, seen)
        silence = self._silence(now, beats, seen)
        state = seen.state if seen is not None else ""
        idle = self._idle(now, sample.loading and not sample.calling, seen, read_children)
        self._looked = now
        kill = self._stopped(state, silence) or self._waiting(now, sample, silence, idle)
        timeouts = STOPPED_SECONDS if state in ("T", "D") else SILENT_SECONDS
        return Verdict(silence < timeouts and kill is None, idle, kill)

    def _own_time(self, seconds: float, seen: Activity | None) -> float:
        """The part of the ``seconds`` between two checks in which a worker ran or was not ready to run."""
        if seen is None or seen.state != "R" or self._last is None:
            return seconds
        return min(seconds, (seen.cpu - self._last.cpu) / TICKS)

    def _silence(self, now: float, beats: bool, seen: Activity | None) -> float:
        """Seconds since the last sign of life: a beat, or more processor time than threads that wait take."""
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
        """Seconds for which a load has neither computed nor read, itself or by a program that it has started; 0 where
        the system does not tell."""
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
        """What has taken too long, if anything has."""
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
                    f"its model has been loading for {loading:.0f} s and has done nothing for {idle:.0f} s of them "
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


def _worked(last: Activity | None, seen: Activity | None, seconds: float) -> bool:
    """Whether a process has done something in the ``seconds`` between two looks, as far as can be told."""
    if last is None or seen is None:
        return True
    computed = (seen.cpu - last.cpu) / TICKS >= _WORKING * seconds
    return bool(seconds) and (computed or seen.moved - last.moved >= _MOVING * seconds)


def over(seconds: float, limit: float) -> bool:
    """Whether a limit has been reached; 0 is none."""
    return bool(limit) and seconds >= limit
