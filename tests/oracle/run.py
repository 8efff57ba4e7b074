"""Runs the oracle's programs, and ends every process that it starts by its id."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from tests.oracle.install import Oracle, install, library_path

#: Maximum number of starts of a server that aborts at the start: on a busy machine, its stubs sometimes crash, and the
#: server with them.
_STARTS = 3
#: Number of ports that a process reserves: after a server has ended, its ports cannot be used for a minute.
_RESERVED_PORTS = 400


class TritonServer:
    """The real server over ``repository``, as a context manager.

    ``flags`` are passed to the server; ``python`` is the interpreter of another environment for its models (with a
    numpy older than 2). ``http``, ``grpc`` and ``metrics`` are ``127.0.0.1:port``. With ``wait=False`` the context is
    entered at once, for servers that are expected to fail.
    """

    def __init__(
        self,
        repository: Path | str,
        *flags: str,
        oracle: Oracle | None = None,
        log: Path | None = None,
        wait: bool = True,
        env: dict[str, str] | None = None,
        python: Path | None = None,
    ) -> None:
        self.oracle = oracle or install()
        self.wait = wait
        ports = free_ports(3)
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
        self.command = [
            str(self.oracle.server),
            f"--model-repository={repository}",
            f"--backend-directory={self.oracle.backends}",
            f"--cache-directory={self.oracle.caches}",
            "--http-address=127.0.0.1",
            f"--http-port={ports[0]}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={ports[1]}",
            f"--metrics-port={ports[2]}",
            "--exit-timeout-secs=3",
            *flags,
        ]
        self.env = {
            **os.environ,
            "LD_LIBRARY_PATH": library_path(self.oracle),
            # The stub runs an isolated interpreter (PYTHONPATH is ignored): it finds its packages
            # through the first ``python3`` on the path.
            "PATH": f"{(python or self.oracle.python).parent}:{os.environ['PATH']}",
            **(env or {}),
        }
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TritonServer:
        self._start()
        starts = 1
        while self.wait:
            try:
                wait_until_ready(self.http, self._running)
                break
            except BaseException:
                aborted = self._running.poll() == -signal.SIGABRT
                self._kill()
                if not aborted or starts == _STARTS:
                    raise
            self._start()
            starts += 1
        return self

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def _start(self) -> None:
        output = self.log.open("wb") if self.log else subprocess.DEVNULL
        # A separate process group, because a killed server leaves its stubs behind.
        self.process = subprocess.Popen(
            self.command, env=self.env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def _kill(self) -> None:
        """Kill the server and its stubs, and remove their shared memory.

        The server would take three to four seconds to end on SIGTERM, most of which it sleeps.
        """
        memory = _python_memory(self._running.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running.pid, signal.SIGKILL)
        self._running.wait()
        for path in memory:
            path.unlink(missing_ok=True)


def _python_memory(pid: int) -> set[Path]:
    """Return the files of shared memory through which a server exchanges tensors with its Python models."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # the server has ended
        return set()
    return {Path(path) for path in re.findall(r"/dev/shm/triton_python_backend\S+", maps)}


def perf_analyzer(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the real perf_analyzer to its end."""
    oracle = install()
    env = {**os.environ, "LD_LIBRARY_PATH": library_path(oracle)}
    return subprocess.run(
        [str(oracle.perf_analyzer), *arguments], env=env, capture_output=True, text=True, timeout=timeout
    )


def _reserved_ports() -> Iterator[int]:
    """Reserve ports that other test runs on this machine do not use, and repeat them endlessly.

    They are below the range from which systems choose ports for clients and for servers on port 0.
    """
    folder = Path(tempfile.gettempdir(), "ports-of-conch-tests")
    folder.mkdir(exist_ok=True)
    starts = range(10_000, 30_000, _RESERVED_PORTS)
    for start in random.SystemRandom().sample(starts, len(starts)):
        descriptor = os.open(folder / str(start), os.O_CREAT | os.O_RDWR)  # locked until this process ends
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
        else:
            return itertools.cycle(range(start, start + _RESERVED_PORTS))
    raise RuntimeError(f"other test runs have reserved all ports in {folder}")


#: At the import, because tests compare the open files of this process before and after.
_PORTS = _reserved_ports()


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 on which nothing listens now, and which no other test chooses before a server does."""
    ports: list[int] = []
    while len(ports) < count:
        port = next(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def wait_until_ready(
    address: str, process: subprocess.Popen[bytes], timeout: float = 300, scheme: str = "http"
) -> None:
    """Wait until ``/v2/health/ready`` returns 200; raises if the process ends or the timeout passes before.

    With ``scheme`` https, any certificate is accepted.
    """
    context = ssl.create_default_context() if scheme == "https" else None
    if context is not None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server exited with status {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{scheme}://{address}/v2/health/ready", timeout=5, context=context):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    raise TimeoutError(f"the server at {address} was not ready within {timeout:g} s")
