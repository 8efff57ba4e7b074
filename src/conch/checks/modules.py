"""Which modules a model's interpreter finds: its own files by looking, all others by asking the interpreter.

The interpreter is asked for the finders' answer only; nothing that a model imports is run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

from conch.checks.imports import Imported

#: Modules that every worker gives its model.
_GIVEN: Final = frozenset({"triton_python_backend_utils", "c_python_backend_utils", "conch"})

#: Standard library only and Python 3.8, as it runs under the model's interpreter.  The first entry of the path is the
#: current directory, which a worker does not look into.
_PROGRAM: Final = """
import sys
del sys.path[0]
import json
from importlib.util import find_spec
def found(name):
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False
names = json.load(sys.stdin)
json.dump([name for name in names if not found(name)], sys.stdout)
"""
_SECONDS: Final = 60


def missing_modules(python: str, names: Collection[str]) -> frozenset[str]:
    """Those of the top-level ``names`` that the interpreter does not find; none where it cannot be asked."""
    wanted = sorted(set(names) - _GIVEN)
    if not wanted:
        return frozenset()
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM], input=json.dumps(wanted), capture_output=True, text=True, timeout=_SECONDS
        )
        return frozenset(json.loads(done.stdout)) if done.returncode == 0 else frozenset()
    except (OSError, subprocess.SubprocessError, ValueError):
        return frozenset()


def neighbour(imported: Imported, version_directory: Path) -> Path | None:
    """The file or folder in the model's own directories that an import names by its first part, None without one."""
    places = (version_directory,) if imported.level else (version_directory, version_directory.parent)
    return next((found for place in places if (found := _module(place, imported.top)) is not None), None)


def neighbour_source(imported: Imported, version_directory: Path) -> Path | None:
    """The neighbour's file that an import runs; None where a part of its name is missing or not a source in Python."""
    at = neighbour(imported, version_directory)
    for part in imported.name.split(".")[1:]:
        at = _module(at, part) if at is not None and at.is_dir() else None
    if at is not None and at.is_dir():
        at = at / "__init__.py"
    return at if at is not None and at.suffix == ".py" and at.is_file() else None


def interpreter_of(environment: str, model_directory: Path) -> str | None:
    """The interpreter of a model with this ``EXECUTION_ENV_PATH``; None for an archive, which is not unpacked here."""
    if not environment:
        return sys.executable
    home = Path(environment.replace("$$TRITON_MODEL_DIRECTORY", str(model_directory)))
    python = home / "bin" / "python"
    return str(python) if python.exists() else None


def _module(place: Path, name: str) -> Path | None:
    for found in (place / f"{name}.py", place / name, *place.glob(f"{name}.*.so"), place / f"{name}.so"):
        if found.exists():
            return found
    return None
