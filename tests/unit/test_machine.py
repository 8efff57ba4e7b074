"""Whether others use the machine meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.machine import Bystanders, CpuClocks, processor


def bystanders(*clocks: CpuClocks, cores: int = 2, spare: int = 0) -> Bystanders:
    return Bystanders(iter(clocks).__next__, cores=cores, spare=spare)


def test_what_others_use_is_what_this_process_does_not() -> None:
    found = bystanders(CpuClocks(10, 100, 7), CpuClocks(12, 104, 10), CpuClocks(13, 106, 12))

    assert found.since_last() == pytest.approx(1 / 4)
    assert found.since_last() == 0


def test_whole_time_counts_from_the_beginning() -> None:
    found = bystanders(CpuClocks(0, 0, 0), CpuClocks(1, 2, 1), CpuClocks(4, 8, 7))

    found.since_last()

    assert found.since_first() == pytest.approx(1 / 8)


def test_others_on_cores_that_are_not_ours_do_not_disturb() -> None:
    clocks = (CpuClocks(0, 0, 0), CpuClocks(1, 7, 2))

    assert bystanders(*clocks, cores=2, spare=6).since_last() == 0
    assert bystanders(*clocks, cores=2, spare=4).since_last() == pytest.approx(0.5)


def test_clocks_of_hundredths_never_give_less_than_nothing() -> None:
    assert bystanders(CpuClocks(0, 0, 0), CpuClocks(1, 1.9, 2)).since_last() == 0
    assert bystanders(CpuClocks(0, 0, 0), CpuClocks(0, 1, 0)).since_last() == 0


def test_own_work_is_not_that_of_others() -> None:
    before = CpuClocks.read()
    count = sum(range(2_000_000))
    after = CpuClocks.read()

    assert count and after.own > before.own and after.wall > before.wall
    assert after.busy >= before.busy


def test_processor_is_named_by_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Some CPU\n")

    assert processor(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"
    assert processor(tmp_path / "none")
