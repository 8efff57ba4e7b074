"""What the kernel says of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conch.machine.processes import activity, children_activity
from tests.events import eventually


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_stopped_process_is_distinguished_from_one_that_sleeps() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            eventually(lambda: (found := activity(process.pid)) and found.state == "S", "sleeping")
            os.kill(process.pid, signal.SIGSTOP)
            eventually(lambda: (found := activity(process.pid)) and found.state == "T", "being stopped")
        finally:
            process.kill()
    assert activity(process.pid) is None


def test_name_of_a_program_may_have_anything_in_it(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = "4 5 6 7 8 9 10 11 0 13"
    (tmp_path / "7" / "stat").write_text(f"7 (a) b) D {fields} 30 12 0")
    assert activity(7, tmp_path) == ("D", 42, 0)
    (tmp_path / "7" / "io").write_text("rchar: 1\nwchar: 2\nread_bytes: 4\nwrite_bytes: 8\n")
    assert activity(7, tmp_path) == ("D", 42, 7)


def test_pages_of_mapped_files_are_read_ahead(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) D 4 5 6 7 8 9 10 11 3 13 30 12 0")
    assert activity(7, tmp_path) == ("D", 42, 3 * (128 << 10))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_programs_and_what_they_started_count_together() -> None:
    assert children_activity(os.getpid(), Path("/nowhere")) is None
    command = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", command], start_new_session=True) as process:
        try:
            eventually(
                lambda: (found := children_activity(os.getpid())) and found.cpu > activity(process.pid).cpu + 30,  # type: ignore[union-attr]
                "computing in a child's child",
            )
        finally:
            os.killpg(process.pid, signal.SIGKILL)
