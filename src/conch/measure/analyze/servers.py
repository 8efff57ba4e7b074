"""The measured servers, local and remote, and the client that controls them.

A local server is ``conch serve`` with a copy of the repository, in which configurations change. A remote server, conch
or Triton, loads its models with the configurations of the analysis. Both apply the overrides of a candidate.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import orjson

from conch.client.deadline import Deadline, DeadlineError
from conch.client.transport import ConnectionFailedError
from conch.config import render
from conch.config.editing import edit, merge
from conch.core.errors import ConchError, internal, invalid, unavailable
from conch.core.variables import API_KEY
from conch.machine.guarded_server import GuardedServer
from conch.machine.temporary import TemporaryFolder
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.server.api import transport_to
from conch.repository.model_files import CONFIG_FILE, config_path, read_config
from conch.repository.scan import ModelRepository

#: Overrides by model name, as in ``Candidate.overrides``.
Overrides = Mapping[str, Mapping[str, Any]]
#: Configurations in force by model name, as in ``GET /v2/models/M/config``.
Configs = Mapping[str, Mapping[str, Any]]


class ServerGone(ConchError):
    """The server has ended or does not respond; INTERNAL because its previous actions are unknown."""


class ServerLost(ConchError):
    """The server has ended and cannot be started again, so the analysis stops."""


class AnalyzedServer(Protocol):
    """A server that loads the profiled models under one configuration after the other."""

    @property
    def address(self) -> Address:
        """The address of requests, for the measured protocol."""

    def load(self, overrides: Overrides) -> Configs:
        """Load all models, with ``overrides`` of the repository's configurations.

        Returns the configurations in force, including those of ensemble steps, which precede their ensemble. Raises
        ServerGone, and ConchError for a configuration that does not load.
        """

    def check(self) -> None:
        """Raise ServerGone if the server cannot be reached."""

    def complaints(self) -> str:
        """Return the server's errors since the last load; empty if its log is unavailable."""

    def restart(self) -> None:
        """Restart the server after :class:`ServerGone`, or if a model completes no request.

        A server that was not started here is only waited for. Raises ServerLost if it does not return.
        """

    def close(self) -> None:
        """Restore the initial state; raises INTERNAL, naming models that could not be restored."""


# The interface is the same over HTTP and gRPC; errors contain the server's message.


#: Timeout for calls that need no model (s).
_SECONDS: Final = 10.0
#: Interval between queries of a state (s).
_PAUSE: Final = 0.05
#: The error of conch and Triton servers on which clients may not load models.
_NOT_EXPLICIT: Final = "explicit model load / unload is not allowed"
_Result = TypeVar("_Result")


class ControlClient:
    """Loads and unloads models over HTTP, or over gRPC with ``grpc``; ``timeout`` applies to each of them (s).

    All methods raise ServerGone if the server cannot be reached, UNAVAILABLE if it does not let clients load models or
    exceeds the timeout, and INTERNAL with the server's reason if it refuses.
    """

    def __init__(self, address: Address, timeout: float, *, grpc: bool = False) -> None:
        self.timeout = timeout
        self.where = address.shown
        self._transport = transport_to(address, grpc=grpc)

    def config(self, model: str) -> Mapping[str, Any]:
        """Return the configuration in force of a loaded model."""
        action = f"read the configuration of '{model}'"
        config = self._call(action, _SECONDS, lambda deadline: self._transport.config(model, -1, deadline))
        document: Mapping[str, Any] = json.loads(render.to_json(config))
        return document

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Load a model; ``config`` replaces the repository's configuration."""
        text = None if config is None else json.dumps(config)
        self._call(f"load '{model}'", self.timeout, lambda deadline: self._transport.load(model, text, {}, deadline))

    def request_unload(self, model: str) -> None:
        """Request the unloading of a model, which may complete later."""
        action = f"unload '{model}'"
        self._call(action, self.timeout, lambda deadline: self._transport.unload(model, False, deadline))

    def index(self) -> Iterable[Mapping[str, Any]]:
        """Return ``name``, ``version`` and ``state`` of every model in the repository."""
        return self._call("list the models", _SECONDS, self._transport.index)

    def configs(self, models: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        """Return the configurations in force of loaded models; the steps of an ensemble precede it."""
        configs: dict[str, Mapping[str, Any]] = {}
        for model in models:
            config = self.config(model)
            steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
            step_models = [
                step_model
                for step_model in dict.fromkeys(str(step["model_name"]) for step in steps)
                if step_model not in configs
            ]
            configs = {**configs, **(self.configs(step_models) if step_models else {}), model: config}
        return configs

    def ready(self) -> set[str]:
        """Return the loaded models."""
        return {str(entry["name"]) for entry in self.index() if entry.get("state") == "READY"}

    def known(self) -> set[str]:
        """Return the models of the server's repository."""
        return {str(entry["name"]) for entry in self.index()}

    def unload(self, model: str) -> None:
        """Unload a model, and wait until it is unloaded."""
        self.request_unload(model)
        end = time.monotonic() + self.timeout
        while any(
            version["name"] == model and version.get("state", "") not in ("", "UNAVAILABLE") for version in self.index()
        ):
            if time.monotonic() > end:
                raise self._too_slow(f"unload '{model}'")
            time.sleep(_PAUSE)

    def _call(self, action: str, seconds: float, call: Callable[[Deadline], _Result]) -> _Result:
        """Return the response; ``action`` names the call in errors."""
        try:
            return call(Deadline.after(seconds))
        except DeadlineError:
            raise self._too_slow(action) from None
        except ConchError as error:
            if _NOT_EXPLICIT in error.message:
                raise unavailable(
                    f"the server at {self.where} does not let clients load models:"
                    " start it with --model-control-mode=explicit"
                ) from None
            if isinstance(error, ConnectionFailedError):
                raise ServerGone(f"no server responds at {self.where}: {error.cause}") from None
            raise internal(f"{action}: {error.message.rstrip().rstrip(';').rstrip()}") from None

    def _too_slow(self, action: str) -> ConchError:
        return unavailable(f"the server has not responded after {self.timeout:g} s: {action}")


def concise(overrides: Overrides, configs: Configs) -> Overrides:
    """Reduce instance groups in overrides to the differences from ``configs``, the repository's completed ones.

    A server names groups and fills in their GPUs; the user's file must not get these additions.
    """
    return {
        model: {
            name: _groups(value, configs.get(model, {}).get(name) or ())
            if name == "instance_group" and value
            else value
            for name, value in changes.items()
        }
        for model, changes in overrides.items()
    }


def with_ensembles(overrides: Overrides, configs: Configs) -> Overrides:
    """Limit the batch size of ensembles to that of their steps, as servers refuse larger ones."""
    changed = {model: dict(changes) for model, changes in overrides.items()}
    for model, config in configs.items():  # steps precede their ensemble
        steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
        sizes = [size for step in steps if (size := _batch(str(step["model_name"]), changed, configs))]
        own = _batch(model, changed, configs)
        if own and sizes and min(sizes) < own:
            changed.setdefault(model, {})["max_batch_size"] = min(sizes)
    return changed


def check_in_force(overrides: Overrides, configs: Configs) -> None:
    """Raise INTERNAL if ``configs``, which are in force, differ from a candidate's overrides.

    Servers complete configurations, so a field that they add cannot be removed. If a server ignored a change, the
    measurement would be attributed to the wrong candidate.
    """
    for model, changes in overrides.items():
        in_force = configs.get(model, {})
        for name, value in changes.items():
            if value is None and in_force.get(name):
                raise internal(f"model '{model}' has {name} anyway: the server adds it")
            for where, expected, known in _differences(value, in_force.get(name), name):
                raise internal(
                    f"model '{model}': {where} should be {expected} but is {known}: the server ignored the change"
                )


def _differences(expected: Any, in_force: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the ``expected`` values that differ ``in_force``, with their paths; lists may have been completed."""
    if isinstance(expected, Mapping):
        for name, value in expected.items():
            yield from _differences(
                value, in_force.get(name) if isinstance(in_force, Mapping) else None, f"{where}.{name}"
            )
        if in_force is None:
            yield where, "set", "not set"
    elif isinstance(expected, list):
        groups = in_force if isinstance(in_force, list) else []
        for group, known in zip(expected, groups, strict=False):
            if isinstance(group, Mapping):
                yield from _differences({"count": group["count"]} if "count" in group else {}, known, where)
    elif expected is not None and in_force is not None and str(expected) != str(in_force):
        yield where, expected, in_force


def _batch(model: str, overrides: Overrides, configs: Configs) -> int:
    known = {**configs.get(model, {}), **overrides.get(model, {})}
    return int(known.get("max_batch_size") or 0)


def _groups(groups: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    changed: list[Mapping[str, Any]] = []
    for number, group in enumerate(groups):
        was = before[number] if number < len(before) else {}
        changed.append({name: value for name, value in group.items() if name not in was or was[name] != value})
    return changed


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
        # The measurements send no key; the server is reached from this machine only.
        inherited = {name: value for name, value in os.environ.items() if name != API_KEY}
        super().__init__(command, log, {**inherited, **environment})
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

    def __exit__(self, *raised: object) -> None:
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


#: Interval between checks whether a server has returned (s).
_RETURN_PAUSE: Final = 0.5


class RemoteServer:
    """Measures ``models`` of a running server and their ensemble steps; see :class:`AnalyzedServer`.

    Without ``reload``, models stay as they are. ``close`` restores the loaded models and their configurations.

    Raises UNAVAILABLE for a server that does not let clients load models, and INVALID_ARG if its repository lacks a
    model.
    """

    def __init__(self, control: ControlClient, address: Address, models: Sequence[str], *, reload: bool = True) -> None:
        self.address = address
        self._control, self._reload = control, reload
        known = control.known()
        missing = [model for model in models if model not in known]
        if missing:
            raise invalid(
                f"the server at {control.where} has no model '{missing[0]}' in its repository;"
                f" it has {', '.join(sorted(known)) or 'none'}"
            )
        #: The configurations of the models that were loaded before.
        self._before: Mapping[str, Mapping[str, Any]] = (
            {model: control.config(model) for model in control.ready()} if reload else {}
        )
        self._base: dict[str, Mapping[str, Any]] = {}
        try:
            for model in models if reload else ():
                self._base = {**self._base, model: {}}
                control.load(model)
            self._base = control.configs(models)
        except BaseException:
            with suppress(ConchError):  # the first error is the relevant one
                self.close()
            raise

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def load(self, overrides: Overrides) -> Configs:
        """See :meth:`AnalyzedServer.load`; overrides apply to the configurations as completed by the server."""
        if not self._reload:
            return self._control.configs(list(self._base))
        ready = self._control.ready()
        for model in reversed(self._base):
            if model in ready:
                self._control.unload(model)
        loaded = {}
        for model in self._base:
            self._load(model, overrides)
            loaded[model] = self._control.config(model)
        for model in self._base:
            # Loading an ensemble may have reloaded its steps from the repository.
            if overrides.get(model) and self._control.config(model) != loaded[model]:
                self._load(model, overrides)
        return {model: self._control.config(model) for model in self._base}

    def check(self) -> None:
        self._control.known()

    def complaints(self) -> str:
        return ""

    def restart(self) -> None:
        """Wait until the server returns; it is not started here."""
        end = time.monotonic() + self._control.timeout
        while True:
            try:
                self._control.known()
                return
            except ServerGone as error:
                if time.monotonic() > end:
                    raise ServerLost(error.message, error.code) from error
                time.sleep(_RETURN_PAUSE)

    def close(self) -> None:
        """Unload the models that were not loaded before, and restore the others.

        A failure does not stop the rest. Raises INTERNAL, naming the models that could not be restored.
        """
        if not self._reload:
            return
        failed = {}
        new = [model for model in reversed(self._base) if model not in self._before]
        for model in (*new, *(model for model in self._base if model in self._before)):
            try:
                self._restore(model)
            except ConchError as error:
                failed[model] = error.message
        if failed:
            failures = "; ".join(f"'{model}': {message}" for model, message in failed.items())
            raise internal(f"the server at {self._control.where} could not restore its original models: {failures}")

    def _restore(self, model: str) -> None:
        before = self._before.get(model)
        if before is None:
            if model in self._control.ready():
                self._control.unload(model)
            return
        self._control.load(model)
        if self._control.config(model) != before:
            self._control.load(model, before)

    def _load(self, model: str, overrides: Overrides) -> None:
        changes = overrides.get(model)
        self._control.load(model, _changed(self._base[model], changes) if changes else None)


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with changes; both have the form that the server shows."""
    merged = merge(render.from_json(orjson.dumps(config).decode()), changes)
    changed: Mapping[str, Any] = orjson.loads(render.to_json(merged))
    return changed
