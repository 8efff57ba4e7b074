"""What the kernel says of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conch.workers.host.activity import activity
from tests.events import eventually


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_stopped_process_is_told_from_one_that_sleeps() -> None:
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
    fields = " ".join(map(str, range(4, 14)))
    (tmp_path / "7" / "stat").write_text(f"7 (a) b) D {fields} 30 12 0")
    assert activity(7, tmp_path) == ("D", 42, 0)
    (tmp_path / "7" / "io").write_text("rchar: 1\nwchar: 2\nread_bytes: 4\nwrite_bytes: 8\n")
    assert activity(7, tmp_path) == ("D", 42, 7)
