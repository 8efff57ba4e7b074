"""The memory of processes, as the kernel and the driver of GPUs tell it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conch.machine.memory import ProcessMemory, ProcessReader, children_of, resident_bytes


def _process(proc: Path, pid: int, *, pss: int, shmem: int = 0, children: str = "") -> None:
    """A process with sizes in KiB."""
    (proc / f"{pid}/task/{pid}").mkdir(parents=True)
    (proc / f"{pid}/task/{pid}/children").write_text(children)
    rollup = (
        f"55d0-7ffe ---p 00000000 00:00 0    [rollup]\nRss:  {2 * pss} kB\nPss:  {pss} kB\nPss_Shmem:  {shmem} kB\n"
    )
    (proc / f"{pid}/smaps_rollup").write_text(rollup)


def _no_nvml() -> Any:
    raise ImportError


class FakeNvml:
    """A driver with one GPU, on which process 7 has 5000 bytes and another 900."""

    NVMLError = RuntimeError

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:
        return f"gpu{number}"

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: str) -> list[Any]:
        return [SimpleNamespace(pid=7, usedGpuMemory=5000), SimpleNamespace(pid=99, usedGpuMemory=900)]

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> Any:
        return SimpleNamespace(free=1000)


def test_memory_is_counted_in_pages(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "statm").write_text("900 300 20 1 0 80 0")
    assert resident_bytes(7, tmp_path) == 300 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("content", [None, "", "900", "nonsense here"])
def test_nothing_is_said_where_nothing_is_known(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "statm").write_text(content)
    assert resident_bytes(7, tmp_path) == 0


def test_a_process_counts_with_its_share_and_all_that_it_started(tmp_path: Path) -> None:
    _process(tmp_path, 7, pss=100, shmem=30, children="8 ")
    _process(tmp_path, 8, pss=10, children="9")
    _process(tmp_path, 9, pss=1)
    reader = ProcessReader(tmp_path, _no_nvml)
    assert reader.read([[7], [9], []]) == [ProcessMemory(111 << 10, 30 << 10), ProcessMemory(1 << 10), ProcessMemory()]


def test_a_kernel_without_shares_tells_the_resident_size(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "statm").write_text("900 300 20 1 0 80 0")
    assert ProcessReader(tmp_path, _no_nvml).read([[7]]) == [ProcessMemory(300 * os.sysconf("SC_PAGE_SIZE"))]


def test_processes_that_have_ended_have_nothing(tmp_path: Path) -> None:
    assert ProcessReader(tmp_path, _no_nvml).read([[7, 8]]) == [ProcessMemory()]


def test_memory_on_gpus_is_reported_by_process(tmp_path: Path) -> None:
    _process(tmp_path, 7, pss=1)
    reader = ProcessReader(tmp_path, FakeNvml)
    assert reader.read([[7], [8]]) == [ProcessMemory(1 << 10, gpus={0: 5000}), ProcessMemory()]
    assert reader.gpu_free() == {0: 1000}


def test_without_a_driver_there_are_no_gpus(tmp_path: Path) -> None:
    assert ProcessReader(tmp_path, _no_nvml).gpu_free() == {}


def test_this_process_is_read() -> None:
    [memory] = ProcessReader().read([[os.getpid()]])
    assert memory.host > 0


def test_process_that_ends_while_it_is_read_has_no_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    _process(tmp_path, 7, pss=100, children="8")
    monkeypatch.setattr(os, "listdir", gone)
    monkeypatch.setattr(os, "scandir", gone)
    assert children_of(7, tmp_path) == []
    assert ProcessReader(tmp_path, _no_nvml).read([[7]]) == [ProcessMemory(host=100 * 1024)]
