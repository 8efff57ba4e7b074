"""Measures the size of a variant on disk, and the memory of a process that runs only this variant.

All variants of an encoder share the process of ``conch convert``, where memory cannot be attributed. So each is opened
in its own process of this module, which runs it once at the largest shape and reports the resident memory.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

#: The timeout of a process (s).
_TIMEOUT: Final = 300

#: Opens a variant and runs it; the returned object stays in memory. Must be picklable.
Opening = Callable[[], object]


def resident(openings: Mapping[str, Opening], at_once: int, progress: Callable[[str], None]) -> list[int]:
    """Return the resident memory (bytes) of a process after each of ``openings``, by name; 0 if one fails.

    Runs ``at_once`` processes at a time. ``progress`` is called in threads, when each begins.
    """

    def measure(name: str) -> int:
        progress(f"measuring the memory of {name}")
        return _resident(openings[name])

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(measure, openings))


def together(openings: Sequence[Opening]) -> object:
    """Open several variants in one process."""
    return [opening() for opening in openings]


def _resident(opening: Opening) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "conch.convert.footprint"]
    try:
        ended = subprocess.run(
            command, input=pickle.dumps(opening), capture_output=True, env=environment, timeout=_TIMEOUT, check=True
        )
        return int(ended.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def on_disk(files: Sequence[Path]) -> int:
    """Return the total size of files (bytes)."""
    return sum(file.stat().st_size for file in files)


def main() -> None:
    """Run the opening from standard input, and print the resident memory (bytes)."""
    opening: partial[Any] = pickle.load(sys.stdin.buffer)
    with redirect_stdout(sys.stderr):
        held = opening()
    print(psutil.Process().memory_info().rss)
    del held


if __name__ == "__main__":
    main()
