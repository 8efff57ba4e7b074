"""A local server: ``conch serve`` with a copy of the repository, in which configurations change."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from conch.config.editing import edit
from conch.core.errors import ConchError, invalid
from conch.machine.guarded_server import GuardedServer
from conch.machine.temporary import TemporaryFolder
from conch.measure.analyze.servers.base import Configs, ControlClient, Overrides, ServerGone, ServerLost
from conch.measure.perf.senders.channels.connecting import Address
from conch.repository.model_files import CONFIG_FILE, config_path, read_config
from conch.repository.scan import ModelRepository

# The copy is a separate directory; the user's repository is only read. All files except configurations are links, so
# that they need no space and paths within a model stay valid.


def config_text(repository: ModelRepository, model: str) -> tuple[str, Path]:
    """Return the configuration of a model in its repository (empty if it has none), and the path of its file.

    Raises INVALID_ARG for an unknown model, and INTERNAL for a file that is not text.
    """
    try:
        directory = repository.directory(model)
    except ConchError as error:
        raise invalid(repository.no_such_model(model)) from error
    file = config_path(directory, repository.config_name)
    return (read_config(file) if file else ""), file or directory / CONFIG_FILE


def write_repository(folder: Path, source: ModelRepository, overrides: Overrides) -> None:
    """Write the models of ``source`` into ``folder`` with overrides, replacing models that are there.

    Unchanged models are included, because others may call them. Raises INVALID_ARG for an invalid override.
    """
    texts = {}
    for model, changes in overrides.items():
        text, file = config_text(source, model)
        texts[model] = edit(text, changes, str(file))
    folder.mkdir(parents=True, exist_ok=True)
    for model in source.names():
        copy = folder / model
        _remove(copy)
        if model not in texts:
            copy.symlink_to(source.directory(model))
            continue
        copy.mkdir()
        for path in source.directory(model).iterdir():
            if path.name not in (CONFIG_FILE, "configs"):
                (copy / path.name).symlink_to(path)
        if texts[model]:
            (copy / CONFIG_FILE).write_text(texts[model], encoding="utf-8")


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)  # rmtree does not follow links


HOST: Final = "127.0.0.1"
#: Timeouts for the start of a server without models, and for its last requests (s).
_START_SECONDS: Final = 60.0
_EXIT_SECONDS: Final = 5
#: Timeout for loading a model (s): checkpoints are read and compiled.
_LOAD_SECONDS: Final = 600.0
#: The log lines with the server's addresses.
_LISTENING: Final = re.compile(r"(GRPCInferenceService|HTTPService|Metrics Service) at [^ ,\"]*:(\d+)")


class ServerProcess(GuardedServer):
    """A server for ``repository`` without loaded models; its output is appended to ``log``.

    ``flags`` are further flags of the command, ``environment`` further environment variables. Raises ServerGone if the
    server does not start.
    """

    def __init__(self, repository: Path, log: Path, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [
            *(sys.executable, "-m", "conch", "serve", f"--model-repository={repository}"),
            *("--model-control-mode=explicit", f"--exit-timeout-secs={_EXIT_SECONDS}"),
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
            ports = _LISTENING.findall(self.log_text())
            if ports:
                return {service: int(port) for service, port in ports}
            if message := self.exit_message:
                raise ServerGone(message)
            time.sleep(0.02)
        raise ServerGone(f"conch serve does not listen after {_START_SECONDS:g} s:\n{self.log_end()}")


class LocalServer:
    """Serves ``models`` of ``source`` and their ensemble steps; see :class:`AnalyzedServer`.

    ``log`` is the server's log, ``timeout`` the limit for loading a model (s).
    """

    def __init__(
        self, source: ModelRepository, models: Sequence[str], log: Path, *,
        protocol: str = "http", flags: Sequence[str] = (), environment: Mapping[str, str] | None = None,
        timeout: float = _LOAD_SECONDS,
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
