"""What a variant takes: bytes on the disk, and memory of a process that holds nothing else.

All variants of an encoder are in the process of ``conch convert`` together, where no memory is any one's.  So each is
opened in a process of its own, which runs this module, runs it once at the largest shape, and says what is resident.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

#: A process that takes longer is given up (s).
_PATIENCE: Final = 300

#: Opens a variant and runs it; what it returns is what stays in memory.  It is pickled.
Opening = Callable[[], object]


def resident(openings: Sequence[Opening], at_once: int) -> list[int]:
    """The memory (bytes) that a process has after each of ``openings``, ``at_once`` processes at a time; 0 where one
    fails."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(_resident, openings))


def together(openings: Sequence[Opening]) -> object:
    """Open several in one process."""
    return [opening() for opening in openings]


def _resident(opening: Opening) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "conch.convert.footprint"]
    try:
        ended = subprocess.run(
            command, input=pickle.dumps(opening), capture_output=True, env=environment, timeout=_PATIENCE, check=True
        )
        return int(ended.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def on_disk(files: Sequence[Path]) -> int:
    """Bytes of files."""
    return sum(file.stat().st_size for file in files)


def main() -> None:
    """Run the opening on standard input, and print what is resident."""
    opening: partial[Any] = pickle.load(sys.stdin.buffer)
    with redirect_stdout(sys.stderr):
        held = opening()
    print(psutil.Process().memory_info().rss)
    del held


if __name__ == "__main__":
    main()
