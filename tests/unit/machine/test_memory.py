"""What the machine or a control group leaves, and sizes as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.machine.memory import FreeMemory, free_memory, memory_limit, read_size, usable_memory

MEMINFO = "MemTotal:       1000000 kB\nMemFree:   5 kB\nMemAvailable:    600000 kB\nHugePages_Total:       0\n"


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_machine_tells_what_is_left(tmp_path: Path) -> None:
    assert free_memory(_machine(tmp_path, {})) == FreeMemory(1_000_000 << 10, 600_000 << 10)


def test_a_control_group_leaves_less_and_its_cached_files_can_go(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod"
    files = {
        "proc/self/cgroup": "0::/pod\n",
        f"{group}/memory.max": "9000\n",
        f"{group}/memory.current": "8000\n",
        f"{group}/memory.stat": "anon 7000\nactive_file 300\ninactive_file 500\n",
    }
    assert free_memory(_machine(tmp_path, files)) == FreeMemory(9000, 1800, limited=True)


def test_the_group_above_limits_too_in_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "4:memory:/pod/app\n",
        f"{group}/pod/app/memory.limit_in_bytes": str((1 << 63) - 4096),
        f"{group}/pod/app/memory.usage_in_bytes": "100",
        f"{group}/pod/memory.limit_in_bytes": "9000",
        f"{group}/pod/memory.usage_in_bytes": "5000",
    }
    assert free_memory(_machine(tmp_path, files)) == FreeMemory(9000, 4000, limited=True)


def test_a_limit_above_what_the_machine_has_is_none(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": str(1 << 50)}
    root = _machine(tmp_path, files)
    assert memory_limit(1000, root) == 0
    assert free_memory(root) == FreeMemory(1_000_000 << 10, 600_000 << 10)


def test_a_control_group_leaves_less_than_the_machine_has(tmp_path: Path) -> None:
    machine = usable_memory(tmp_path)
    assert machine > 1 << 20
    group = tmp_path / "sys/fs/cgroup/memory.max"
    group.parent.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    group.write_text(f"{1 << 20}\n")
    assert usable_memory(tmp_path) == 1 << 20
    group.write_text(f"{machine * 2}\n")
    assert usable_memory(tmp_path) == machine


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("123456", 123456), ("8GiB", 8 << 30), ("1.5 gib", 3 << 29), ("500MB", 500_000_000), ("2k", 2000), ("7B", 7),
        ("80%", 800), ("0.5%", 5),
    ],
)  # fmt: skip
def test_sizes_have_units_or_are_shares(text: str, size: int) -> None:
    assert read_size(text, 1000) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8XB", "8 Gi B", "1e9", "8GiBB", "٣"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_size(text, 1000)
