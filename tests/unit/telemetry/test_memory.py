"""The memory that a process may use, as the files of control groups tell it."""

from pathlib import Path

from conch.telemetry.memory import usable_memory


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
