"""Where the code of a model's backend is: in the server's table, or a ``model.py`` in a directory of backends.

A Python-based backend is a directory ``NAME/`` whose ``model.py`` runs every model with ``backend: "NAME"``; of such a
model the version directory holds data only.  Used in threads, when a model is read and when it is loaded, as disks are
read, and by ``conch check``.  Messages are Triton's where it has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conch.backends.table import BACKENDS, WAYS_OUT
from conch.config.complete import complete_backend
from conch.config.problem import Problem
from conch.config.schema import PYTHON_RUNTIME, ModelConfig, copied, is_ensemble
from conch.errors import ConchError
from conch.repository.listing import directories_in
from conch.repository.names import is_directory_name, is_utf8

#: The backends that come with conch as Python-based ones.
SHIPPED: Final = Path(__file__).parents[1] / "backends" / "shipped"
#: Where tritonserver looks without ``--backend-directory``.
TRITONS_DIRECTORY: Final = Path("/opt/tritonserver/backends")
#: The archive beside a backend's ``model.py`` with the environment that its models run in.
ENVIRONMENT_ARCHIVE: Final = "pb_exec_env_model.py.tar.gz"


@dataclass(frozen=True)
class BackendDirectories:
    """The directories of backends; ``first`` is that of ``--backend-directory``, if it was given.

    What is in ``first`` goes before the server's own backends; these go before what Triton's usual directory has, which
    is looked at only without ``first``.
    """

    first: Path | None = None

    @classmethod
    def beginning_with(cls, directory: str) -> BackendDirectories:
        """The places with the value of ``--backend-directory``, which may be empty."""
        return cls(Path(directory).absolute() if directory else None)

    def directory_of(self, config: ModelConfig, name: str, artefacts: frozenset[str]) -> Path | None:
        """The directory of the Python-based backend that runs the model ``name``; None where there is none.

        ``config`` is the configuration as written, ``artefacts`` what lies in the first version directory.
        """
        named = copied(config)
        try:
            complete_backend(named, name, artefacts)
        except ConchError:
            return None  # its load will say so
        return self.python_based(named.backend, named.runtime)

    def python_based(self, backend: str, runtime: str = "") -> Path | None:
        """The directory of the Python-based backend of that name, None for any other backend."""
        if runtime not in ("", PYTHON_RUNTIME) or not is_directory_name(backend):
            return None
        for place in self._places():
            directory = place / backend
            own = backend in BACKENDS and (backend == "python" or place != self.first)
            passed_over = not runtime and (own or (directory / _library(backend)).exists())
            if not passed_over and (directory / PYTHON_RUNTIME).exists():
                return directory
        return None

    def found(self) -> dict[str, str]:
        """Every Python-based backend and its ``model.py``, by name."""
        names = {name for place in self._places() for name in _names(place)}
        directories = {name: self.python_based(name) for name in sorted(names)}
        return {
            name: str(directory / PYTHON_RUNTIME) for name, directory in directories.items() if directory is not None
        }

    def check(self, config: ModelConfig, directory: Path, version: int) -> None:
        """Refuse a completed configuration whose backend or ``runtime`` this server cannot run, with INVALID_ARG.

        ``directory`` is the model's.
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

    def _places(self) -> Iterator[Path]:
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
            hint = "leave 'runtime' out: models with backend \"python\" have a model.py of their own"
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
            (place / library).exists() for place in self._searched(backend, directory, version)
        ):
            return self._library_problem(config, library, directory, version)
        problem = f"unable to find backend library for backend '{backend}'"
        if backend in WAYS_OUT:
            return Problem(f"{problem}: {WAYS_OUT[backend]}", ("backend",))
        return Problem(f"{problem}, try specifying runtime on the model configuration.", ("backend",))

    def _library_problem(self, config: ModelConfig, library: str, directory: Path, version: int) -> Problem:
        searched = self._searched(config.backend, directory, version)
        relative = library.lstrip("/")  # as Triton joins paths
        found = next((place for place in searched if (place / relative).exists()), None)
        if found is None:
            places = " ".join(f"'{place}'" for place in searched)
            return Problem(
                f"unable to find backend library '{library}' for model '{config.name}', searched: {places} ",
                ("runtime",),
                hint=f"leave 'runtime' out, or set it to \"{PYTHON_RUNTIME}\" for a Python-based backend",
            )
        if not (found / relative).resolve().is_relative_to(found.resolve()):
            return Problem(
                f"backend library name '{library}' escapes backend directory '{found}', for model '{config.name}', "
                "check model config runtime field",
                ("runtime",),
            )
        return Problem(
            f"unable to load shared library: {found / relative}: libraries of tritonserver do not run here; "
            f'a backend that is written in Python runs with runtime: "{PYTHON_RUNTIME}"',
            ("runtime",) if config.runtime else ("backend",),
        )


def _names(place: Path) -> list[str]:
    """The directories in ``place``; none where it is not there or may not be read."""
    try:
        return [name for name in directories_in(place) if is_utf8(name)]
    except OSError:
        return []


#: The places without ``--backend-directory``.
USUAL_PLACES: Final = BackendDirectories()


def _library(backend: str) -> str:
    """The name of a backend's shared library."""
    return f"libtriton_{backend}.so"
