"""The cores that a process may use, how instances share them, and their instruction sets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conch.machine.facts import (
    cpu_flags,
    openmp,
    openmp_threads,
    shared_pool_threads,
    threads_per_instance,
    usable_cores,
)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8


def test_a_quota_of_version_2_limits(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": "300000 100000\n"}
    assert usable_cores(_write(tmp_path, files)) == 3


def test_the_quota_of_a_group_above_limits_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/app\n",
        "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
    }
    assert usable_cores(_write(tmp_path, files)) == 2


def test_in_a_container_the_group_is_the_mount_itself(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}
    assert usable_cores(_write(tmp_path, files)) == 1


def test_less_than_a_core_is_one(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}
    assert usable_cores(_write(tmp_path, files)) == 1


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
def test_a_quota_of_version_1_limits(tmp_path: Path, mount: str) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/app\n2:cpu,cpuacct:/app\n",
        f"sys/fs/cgroup/{mount}/app/cpu.cfs_quota_us": "400000\n",
        f"sys/fs/cgroup/{mount}/app/cpu.cfs_period_us": "100000\n",
    }
    assert usable_cores(_write(tmp_path, files)) == 4


def test_version_1_without_a_quota_does_not_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "1:cpu:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert usable_cores(_write(tmp_path, files)) == 8


def test_callers_and_the_threads_of_a_common_pool_make_the_cores() -> None:
    for cores in (1, 2, 8):
        for instances in range(1, cores + 1):
            assert instances + shared_pool_threads(cores, instances) - 1 == cores
    assert shared_pool_threads(2, 5) == 1


def test_pools_of_their_own_divide_the_cores() -> None:
    assert [threads_per_instance(8, instances) for instances in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("3,2", 3), ("", 4), ("0", 4), ("all", 4)])
def test_the_operators_limit_of_openmp_takes_precedence(
    monkeypatch: pytest.MonkeyPatch, value: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert openmp_threads(8, 2) == threads
    assert openmp(8, 2) == {"OMP_NUM_THREADS": value or "4"}


@pytest.mark.parametrize("name", ["flags\t\t", "Features\t"])
def test_instruction_sets_are_those_of_the_first_processor(tmp_path: Path, name: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\n{name}: fpu amx_bf16\n\nprocessor\t: 1\n{name}: other\n")
    assert cpu_flags(tmp_path) == {"fpu", "amx_bf16"}


def test_instruction_sets_may_be_unknown(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path) == frozenset()
