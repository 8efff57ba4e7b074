"""The loop of a level on a clock of the test's own: when it ends, and which windows count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from conch.machine.facts import MachineFacts
from conch.machine.processes import Interference
from conch.measure.perf.figures import WindowFigures
from conch.measure.perf.level import LevelEnvironment, LevelRun, WindowReading
from conch.measure.perf.measured import MachineFigures, Measured
from conch.measure.perf.plan import Levels, PerfPlan
from conch.measure.perf.run import sum_up
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.records import RECORD, Collected, Outcome, Recording, Unfinished

PLAN = PerfPlan("m", Address("h", 1), interval=1.0, warm_up=2.0)
SECOND = 10**9


class FakeSenders:
    """Senders whose requests end at even distances, ``per_second`` of the second that begins; ``fail`` names seconds
    whose requests fail, ``waiting`` is how many others wait for an answer; requests take ``seconds``."""

    def __init__(
        self, per_second: Callable[[int], int], fail: Iterable[int] = (), waiting: int = 1, seconds: float = 0.02
    ) -> None:
        self.now = self.asked = 0
        self._per_second = per_second
        self._fail = set(fail)
        self._waiting = waiting
        self._took = int(seconds * SECOND)

    def sleep(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)

    def clock(self) -> int:
        return self.now

    def collect(self) -> Collected:
        # While they answer, time passes and requests end, which belong to the window after.
        self.now += SECOND // 100
        rows = []
        for second in range(self.asked // SECOND, self.now // SECOND + 1):
            for number in range(count := self._per_second(second)):
                end = second * SECOND + (number + 1) * SECOND // count
                if self.asked < end <= self.now:
                    rows.append((end, Outcome.REFUSED if second in self._fail else Outcome.OK))
        self.asked = self.now
        records = np.zeros(len(rows), RECORD)
        for row, (end, outcome) in zip(records, rows, strict=True):
            row["end"], row["first"], row["outcome"] = end, end, outcome
            row["due"] = row["sent"] = row["written"] = end - self._took
        failed = sum(outcome is not Outcome.OK for _, outcome in rows)
        errors = {"no": failed} if failed else {}
        return Collected(records, np.zeros((0, 2), np.int64), Unfinished(self._waiting, self.now), errors, 0.5)


def take(
    senders: FakeSenders, plan: PerfPlan = PLAN, sights: Iterator[Interference] | None = None,
    gone: Callable[[], str] = lambda: "", on_window: Callable[[WindowFigures], object] = lambda window: None,
) -> tuple[LevelRun, Measured]:  # fmt: skip
    def reading() -> WindowReading:
        return WindowReading(next(sights) if sights is not None else Interference(), 1.5, 100)

    around = LevelEnvironment(lambda: [], reading, gone, senders.clock, senders.sleep)
    run = LevelRun(plan, senders, around, np.array([1]))
    run.take(on_window)
    level = plan.rates.first if plan.rates is not None else 1
    return run, sum_up(plan, level, [run], np.array([1]), writes_text=False)


def interference(*others: float) -> Iterator[Interference]:
    yield Interference()  # of the warm-up
    yield from map(Interference, others)


def test_warm_up_is_not_counted_and_no_request_is_lost_between_windows() -> None:
    run, measured = take(FakeSenders(lambda second: 1000 if second >= 2 else 5))
    assert len(run.windows) == 3 and measured.stable
    assert measured.figures.throughput == pytest.approx(1000, rel=0.001)
    assert sum(window.requests for window in measured.windows) == measured.figures.requests


def test_requests_of_the_level_before_that_end_late_are_not_of_this_one() -> None:
    """They take five seconds, of which two are warm-up: what ends in the first two windows began before the level."""
    _, measured = take(FakeSenders(lambda second: 100, seconds=5.0))
    assert [window.requests for window in measured.windows[:2]] == [0, 0]
    assert measured.windows[-1].requests == pytest.approx(100, abs=2)


@pytest.mark.parametrize("answered", [100, 198])
def test_a_rate_that_the_server_does_not_follow_is_reported(answered: int) -> None:
    plan = PerfPlan("m", Address("h", 1), interval=1.0, rates=Levels(200, 200, 1))
    _, measured = take(FakeSenders(lambda second: answered, waiting=50), plan)
    told = [warning for warning in measured.warnings if "of 200 requests per second" in warning]
    assert [warning.partition(":")[0] for warning in told] == (
        ["100.0 of 200 requests per second completed, and 50 have waited for up to 0.0 s"] if answered == 100 else []
    )


def test_disturbed_windows_are_repeated_and_do_not_count() -> None:
    """While others work, in the fourth and the fifth second, half as many requests are answered."""
    sights = interference(0.02, 0.5, 0.5, 0.02, 0.02)
    run, measured = take(FakeSenders(lambda second: 500 if second in (3, 4) else 1000), sights=sights)
    assert len(run.windows) == 5 and run.stability.counted == [0, 3, 4]
    assert measured.figures.throughput == pytest.approx(1000, rel=0.03)
    assert measured.stable and not measured.disturbed


def test_a_machine_that_is_never_quiet_is_not_waited_for_and_the_figures_say_so() -> None:
    run, measured = take(FakeSenders(lambda second: 100), sights=interference(*[0.5] * 10))
    assert len(run.windows) == 6 and measured.disturbed and measured.stable


def test_a_quota_that_is_used_up_is_a_warning_and_repeats_nothing() -> None:
    used_up = Interference(throttled=0.4)
    run, measured = take(FakeSenders(lambda second: 100), sights=iter([used_up] * 4))
    assert len(run.windows) == 3 and not measured.disturbed
    machine = MachineFigures(MachineFacts.read(), 0.0, 0.0, used_up)
    assert any(
        warning.startswith("the CPU quota was used up for 40%")
        for warning in replace(measured, machine=machine).warnings
    )


def test_windows_until_there_are_as_many_requests_as_wanted() -> None:
    plan = PerfPlan("m", Address("h", 1), interval=1.0, requests=300, trials=1)
    _, measured = take(FakeSenders(lambda second: 100), plan)
    assert 300 <= measured.figures.requests <= 310 and measured.figures.seconds == pytest.approx(3, rel=0.05)
    _, nothing = take(FakeSenders(lambda second: 0), plan)
    assert nothing.figures.seconds == pytest.approx(5, rel=0.1)


def test_a_server_that_dies_leaves_the_figures_of_before() -> None:
    dead = iter(["no server responds at h:1: refused"])
    answers = {2: 100, 3: 100, 4: 30, 5: 100}  # it goes in the third window, at whose end the first ones fail
    senders = FakeSenders(lambda second: answers.get(second, 0), fail=[5])
    run, measured = take(senders, gone=lambda: next(dead))
    assert [bool(window.figures.failures) for window in run.windows] == [False, False, True, True]
    assert measured.figures.throughput == pytest.approx(100, rel=0.05)
    assert next(iter(measured.warnings)) == (
        f"the server stopped responding after {measured.figures.requests} responses: no server responds at h:1: refused"
    )
    assert not measured.whole and not measured.stable


def test_a_level_without_answers_ends_when_that_is_sure() -> None:
    run, measured = take(FakeSenders(lambda second: 0))
    assert len(run.windows) == 5  # of a second each: five seconds may be one slow answer
    [warning] = measured.warnings
    assert warning.startswith("no request completed in 5.") and "the server hangs" in warning
    failing = PerfPlan("m", Address("h", 1), interval=5.0)
    run, measured = take(FakeSenders(lambda second: 10, fail=range(100)), failing)
    assert len(run.windows) == 1 and "no request succeeded" in next(iter(measured.warnings))
    assert measured.errors == {"no": measured.failed}
    run, _ = take(FakeSenders(lambda second: 10, fail=range(10, 100)), failing)
    assert len(run.windows) == 5  # those after a window with responses may be a restart


def test_a_watcher_may_end_a_level() -> None:
    run, measured = take(FakeSenders(lambda second: 10), on_window=lambda window: True)
    assert len(run.windows) == 1 and measured.stopped and measured.figures.requests
    assert [*measured.warnings] == ["stopped after 1 window"]


def test_ctrl_c_keeps_what_was_measured() -> None:
    def on_window(window: WindowFigures) -> None:
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(window)

    seen: list[WindowFigures] = []
    run, measured = take(FakeSenders(lambda second: 10), on_window=on_window)
    assert run.interrupted and measured.stopped and len(measured.windows) == 2

    class Interrupted(FakeSenders):
        def sleep(self, seconds: float) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(Interrupted(lambda second: 10))


def test_a_window_without_answers_counts_where_others_follow() -> None:
    """An answer every eight seconds is an eighth a second, although windows of five seconds have one or none."""
    plan = PerfPlan("m", Address("h", 1), interval=5.0)
    _, measured = take(FakeSenders(lambda second: second % 8 == 0), plan)
    assert 0 < measured.figures.throughput < 0.15 and not measured.stable


def test_requests_that_are_not_due_yet_are_waited_for() -> None:
    plan = PerfPlan("m", Address("h", 1), warm_up=0.0, requests=3, total_requests=3, trials=1)
    _, measured = take(FakeSenders(lambda second: second % 60 == 9, waiting=0), plan)
    assert measured.figures.requests == 3 and measured.whole


class LateSenders(FakeSenders):
    """Senders of which one hands over its request, the first to end, after all the others have theirs."""

    def collect(self) -> Collected:
        collected = super().collect()
        records = collected.records
        late = records["end"] == 2 * SECOND - 9 * SECOND // 10
        kept = getattr(self, "kept", records[:0])
        if self.now > 3 * SECOND:
            self.kept = records[:0]
            return replace(collected, records=np.concatenate([records, kept]))
        self.kept = np.concatenate([kept, records[late]])
        return replace(collected, records=records[~late])


def test_requests_that_are_handed_over_late_are_of_the_window() -> None:
    plan = PerfPlan("m", Address("h", 1), warm_up=0.0, requests=10, total_requests=10, trials=1)
    _, measured = take(LateSenders(lambda second: 10 * (second == 1)), plan)
    assert measured.figures.requests == 10 and measured.whole


def test_requests_that_get_no_answer_are_missed() -> None:
    plan = PerfPlan("m", Address("h", 1), warm_up=0.0, requests=10, total_requests=10, trials=1)
    _, measured = take(FakeSenders(lambda second: 3 * (second == 1)), plan)
    assert (measured.figures.requests, measured.missing) == (3, 7) and not measured.whole
    assert next(iter(measured.warnings)).startswith("only 3 of 10 requests completed")
    # They waited for nothing: that is part of how long it took.
    assert measured.figures.seconds >= 15


def test_a_window_begins_with_its_first_request() -> None:
    def statistics() -> list[dict[str, object]]:
        senders.now += SECOND
        return []

    senders = FakeSenders(lambda second: 10)
    begun: list[int] = []
    around = LevelEnvironment(
        statistics, lambda: WindowReading(Interference()), lambda: "", senders.clock, senders.sleep,
        begin=lambda: begun.append(senders.now),
    )  # fmt: skip
    plan = PerfPlan("m", Address("h", 1), requests=2, total_requests=2, trials=1)
    run = LevelRun(plan, senders, around, np.array([1]))
    run.take(lambda window: None)
    assert [window.span[0] for window in run.windows] == begun


def test_long_windows_are_handed_over_in_parts() -> None:
    handed: list[int] = []
    senders = FakeSenders(lambda second: 100)
    around = LevelEnvironment(
        lambda: [], lambda: WindowReading(Interference()), lambda: "", senders.clock, senders.sleep,
        on_collected=lambda collected: handed.append(len(collected.records)),
    )  # fmt: skip
    run = LevelRun(PerfPlan("m", Address("h", 1), interval=10.0, trials=1), senders, around, np.array([1]))
    run.take(lambda window: None)
    assert max(handed) < 150 and run.figures().requests == pytest.approx(1000, rel=0.02)


def test_a_sender_that_does_nothing_but_answer_is_not_busy() -> None:
    recording, nothing = Recording(0), np.zeros(0, RECORD)
    recording.add(Collected(nothing, np.zeros((0, 2), np.int64), Unfinished(), {}, 0.2), 10 * SECOND)
    recording.add(Collected(nothing, np.zeros((0, 2), np.int64), Unfinished(), {}, 1.0), 10 * SECOND + SECOND // 1000)
    assert recording.busy == pytest.approx(0.2, rel=0.01)


def test_what_is_handed_over_late_counts_where_all_of_it_ended_with_the_window() -> None:
    recording, first, late = Recording(0), np.zeros(1, RECORD), np.zeros(2, RECORD)
    first["end"], late["end"] = 5 * SECOND, 9 * SECOND
    for records, now in ((first, 10 * SECOND), (late, 12 * SECOND)):
        recording.add(Collected(records, np.zeros((0, 2), np.int64), Unfinished(), {}, 0.0), now)

    counted, _ = recording.within([(0, 9 * SECOND)])

    assert len(counted) == 3
