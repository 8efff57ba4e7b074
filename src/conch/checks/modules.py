"""Which modules a model finds: its own files and those of an environment by looking, all others by asking Python.

Only the interpreter that runs conch is asked, and for the finders' answer only: an environment may have come with the
model, and to start its interpreter would run what it likes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from conch.checks.imports import Imported
from conch.config.reading import read_small

#: Modules that every worker gives its model.
GIVEN: Final = frozenset({"triton_python_backend_utils", "c_python_backend_utils", "conch"})

#: The first entry of the path is the current directory, which a worker does not look into.
_PROGRAM: Final = """
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
import json
from importlib.util import find_spec
def found(name):
    try:
        return name in sys.modules or find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False
names = json.load(sys.stdin)
json.dump([name for name in names if not found(name)], sys.stdout)
"""
_SECONDS: Final = 60
#: Files of ``site-packages`` that add no folder to the path.
_HARMLESS: Final = frozenset({"distutils-precedence.pth", "_virtualenv.pth"})


def missing_modules(python: str, names: Collection[str]) -> frozenset[str]:
    """Those of the top-level ``names`` that the interpreter does not find; none where that cannot be told."""
    wanted = sorted(set(names) - GIVEN)
    if not wanted:
        return frozenset()
    if python != sys.executable:
        return _missing_in(Path(python).parent.parent, wanted)
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM], input=json.dumps(wanted), capture_output=True, text=True, timeout=_SECONDS
        )
        return frozenset(json.loads(done.stdout)) if done.returncode == 0 else frozenset()
    except (OSError, subprocess.SubprocessError, ValueError):
        return frozenset()


def _missing_in(environment: Path, names: Iterable[str]) -> frozenset[str]:
    """Those of ``names`` that the environment's folders do not have; none where other folders may have them."""
    places: list[Path] = []
    for site in environment.glob("lib/python3*/site-packages"):
        if any(one.name not in _HARMLESS for one in site.glob("*.pth")):
            return frozenset()
        library = site.parent
        places += (site, library, library / "lib-dynload")
        settings = _settings(environment / "pyvenv.cfg")
        if settings.get("include-system-site-packages", "").lower() == "true":
            return frozenset()
        if "home" in settings:  # of a virtual environment, whose standard library is that of another folder
            base = Path(settings["home"]).parent / "lib" / library.name
            places += (base, base / "lib-dynload")
    if not places:
        return frozenset()
    return frozenset(
        name
        for name in names
        if name not in sys.stdlib_module_names and all(_module(place, name) is None for place in places)
    )


def _settings(path: Path) -> dict[str, str]:
    """The settings of a ``pyvenv.cfg``, empty without one."""
    try:
        lines = read_small(path).decode("utf-8", "replace").splitlines()
    except OSError:
        return {}
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition("=") for line in lines)}


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
