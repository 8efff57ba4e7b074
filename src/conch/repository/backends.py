"""Finds the code of a model's backend: a built-in backend, or a ``model.py`` in a backend directory.

A Python-based backend is a directory ``NAME/`` with a ``model.py`` that runs every model with ``backend: "NAME"``. The
version directories of such a model hold only data. Calls read disks, so the server makes them in threads, when it
reads and when it loads a model; ``conch check`` uses them too. Messages are Triton's where Triton has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conch.backends.table import BACKENDS, WAYS_OUT
from conch.config.complete import complete_backend
from conch.config.reading import Problem
from conch.config.schema import PYTHON_RUNTIME, ModelConfig, copied, is_ensemble
from conch.core.errors import ConchError
from conch.repository.names import is_directory_name, is_utf8
from conch.repository.versions import directories_in

#: The Python-based backends that come with conch.
SHIPPED: Final = Path(__file__).parents[1] / "backends" / "shipped"
#: The directory that tritonserver searches without ``--backend-directory``.
TRITONS_DIRECTORY: Final = Path("/opt/tritonserver/backends")
#: An archive beside a backend's ``model.py`` with the Python environment for its models.
ENVIRONMENT_ARCHIVE: Final = "pb_exec_env_model.py.tar.gz"


@dataclass(frozen=True)
class BackendDirectories:
    """The backend directories, in search order; ``first`` is the value of ``--backend-directory``, if given.

    A backend in ``first`` takes precedence over the server's own backends. Triton's usual directory comes last and is
    searched only without ``first``.
    """

    first: Path | None = None

    @classmethod
    def beginning_with(cls, directory: str) -> BackendDirectories:
        """Return the backend directories for a value of ``--backend-directory``, which may be empty."""
        return cls(Path(directory).absolute() if directory else None)

    def directory_of(self, config: ModelConfig, name: str, artefacts: frozenset[str]) -> Path | None:
        """Return the directory of the Python-based backend that runs the model ``name``, or None.

        ``config`` is the configuration as written; ``artefacts`` are the names in the first version directory.
        """
        named = copied(config)
        try:
            complete_backend(named, name, artefacts)
        except ConchError:
            return None  # loading the model reports the error
        return self.python_based(named.backend, named.runtime)

    def python_based(self, backend: str, runtime: str = "") -> Path | None:
        """Return the directory of the Python-based backend ``backend``, or None for any other backend."""
        if runtime not in ("", PYTHON_RUNTIME) or not is_directory_name(backend):
            return None
        for parent in self._directories():
            directory = parent / backend
            own = backend in BACKENDS and (backend == "python" or parent != self.first)
            passed_over = not runtime and (own or (directory / _library(backend)).exists())
            if not passed_over and (directory / PYTHON_RUNTIME).exists():
                return directory
        return None

    def found(self) -> dict[str, str]:
        """Return the path of ``model.py`` for each Python-based backend, by name."""
        names = {name for parent in self._directories() for name in _names(parent)}
        directories = {name: self.python_based(name) for name in sorted(names)}
        return {
            name: str(directory / PYTHON_RUNTIME) for name, directory in directories.items() if directory is not None
        }

    def check(self, config: ModelConfig, directory: Path, version: int) -> None:
        """Check that this server can run the backend and ``runtime`` of a completed configuration.

        ``directory`` is the model's directory. Raises INVALID_ARG.
        """
        if is_ensemble(config) or not config.backend:
            return
        if config.runtime == PYTHON_RUNTIME:
            if self.python_based(config.backend, PYTHON_RUNTIME) is None:
                raise self._no_model_py(config)
        elif config.runtime:
            if config.backend not in BACKENDS or config.runtime != _library(config.backend):
                raise self._library_problem(config, config.runtime, directory, version)
        elif config.backend not in BACKENDS:
            raise self._unknown(config, directory, version)

    def _directories(self) -> Iterator[Path]:
        if self.first is not None:
            yield self.first
        yield SHIPPED
        if self.first is None:
            yield TRITONS_DIRECTORY

    def _searched(self, backend: str, directory: Path, version: int) -> list[Path]:
        return [directory / str(version), directory, (self.first or TRITONS_DIRECTORY) / backend]

    def _no_model_py(self, config: ModelConfig) -> Problem:
        searched = (self.first or TRITONS_DIRECTORY) / config.backend / PYTHON_RUNTIME
        hint = f"put it at {searched}, or start the server with --backend-directory"
        if config.backend == "python":
            hint = "leave 'runtime' out: models with backend \"python\" have their own model.py"
        return Problem(
            f"unable to find Python backend based backend library '{PYTHON_RUNTIME}' for model '{config.name}', "
            f"searched: '{searched}'",
            ("runtime",),
            hint=hint,
        )

    def _unknown(self, config: ModelConfig, directory: Path, version: int) -> Problem:
        backend = config.backend
        library = _library(backend)
        if is_directory_name(backend) and any(
            (parent / library).exists() for parent in self._searched(backend, directory, version)
        ):
            return self._library_problem(config, library, directory, version)
        problem = f"unable to find backend library for backend '{backend}'"
        if backend in WAYS_OUT:
            return Problem(f"{problem}: {WAYS_OUT[backend]}", ("backend",))
        return Problem(f"{problem}, try specifying runtime on the model configuration.", ("backend",))

    def _library_problem(self, config: ModelConfig, library: str, directory: Path, version: int) -> Problem:
        searched = self._searched(config.backend, directory, version)
        relative = library.lstrip("/")  # as Triton joins paths
        holder = next((parent for parent in searched if (parent / relative).exists()), None)
        if holder is None:
            quoted = " ".join(f"'{parent}'" for parent in searched)
            return Problem(
                f"unable to find backend library '{library}' for model '{config.name}', searched: {quoted} ",
                ("runtime",),
                hint=f"leave 'runtime' out, or set it to \"{PYTHON_RUNTIME}\" for a Python-based backend",
            )
        if not (holder / relative).resolve().is_relative_to(holder.resolve()):
            return Problem(
                f"backend library name '{library}' escapes backend directory '{holder}', for model '{config.name}', "
                "check model config runtime field",
                ("runtime",),
            )
        return Problem(
            f"unable to load shared library: {holder / relative}: libraries of tritonserver do not run here; "
            f'a backend that is written in Python runs with runtime: "{PYTHON_RUNTIME}"',
            ("runtime",) if config.runtime else ("backend",),
        )


def _names(directory: Path) -> list[str]:
    """Return the names of the directories in ``directory``; empty if it is missing or unreadable."""
    try:
        return [name for name in directories_in(directory) if is_utf8(name)]
    except OSError:
        return []


#: The backend directories without ``--backend-directory``.
DEFAULT_BACKEND_DIRECTORIES: Final = BackendDirectories()


def _library(backend: str) -> str:
    """Return the name of a backend's shared library."""
    return f"libtriton_{backend}.so"
