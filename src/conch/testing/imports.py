"""What the code of a model does to its interpreter, undone whenever it does not run.

Every model is a module ``1.model`` and may import files beside it by bare names; in a server it has a process of its
own.  Here its modules, its path and the runtime of ``triton_python_backend_utils`` are there while it is called, so
that one test can load several models, and nothing of them is left for the next.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

from conch.backends.python import runtime
from conch.backends.python.runtime import Runtime

#: What ``conch.backends.python.model.prepare`` puts there.
_INTERFACE: Final = ("triton_python_backend_utils", "c_python_backend_utils")


class ModelImports:
    """The modules of the model in ``directory``; not for two threads at a time.

    Its directories go before all others: a namespace package such as ``1`` is looked for along the whole path, to which
    pytest adds the directory of every test.
    """

    def __init__(self, directory: Path, version_directory: Path) -> None:
        self._directory = directory
        self._modules: dict[str, ModuleType] = {}
        self._path = [str(version_directory), str(directory)]
        self._runtime: Runtime | None = None
        importlib.invalidate_caches()

    @contextmanager
    def active(self) -> Iterator[None]:
        """While this is entered, the model's modules are those that it imported before and imports now."""
        outer_runtime = runtime.install(self._runtime)
        outer_path = list(sys.path)
        covered = {name: sys.modules[name] for name in (*_INTERFACE, *self._modules) if name in sys.modules}
        outer_names = sys.modules.keys() - self._modules.keys()
        outer_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # as in a worker
        sys.path[:] = [*self._path, *outer_path]
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            self._path += [path for path in sys.path if path not in outer_path and path not in self._path]
            self._modules = {
                name: module for name, module in sys.modules.items() if name not in outer_names and self._has(module)
            }
            for name in (*_INTERFACE, *self._modules):
                sys.modules.pop(name, None)
            sys.modules.update(covered)
            sys.path[:] = outer_path
            sys.dont_write_bytecode = outer_bytecode
            self._runtime = runtime.install(outer_runtime)

    def _has(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        places = [file] if file else list(getattr(module, "__path__", ()))
        return any(Path(place).is_relative_to(self._directory) for place in places)
