"""Nothing is lost, whatever happens in whatever order: arrivals, cancellations, time, instances that die."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conch.core.errors import ConchError
from conch.server.schedulers.sequences.scheduler import NullRequest
from tests.unit.server.schedulers.sequences.bench import POLICY, SECOND, US, Bench

_SEQUENCES = st.sampled_from([1, 2, 3, 4, "a"])
_MARKS = st.sampled_from(["s", "", "", "e", "se"])


class Sequences(RuleBasedStateMachine):
    """Random events under a fake clock; after each, every request waits, runs, or has been answered once."""

    @initialize(
        oldest=st.booleans(),
        iterative=st.booleans(),
        ordered=st.booleans(),
        delay=st.sampled_from([0, 400 * US]),
        instances=st.integers(1, 2),
    )
    def start(self, oldest: bool, iterative: bool, ordered: bool, delay: int, instances: int) -> None:
        policy = replace(
            POLICY, oldest=oldest, iterative=iterative, preserve_ordering=ordered, max_delay=delay,
            minimum_utilization=0.75, preferred=(2,), max_idle=SECOND // 1000,
        )  # fmt: skip
        self.bench = Bench(policy, instances)
        self.iterative = iterative
        self.dead: set[str] = set()
        self.retired: set[str] = set()
        self.sent: list[str] = []
        #: The ids of the requests of each sequence that have run, in the order in which they were sent.
        self.started: dict[object, list[int]] = {}
        self.sequences: dict[str, object] = {}

    @rule(sequence=_SEQUENCES, marks=_MARKS, timeout=st.sampled_from([0, 0, 300]))
    def send(self, sequence: int | str, marks: str, timeout: int) -> None:
        id = str(len(self.sent))
        with contextlib.suppress(ConchError):
            request = self.bench.add(id, 0 if self.iterative and marks == "" else sequence, marks, timeout=timeout)
            self.sent.append(id)
            self.sequences[id] = self.bench.scheduler.roster.waiting[request.serial]

    @rule()
    def run(self) -> None:
        for key, ids in self.bench.run().items():
            assert key not in self.dead
            assert any(id != "-" for id in ids)
            self._check_batch(key)

    def _check_batch(self, key: str) -> None:
        real = [request for request in self.bench.running[key] if not isinstance(request, NullRequest)]
        sequences = [self.sequences[request.id] for request in real]
        assert len(set(sequences)) == len(real) <= 2
        for request, sequence in zip(real, sequences, strict=True):
            before = self.started.setdefault(sequence, [])
            assert not before or before[-1] <= int(request.id), "a sequence runs in the order of its requests"
            before.append(int(request.id))

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.bench.running)))
        batch = [one for one in self.bench.running[key] if not isinstance(one, NullRequest)]
        again = data.draw(st.lists(st.sampled_from(batch), unique=True)) if self.iterative else []
        self.bench.finish(key, again=again)

    @precondition(lambda self: self.bench.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.bench.open[data.draw(st.sampled_from(sorted(self.bench.open)))].cancel()

    @rule(us=st.sampled_from([1, 150, 350, 2000]))
    def wait(self, us: int) -> None:
        self.bench.wait(us * US)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.bench.instances))
        if key not in self.dead:
            self.dead.add(key)
            self.bench.die(key)

    @precondition(lambda self: self.dead)
    @rule()
    def restart(self) -> None:
        key = self.dead.pop()
        self.bench.scheduler.add_instance(key, self.bench.now)

    @rule()
    def drain(self) -> None:
        for request in self.bench.scheduler.drain():
            request.fail(ConchError("drained"))

    @invariant()
    def every_request_is_accounted_for(self) -> None:
        if not hasattr(self, "bench"):
            return
        scheduler, bench = self.bench.scheduler, self.bench
        waiting = {request.id for sequence in _sequences(scheduler) for request in _of(sequence)}
        running = {one.id for batch in bench.running.values() for one in batch if not isinstance(one, NullRequest)}
        held = bench.open.keys() - waiting - running
        assert not waiting & running
        assert all(bench.open[id].finished for id in held), "it has ended, and its answer waits for that of another"
        assert len(scheduler) == len(waiting)
        assert set(self.sent) == bench.open.keys() | bench.answers.keys()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for key in list(self.dead):
            self.bench.scheduler.add_instance(key, self.bench.now)
        for _ in range(3 * len(self.sent) + 10):
            self.bench.run()
            for key in list(self.bench.running):
                self.bench.finish(key)
            self.bench.wait(SECOND)
        assert not self.bench.open, "left alone, everything is answered"
        assert self.bench.scheduler.live == len(self.bench.scheduler) == 0


def _sequences(scheduler):  # type: ignore[no-untyped-def]
    return set(scheduler.roster.waiting.values())


def _of(sequence):  # type: ignore[no-untyped-def]
    issued = [] if sequence.slot is None or sequence.slot.owner is not sequence else [sequence.slot.in_flight]
    return [*sequence.waiting, *(one for one in issued if one.on_cancel is not None)]


TestSequencesFuzz = Sequences.TestCase
TestSequencesFuzz.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
