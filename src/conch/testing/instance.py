"""One instance of a model in this process: a backend and the server's model, connected by a local channel."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final

from conch.backends.python import pb_utils, runtime
from conch.backends.python.runtime import Runtime
from conch.config import render
from conch.config.complete import merge_completion
from conch.config.schema import ModelConfig, copied
from conch.config.validate import validate_load
from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest
from conch.core.tensors import Buffer
from conch.machine.facts import visible_gpus
from conch.repository.model_files import ModelFiles
from conch.server.execution.executor import Executor
from conch.server.execution.starting import init_frame, instance_fields, placements_of
from conch.server.model import Model
from conch.telemetry.custom import CustomMetrics
from conch.telemetry.statistics import ModelStatistics
from conch.testing.fakes import FakeModel, FakeModels
from conch.workers.child.buffers import BufferMap
from conch.workers.child.channel import Header
from conch.workers.child.messages import of_model
from conch.workers.child.packing import Descriptor, Packer, Unpacker
from conch.workers.host.bls import BlsHandler, MetricsHandler
from conch.workers.host.execution import description, response_of


class LocalChannel:
    """A local substitute for a backend's :class:`conch.workers.child.channel.Channel`.

    ``on_frame`` is called with every frame that the backend sends, in the sending thread.
    """

    def __init__(self, on_frame: Callable[[Header, Packer], None]) -> None:
        self._on_frame = on_frame
        self._arrived = threading.Condition()
        #: Set by the backend: takes cancellations and responses of other models.
        self.early: Callable[[Header, bytearray], bool] = lambda header, payload: False
        #: Set by the backend: returns the header to send before the next frame.
        self.ahead: Callable[[], Header | None] = lambda: None
        self.buffers = BufferMap()
        #: Serial numbers of cancelled requests.
        self.cancelled: set[int] = set()

    def send(self, header: Header, packer: Packer | None = None) -> None:
        self.send_ahead()
        self.post(header, packer)

    def send_ahead(self) -> None:
        """Send the frame that must precede the next one, if any."""
        header = self.ahead()
        if header is not None:
            self.post(header)

    def post(self, header: Header, packer: Packer | None = None) -> None:
        """Send a frame and nothing before it."""
        self._on_frame(header, packer or Packer())

    def deliver(self, header: Header, packer: Packer) -> None:
        """Deliver a response to the backend; its tensors are ``header["outputs"]``."""
        self.early(header, inline(header["outputs"], packer))
        with self._arrived:
            self._arrived.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until a delivered response has made ``done()`` true."""
        with self._arrived:
            self._arrived.wait_for(done)

    def poll(self) -> None:
        """Deliver the cancellations of requests to the backend."""
        for serial in self.cancelled:
            self.early({"op": "cancel", "serial": serial}, bytearray())


class LocalUnpacker(Unpacker):
    """Copies the tensors of a frame from its packer."""

    def __init__(self, packer: Packer) -> None:
        super().__init__(b"", BufferMap())
        self._large = {id(descriptor): data for descriptor, data in packer.large}
        self._small = iter(packer.payload)

    def take(self, descriptor: Descriptor) -> tuple[str, str, tuple[int, ...], Buffer]:
        name, datatype, shape, _ = descriptor
        data = self._large.get(id(descriptor))
        return name, datatype, tuple(shape), bytes(next(self._small) if data is None else data)


def inline(descriptors: Sequence[Any], packer: Packer) -> bytearray:
    """Return the payload of a frame with all its tensors, including large ones, in the order of ``descriptors``."""
    unpacker = LocalUnpacker(packer)
    return bytearray(b"".join(unpacker.take(descriptor)[3] for descriptor in descriptors))


_LEVELS: Final = {"VERBOSE": logging.DEBUG, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
#: The log levels for the model: all, because the test's own logging filters.
_LOG_ALL: Final = {"info": True, "warning": True, "error": True, "verbose": 1}


class LocalInstance:
    """Loads a model and runs batches of requests that :attr:`model` has accepted.

    Raises the model's exceptions.
    """

    def __init__(self, files: ModelFiles, version: int, config: ModelConfig, models: Mapping[str, FakeModel]) -> None:
        self._failures: list[BaseException] = []
        self._running: dict[int, InferRequest] = {}
        self._batches = 0
        self._log = logging.getLogger(f"conch.models.{files.name}")
        self._channel = LocalChannel(self._received)
        fakes = FakeModels(models, self._failures.append)
        self._bls = BlsHandler(fakes, files.name, self._reply, start=_run)
        self._metrics = MetricsHandler(CustomMetrics({}).holder(), lambda header: self._reply(header, None))
        backend = files.backend_directory
        self._imports = ModelImports(backend or files.directory, backend or files.version_directory(version))
        self._executor = _Waiting()
        #: Requests for which the model's modules stay active after ``execute``, by serial number.
        self._under_way: set[int] = set()
        #: Held while a batch is made and run, because a worker runs one at a time.
        self.lock = threading.RLock()
        try:
            with self._imports.active():
                self.backend: Any = self._open({**init_frame(files, version, config), "log": _LOG_ALL})
                completed = render.from_json(self.backend.complete())
            effective = copied(config)
            merge_completion(effective, completed)
            validate_load(effective, visible_gpus())
            labels = files.labels()
            with self._imports.active():
                placement = next(placements_of(effective))
                self.backend.start(instance_fields(placement), render.to_json(effective))
        except BaseException as error:
            self._imports.forget()
            if not isinstance(error, ConchError):
                raise
            self._failures.append(error)
        self.raise_failure()
        #: Accepts requests as a server's model does.
        self.model = Model(effective, version, self._executor, ModelStatistics(files.name, version), labels)

    def config_json(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.model.config_json)
        return loaded

    def execute(self) -> None:
        """Run the requests accepted since the last call in one batch."""
        requests = self._executor.take()
        packer = Packer()
        described = [description(request, packer) for request in requests]
        payload = inline([tensor for fields in described for tensor in fields["inputs"]], packer)
        self._batches += 1
        self._running.update((request.serial, request) for request in requests)
        self._batch = requests
        with self._imports.active():
            self.backend.execute({"op": "execute", "batch": self._batches, "requests": described}, payload)
            for request in requests:
                if not request.finished:
                    self._under_way.add(request.serial)
                    self._imports.enter()
        self.raise_failure()

    def end(self, request: InferRequest) -> None:
        """Stop waiting for responses to the request; cancels it if it has not ended."""
        if not request.finished:
            self.cancel(request)
        self._running.pop(request.serial, None)
        if request.serial in self._under_way:
            self._under_way.remove(request.serial)
            self._imports.leave()

    def give_up(self) -> None:
        """Discard accepted requests that have not started."""
        self._executor.take()

    def cancel(self, request: InferRequest) -> None:
        self._channel.cancelled.add(request.serial)

    def close(self) -> None:
        """Finalize the model, and end its backend's threads."""
        try:
            with self._imports.active():
                self.backend.stop()
                if hasattr(self.backend, "close"):
                    self.backend.close()
        finally:
            self._imports.forget()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the exception that the model has raised since the last call, with its own traceback."""
        if not self._failures:
            return
        failure, *_ = self._failures
        self._failures.clear()
        cause = failure.__cause__ if isinstance(failure, ConchError) and failure.__cause__ is not None else failure
        raise cause.with_traceback(of_model(cause.__traceback__))

    def _open(self, init: Header) -> Any:
        module, name = init["backend"].split(":")
        backend = getattr(importlib.import_module(module), name)(self._channel, init)
        if hasattr(backend, "on_failure"):
            backend.on_failure = self._failures.append
        return backend

    def _received(self, header: Header, packer: Packer) -> None:
        """Handle a frame from the backend, in any thread."""
        unpacker = LocalUnpacker(packer)
        match header["op"]:
            case "done":
                self._done(header, unpacker)
            case "response":
                request = self._running.get(header["serial"])
                if request is not None:
                    request.respond(response_of(header, unpacker, header["final"]))
            case "log":
                level = _LEVELS.get(header["level"], logging.INFO)
                record = self._log.makeRecord(
                    self._log.name, level, header["file"], header["line"], header["message"], (), None
                )
                if self._log.isEnabledFor(level):
                    self._log.handle(record)
            case _:
                if not self._metrics.handle(header):
                    self._bls.handle(header, unpacker)

    def _done(self, header: Header, unpacker: LocalUnpacker) -> None:
        if "error" in header:
            code, message = header["error"]
            for request in self._batch:
                request.fail(ConchError(message, Code[code]))
            return
        for request, described in zip(self._batch, header["responses"], strict=True):
            if described is not None:
                request.respond(response_of(described, unpacker, final=True))

    def _reply(self, header: Header, packer: Packer | None) -> None:
        self._channel.deliver(header, packer or Packer())


class _Waiting(Executor):
    """Stores the requests that the model has accepted; the test decides when they run."""

    def __init__(self) -> None:
        self._requests: list[InferRequest] = []

    def submit(self, request: InferRequest) -> None:
        self._requests.append(request)

    def take(self) -> list[InferRequest]:
        taken, self._requests = self._requests, []
        return taken


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration:
        return


#: The modules that ``conch.backends.python.python_backend.prepare`` installs.
_INTERFACE: Final = ("triton_python_backend_utils", "c_python_backend_utils")


class ModelImports:
    """The modules of the model in ``directory`` (for a Python-based backend, the directory of the backend).

    Every model is a module ``1.model`` and may import neighboring files by bare names; in a server it has its own
    process. Here its modules, path and working directory are active only while it is called or has in-flight requests,
    so that one test can load several models without side effects on later tests.

    Its directories precede all others on the path, because a namespace package such as ``1`` is searched along the
    whole path, to which pytest adds the directory of every test. At most one model's modules are active at a time: the
    modules of the model entered last. The services of its runtime, such as the logger, work until :meth:`forget`, also
    in threads that outlive its requests, unless another model has been entered since.
    """

    _entered: ClassVar[list[ModelImports]] = []
    #: All models that are not closed, the one entered last at the end.
    _loaded: ClassVar[list[ModelImports]] = []
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, directory: Path, version_directory: Path) -> None:
        self._directory = directory
        self._modules: dict[str, ModuleType] = {}
        self._path = [str(version_directory), str(directory)]
        self._working_directory: str | None = None
        self._runtime: Runtime | None = None
        importlib.invalidate_caches()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Activate the model's modules in a context; modules imported in it are kept."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Activate the model's modules, from any thread. Each call needs a call of :meth:`leave`."""
        with self._lock:
            if self._entered:
                self._entered[-1]._restore()
            self._entered.append(self)
            if self in self._loaded:
                self._loaded.remove(self)
            self._loaded.append(self)
            self._put()

    def leave(self) -> None:
        """Undo one call of :meth:`enter`; deactivates the modules and reactivates the previous model's, if any."""
        with self._lock:
            if self not in self._entered:
                return
            top = self._entered[-1]
            top._restore()
            at = len(self._entered) - 1 - self._entered[::-1].index(self)
            del self._entered[at]
            if self._entered:
                self._entered[-1]._put()

    def forget(self) -> None:
        """Undo all calls of :meth:`enter`, because the model is closed."""
        with self._lock:
            while self in self._entered:
                self.leave()
            if self in self._loaded:
                self._loaded.remove(self)
            installed = runtime.install(self._loaded[-1]._runtime if self._loaded else None)
            if installed is not self._runtime:
                runtime.install(installed)

    def _put(self) -> None:
        runtime.install(self._runtime)
        self._outer_path = list(sys.path)
        self._covered = {name: sys.modules[name] for name in (*_INTERFACE, *self._modules) if name in sys.modules}
        self._outer_names = sys.modules.keys() - self._modules.keys()
        self._outer_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # as in a worker
        sys.path[:] = [*self._path, *self._outer_path]
        sys.modules.update({**dict.fromkeys(_INTERFACE, pb_utils), **self._modules})
        self._outer_directory = _change_directory(self._working_directory)

    def _restore(self) -> None:
        inner = _change_directory(self._outer_directory)
        self._working_directory = None if inner == self._outer_directory else inner
        self._path += [path for path in sys.path if path not in self._outer_path and path not in self._path]
        self._modules = {
            name: module
            for name, module in list(sys.modules.items())
            if name not in self._outer_names and self._has(module)
        }
        for name in (*_INTERFACE, *self._modules):
            sys.modules.pop(name, None)
        sys.modules.update(self._covered)
        sys.path[:] = self._outer_path
        sys.dont_write_bytecode = self._outer_bytecode
        self._runtime = runtime.install(None)
        runtime.install(self._runtime)  # for threads that continue to run

    def _has(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        paths = [file] if file else list(getattr(module, "__path__", ()))
        return any(Path(path).is_relative_to(self._directory) for path in paths)


def _change_directory(to: str | None) -> str | None:
    """Change the working directory unless ``to`` is None; returns the previous one, None if it no longer exists."""
    try:
        before = os.getcwd()
    except FileNotFoundError:
        before = None
    if to is not None and to != before:
        os.chdir(to)
    return before
