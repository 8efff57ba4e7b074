"""``python -m tests.simulation``; see ``--help``.

The iteration order of sets of strings is part of a run, so Python's hash seed is fixed first.
"""

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":
    os.execve(
        sys.executable,
        [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
        {**os.environ, "PYTHONHASHSEED": "0"},
    )

from tests.simulation import virtual_time

virtual_time.install()

from tests.simulation.running import main  # noqa: E402

sys.exit(main())
