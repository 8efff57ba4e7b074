"""How a stalled worker is distinguished from a working one, with a fake clock and fake readings."""

from __future__ import annotations

import pytest

from conch.machine.processes import TICKS, Activity
from conch.workers.child.heartbeat import HeartbeatSample
from conch.workers.host.liveness import Cause, Kill, Liveness, LivenessSample, Verdict, WorkerTimeouts, worker_end
from conch.workers.host.processes import INTERVAL, WatchClock


class Worker:
    """A worker as the watch sees it; ``run`` lets time pass, with what the worker does in each second."""

    def __init__(self, **timeouts: float) -> None:
        self.now = 0.0
        self.liveness = Liveness(0.0, WorkerTimeouts(**timeouts))
        self.beats = self.steps = self.execution = 0
        self.cpu = self.moved = 0.0
        #: The processor time of a program that the model has started.
        self.child_cpu: float | None = None
        self.stepping = self.loading = self.calling = False
        self.reads = 0

    def look(self, state: str = "S") -> Verdict:
        def read() -> Activity:
            self.reads += 1
            return Activity(state, int(self.cpu), int(self.moved))

        heartbeat = HeartbeatSample(self.beats, self.steps, self.stepping)
        sample = LivenessSample(heartbeat, self.execution, self.loading, self.calling)
        return self.liveness.check(self.now, sample, read, self.read_child)

    def read_child(self) -> Activity | None:
        return Activity("", int(self.child_cpu)) if self.child_cpu is not None else None

    def run(
        self,
        seconds: float,
        *,
        beats: bool = True,
        cores: float = 0.0,
        bytes: float = 0,
        state: str = "S",
        child: float = 0.0,
    ) -> Verdict:
        """The first verdict that a worker must go, or the last one."""
        end = self.now + seconds
        while self.now < end:
            self.now += INTERVAL
            self.beats += 2 * beats
            self.cpu += cores * TICKS * INTERVAL
            self.moved += bytes * INTERVAL
            if self.child_cpu is not None:
                self.child_cpu += child * TICKS * INTERVAL
            verdict = self.look(state)
            if verdict.kill is not None:
                break
        return verdict


def cause(verdict: Verdict) -> Cause | None:
    return verdict.kill.cause if verdict.kill is not None else None


def test_worker_that_beats_is_alive_and_costs_no_question() -> None:
    worker = Worker(silent=5)
    assert worker.run(60) == Verdict()
    assert worker.reads == 0


def test_stopped_worker_goes_within_two_seconds() -> None:
    worker = Worker()
    worker.run(5)
    begun = worker.now
    verdict = worker.run(10, beats=False, state="T")
    assert cause(verdict) is Cause.STOPPED and not verdict.responsive
    assert worker.now - begun <= 2


def test_stopped_worker_stays_where_the_operator_wants_it_and_is_not_ready() -> None:
    worker = Worker(stopped=0, silent=0)
    worker.run(5)
    verdict = worker.run(600, beats=False, state="T")
    assert verdict.kill is None and not verdict.responsive
    assert worker.run(INTERVAL).responsive


def test_worker_that_a_debugger_holds_is_left_alone() -> None:
    worker = Worker(silent=5, load_idle=5)
    worker.loading = True
    assert worker.run(600, beats=False, state="t") == Verdict()
    worker.loading = False
    assert worker.run(600, beats=False, state="t") == Verdict()


def test_worker_that_computes_without_a_beat_holds_the_interpreter() -> None:
    worker = Worker(silent=5, execution=100)
    worker.execution = 1
    verdict = worker.run(90, beats=False, cores=1)
    assert verdict.responsive and verdict.kill is None
    assert cause(worker.run(20, beats=False, cores=1)) is Cause.EXECUTION


@pytest.mark.parametrize(("state", "seconds"), [("D", 2), ("S", 11)])
def test_silent_worker_leaves_readiness_and_returns(state: str, seconds: float) -> None:
    worker = Worker()
    worker.run(5)
    verdict = worker.run(seconds, beats=False, state=state)
    assert not verdict.responsive and verdict.kill is None
    assert worker.run(INTERVAL).responsive


def test_silent_worker_goes_when_patience_ends() -> None:
    worker = Worker(silent=30)
    worker.run(5)
    assert worker.run(29, beats=False).kill is None
    assert cause(worker.run(2, beats=False)) is Cause.SILENT


def test_threads_that_wait_for_the_interpreter_are_no_sign_of_life() -> None:
    """Their processor time is a tick of the kernel's every second or two."""
    worker = Worker(silent=30)
    worker.run(5)
    assert cause(worker.run(32, beats=False, cores=0.01)) is Cause.SILENT


def test_nothing_is_held_against_a_worker_where_the_system_tells_nothing() -> None:
    worker = Liveness(0.0, WorkerTimeouts(silent=5))
    for second in range(60):
        assert worker.check(second, LivenessSample(HeartbeatSample(7)), lambda: None) == Verdict()


def test_execution_is_timed_from_its_beginning() -> None:
    worker = Worker(execution=10)
    for _ in range(20):
        worker.execution += 1
        assert worker.run(9).kill is None
    worker.execution = 0
    assert worker.run(60).kill is None
    worker.execution = 99
    assert cause(worker.run(11)) is Cause.EXECUTION


def test_step_that_does_not_come_back() -> None:
    worker = Worker(step=10)
    for _ in range(10):
        worker.steps, worker.stepping = worker.steps + 1, True
        assert worker.run(9).kill is None
    worker.stepping = False
    assert worker.run(60).kill is None
    worker.steps, worker.stepping = worker.steps + 1, True
    assert cause(worker.run(11)) is Cause.STEP


def test_load_that_works_may_take_as_long_as_it_takes() -> None:
    worker = Worker(load_idle=20, silent=5, start=3)
    worker.loading = True
    assert worker.run(300, cores=0.2) == Verdict()
    assert worker.run(300, beats=False, bytes=50e6, state="D").kill is None


def test_load_without_activity_is_cancelled() -> None:
    worker = Worker(load_idle=20)
    worker.loading = True
    worker.run(5, cores=1)
    verdict = worker.run(15, cores=0.01)
    assert verdict.kill is None and verdict.idle == pytest.approx(15)
    assert cause(worker.run(6, cores=0.01)) is Cause.LOAD


def test_load_that_waits_for_a_program_that_it_has_started_is_idle_when_that_is() -> None:
    worker = Worker(load_idle=20)
    worker.loading = True
    worker.child_cpu = 0.0
    assert worker.run(300, cores=0.01, child=0.5).kill is None
    assert worker.run(18, cores=0.01).kill is None
    worker.child_cpu = None
    assert cause(worker.run(3, cores=0.01)) is Cause.LOAD


def test_load_that_waits_for_another_model_is_not_idle() -> None:
    worker = Worker(load_idle=20)
    worker.loading = worker.calling = True
    assert worker.run(300) == Verdict()


def test_load_has_a_deadline_where_the_operator_sets_one() -> None:
    worker = Worker(load=30)
    worker.loading = True
    assert worker.run(29, cores=1).kill is None
    assert cause(worker.run(2, cores=1)) is Cause.LOAD


def test_worker_that_does_not_get_the_processor_has_more_time_to_start() -> None:
    worker = Worker(start=3, load_idle=60)
    worker.loading = True
    assert cause(worker.run(20, beats=False, cores=0.1, state="R")) is None
    assert cause(worker.run(10, beats=False, cores=0.1, state="R")) is Cause.START


def test_worker_that_does_not_start_is_distinguished_from_a_model_that_does_not_load() -> None:
    worker = Worker(start=3, load_idle=20)
    worker.loading = True
    assert cause(worker.run(5, beats=False, cores=1)) is Cause.START


def test_what_the_server_slept_itself_counts_for_nothing() -> None:
    clock = WatchClock()
    assert clock.advance(100.0) == 0.0
    assert clock.advance(100.5) == 0.5
    assert clock.advance(4000.0) < 1.0
    before = clock.now
    assert clock.advance(4000.5) == before + 0.5


@pytest.mark.parametrize(
    ("status", "kill", "reason", "text"),
    [
        (3, None, "exit", "died with status 3"),
        (0, None, "exit", "died with status 0"),
        (-11, None, "signal", "was killed by SIGSEGV"),
        (-40, None, "signal", "was killed by signal 40"),
        (-9, None, "sigkill", "was killed by SIGKILL, possibly because memory ran out"),
        (-9, Kill(Cause.SILENT, "it is silent"), "killed", "was killed by the server"),
    ],
)
def test_the_end_of_a_worker_is_told_by_its_status_and_by_who_killed_it(
    status: int, kill: Kill | None, reason: str, text: str
) -> None:
    end = worker_end(status, kill)
    assert (end.reason.value, end.text) == (reason, text)
