"""A local server: ``conch serve`` with a copy of the repository, in which configurations change."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from conch.analyze.servers.base import Configs, Overrides, ServerGone, ServerLost
from conch.analyze.servers.control import ControlClient
from conch.analyze.servers.copies import write_repository
from conch.errors import ConchError
from conch.machine import guard
from conch.perf.senders.channels.connecting import Address
from conch.repository.scan import ModelRepository
from conch.temporary import TemporaryFolder

# The server leads its own session, so that Ctrl+C reaches only the analysis; a guard process kills it if the analysis
# is killed.


HOST: Final = "127.0.0.1"
#: Timeouts for the start of a server without models, and for the exit of one with models (s).
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 15.0
#: Number of log lines quoted in a message.
_QUOTED: Final = 3
#: An error in the log; its line begins with level, time and place.
_COMPLAINT: Final = re.compile(r"^[EF]\d[^\]]*\] (.*)$", re.MULTILINE)
#: The log lines with the server's addresses.
_LISTENING: Final = re.compile(r"(GRPCInferenceService|HTTPService|Metrics Service) at [^ ,\"]*:(\d+)")


class GuardedServer:
    """A process of ``conch serve``, running from creation until ``close``; its output is appended to ``log``.

    It runs in ``folder`` (default: that of this process); ``environment`` replaces the whole environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._log = log
        with log.open("ab") as output:
            self._begun = output.tell()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment, cwd=folder,
            )  # fmt: skip
        self._guard = _guard_of(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raise ServerGone if the server has ended."""
        if not self.alive:
            raise ServerGone(f"conch serve has ended with status {self._process.returncode}:\n{self.log_end()}")

    def log_size(self) -> int:
        """Return the size of the log (bytes)."""
        return self._log.stat().st_size

    def complaints(self, since: int = 0) -> str:
        """Return the last errors in the log from byte ``since`` on, without time and place; empty if none."""
        return "\n".join(_COMPLAINT.findall(self._text(since))[-_QUOTED:])

    def log_end(self) -> str:
        """Return the last errors in the log, or its last lines if there are none."""
        return self.complaints() or "\n".join(self._text().splitlines()[-_QUOTED:])

    def close(self) -> None:
        """End the server and all processes that it started."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._guard.stdin is not None
        with suppress(OSError):
            self._guard.stdin.write(f"-{self._process.pid}\n".encode())
        self._guard.stdin.close()
        self._guard.wait()

    def _text(self, since: int = 0) -> str:
        return self._log.read_bytes()[max(since, self._begun) :].decode(errors="replace")


class ServerProcess(GuardedServer):
    """A server for ``repository`` without loaded models; its output is appended to ``log``.

    ``flags`` are further flags of the command, ``environment`` further environment variables. Raises ServerGone if the
    server does not start.
    """

    def __init__(self, repository: Path, log: Path, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [
            *(sys.executable, "-m", "conch", "serve", f"--model-repository={repository}"),
            *("--model-control-mode=explicit", f"--exit-timeout-secs={int(_STOP_SECONDS / 3)}"),
            *(f"--{name}-{what}" for name in ("http", "grpc", "metrics") for what in (f"address={HOST}", "port=0")),
            *flags,
        ]
        super().__init__(command, log, {**os.environ, **environment})
        try:
            self._ports = self._wait_for_ports()
        except BaseException:
            self.close()
            raise

    def address(self, protocol: str) -> Address:
        """Return the address for ``http`` or ``grpc``."""
        return Address(HOST, self._ports["GRPCInferenceService" if protocol == "grpc" else "HTTPService"])

    def _wait_for_ports(self) -> dict[str, int]:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            ports = _LISTENING.findall(self._text())
            if ports:
                return {service: int(port) for service, port in ports}
            self.check()
            time.sleep(0.02)
        raise ServerGone(f"conch serve does not listen after {_START_SECONDS:g} s:\n{self.log_end()}")


def _guard_of(pid: int) -> subprocess.Popen[bytes]:
    """Start a process that kills the process group of ``pid`` when this process ends for any reason."""
    program = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(guard.__file__))],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert program.stdin is not None
    program.stdin.write(f"+{pid}\n".encode())
    return program


#: Timeout for loading a model (s): checkpoints are read and compiled.
PATIENCE: Final = 600.0


class LocalServer:
    """Serves ``models`` of ``source`` and their ensemble steps; see :class:`AnalyzedServer`.

    ``log`` is the server's log, ``timeout`` the limit for loading a model (s).
    """

    def __init__(
        self, source: ModelRepository, models: Sequence[str], log: Path, *,
        protocol: str = "http", flags: Sequence[str] = (), environment: Mapping[str, str] | None = None,
        timeout: float = PATIENCE,
    ) -> None:  # fmt: skip
        self._source, self._models, self._log = source, tuple(models), log
        self._protocol, self._flags, self._timeout = protocol, tuple(flags), timeout
        self._environment = environment or {}
        self._home = TemporaryFolder("analyze")
        self._process: ServerProcess | None = None
        #: Size of the server's log at the last load (bytes).
        self._marked = 0
        try:
            log.unlink(missing_ok=True)
            write_repository(self._home.path, source, {})
            self._start()
        except BaseException:
            self._home.close()
            raise

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> Address:
        return self._running().address(self._protocol)

    def load(self, overrides: Overrides) -> Configs:
        process = self._running()
        self._marked = process.log_size()
        try:
            for model in [*reversed(self._models), *self._control.ready()]:
                if model in self._control.ready():
                    self._control.unload(model)
            write_repository(self._home.path, self._source, overrides)
            for model in self._models:
                self._control.load(model)
            return self._control.configs(self._models)
        except ServerGone as error:
            raise ServerGone(f"the server has ended: {error.message}\n{process.log_end()}") from error
        except ConchError as error:
            self.check()
            # Messages name the user's files, not the links to them.
            raise ConchError(
                error.message.replace(str(self._home.path), str(self._source.paths[0])), error.code
            ) from None

    def check(self) -> None:
        process = self._running()
        if not process.alive:
            raise ServerGone(f"the server has ended:\n{process.log_end()}")

    def complaints(self) -> str:
        return self._running().complaints(self._marked)

    def restart(self) -> None:
        if self._process is not None:
            self._process.close()
        try:
            self._start()
        except ServerGone as error:
            raise ServerLost(error.message, error.code) from error

    def close(self) -> None:
        process, self._process = self._process, None
        with suppress(OSError):
            if process is not None:
                process.close()
        self._home.close()

    def _start(self) -> None:
        self._process = ServerProcess(self._home.path, self._log, self._flags, self._environment)
        self._control = ControlClient(self._process.address("http"), self._timeout)

    def _running(self) -> ServerProcess:
        if self._process is None:
            raise ServerGone("the server is not running")
        return self._process
