"""Isolates the interpreter state of a model's code while the model does not run.

Every model is a module ``1.model`` and may import neighboring files by bare names; in a server it has its own process.
Here its modules, path and working directory are active only while it is called or has in-flight requests, so that one
test can load several models without side effects on later tests.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Final

from conch.backends.python import pb_utils, runtime
from conch.backends.python.runtime import Runtime

#: The modules that ``conch.backends.python.python_backend.prepare`` installs.
_INTERFACE: Final = ("triton_python_backend_utils", "c_python_backend_utils")


class ModelImports:
    """The modules of the model in ``directory`` (for a Python-based backend, the directory of the backend).

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
