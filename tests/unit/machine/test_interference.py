"""Interference by other processes."""

from __future__ import annotations

import pytest

from conch.machine.processes import CpuClocks, Interference, InterferenceMeter


def meter(*clocks: CpuClocks, cores: int = 2, spare: int = 0) -> InterferenceMeter:
    return InterferenceMeter(iter(clocks).__next__, cores=cores, spare=spare)


def test_what_others_use_is_what_this_process_does_not() -> None:
    found = meter(CpuClocks(10, 100, 7), CpuClocks(12, 104, 10), CpuClocks(13, 106, 12))

    assert found.since_last().others == pytest.approx(1 / 4)
    assert found.since_last().others == 0


def test_whole_time_counts_from_the_beginning() -> None:
    found = meter(CpuClocks(0, 0, 0), CpuClocks(1, 2, 1), CpuClocks(4, 8, 7))

    found.since_last()

    assert found.since_first().others == pytest.approx(1 / 8)


def test_others_on_cores_that_are_not_ours_do_not_disturb() -> None:
    clocks = (CpuClocks(0, 0, 0), CpuClocks(1, 7, 2))

    assert meter(*clocks, cores=2, spare=6).since_last().others == 0
    assert meter(*clocks, cores=2, spare=4).since_last().others == pytest.approx(0.5)


def test_clocks_of_hundredths_never_give_less_than_nothing() -> None:
    assert meter(CpuClocks(0, 0, 0), CpuClocks(1, 1.9, 2)).since_last().others == 0
    assert meter(CpuClocks(0, 0, 0), CpuClocks(0, 1, 0)).since_last().others == 0


def test_own_work_is_not_that_of_others() -> None:
    before = CpuClocks.read()
    count = sum(range(2_000_000))
    after = CpuClocks.read()

    assert count and after.own > before.own and after.wall > before.wall
    assert after.busy >= before.busy


def test_time_that_the_host_takes_disturbs_sooner_than_other_processes() -> None:
    found = meter(CpuClocks(0, 0, 0), CpuClocks(10, 12, 11, stolen=1)).since_last()

    assert (found.others, found.stolen) == (pytest.approx(1 / 20), pytest.approx(1 / 20))
    assert found.disturbs and not Interference(others=1 / 20).disturbs
    assert str(found) == "other processes used 5% of the cores, 5% went to other guests of the host (steal)"


def test_an_exceeded_quota_is_reported_and_is_not_interference() -> None:
    found = meter(CpuClocks(0, 0, 0, throttled=3), CpuClocks(10, 1, 1, throttled=5)).since_last()

    assert not found.disturbs
    assert str(found).endswith("the CPU quota was used up for 10% of the time (throttling)")
