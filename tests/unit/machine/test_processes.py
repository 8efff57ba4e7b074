"""Whose processor time is whose."""

from __future__ import annotations

import os

from conch.machine.processes import ProcessTime, ProcessTimes, family, process_times


def process(pid: int, parent: int, seconds: float, name: str = "python") -> ProcessTime:
    return ProcessTime(pid, parent, name, 1.0, seconds)


def test_a_family_is_all_that_a_process_has_started() -> None:
    processes = [process(1, 0, 0), process(2, 1, 0), process(3, 2, 0), process(4, 0, 0)]

    assert family(processes, [1]) == {1, 2, 3}
    assert family(processes, [9]) == {9}


def test_groups_are_distinguished_from_others_and_never_go_back() -> None:
    readings = iter([
        [process(1, 0, 5), process(2, 0, 7), process(3, 0, 100, "cc1plus")],
        [process(1, 0, 6), process(2, 0, 9), process(4, 2, 3), process(3, 0, 104, "cc1plus")],
        [process(1, 0, 6), process(2, 0, 9), process(3, 0, 105, "cc1plus"), process(5, 3, 0.01, "sh")],
    ])  # fmt: skip
    times = ProcessTimes([[1], [2]], readings.__next__)

    assert times.read() == [1, 2 + 3]
    assert times.read() == [1, 2 + 3]  # a process that has ended keeps what it had used
    assert [(rival.name, rival.cores) for rival in times.rivals(10)] == [("cc1plus", 0.5)]


def test_this_process_is_among_all() -> None:
    [own] = [time for time in process_times() if time.pid == os.getpid()]
    assert own.seconds > 0 and own.name
