"""A server of one's own: ``conch serve`` over a copy of the repository, in which configurations change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from conch.analyze.servers.base import Configs, Overrides, ServerGone, ServerLost
from conch.analyze.servers.control import HttpControl
from conch.analyze.servers.copies import write_repository
from conch.analyze.servers.process import ServerProcess
from conch.errors import ConchError
from conch.perf.senders.channels.connecting import Address
from conch.repository.scan import ModelRepository
from conch.temporary import TemporaryFolder

#: How long a model may take to load (s): checkpoints are read, and compiled.
PATIENCE: Final = 600.0


class LocalServer:
    """Serves ``models`` of ``source``, and those that they are made of; see :class:`AnalyzedServer`.

    ``log`` is the server's log, ``patience`` how long a model may take to load (s).
    """

    def __init__(
        self, source: ModelRepository, models: Sequence[str], log: Path, *,
        protocol: str = "http", flags: Sequence[str] = (), environment: Mapping[str, str] | None = None,
        patience: float = PATIENCE,
    ) -> None:  # fmt: skip
        self._source, self._models, self._log = source, tuple(models), log
        self._protocol, self._flags, self._patience = protocol, tuple(flags), patience
        self._environment = environment or {}
        self._home = TemporaryFolder("analyze")
        self._process: ServerProcess | None = None
        #: How long the server's log was at the last load.
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
            # The user's files are told of, not the links to them.
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
        self._control = HttpControl(self._process.address("http"), self._patience)

    def _running(self) -> ServerProcess:
        if self._process is None:
            raise ServerGone("the server is not running")
        return self._process
