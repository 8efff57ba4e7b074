"""The limit of open files: higher for the server than for what it starts."""

import subprocess
import sys

PROGRAM = """
import resource, subprocess, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from conch.workers.host.spawn import raise_limit, restore_limit
print(raise_limit()[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300, flush=True)
child = "import resource; input(); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE)
restore_limit(process.pid)
process.communicate(b"go")
"""


def test_the_server_may_open_more_files_and_its_workers_as_many_as_before() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == ["300", "True", "300"]
