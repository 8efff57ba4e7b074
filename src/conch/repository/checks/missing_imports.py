"""Checks that the imports of Python models can be found in the models' environments.

Imports of a model's own modules beside ``model.py`` are followed and checked too.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Final

from conch.config.reading import read_small
from conch.config.schema import implementation
from conch.config.signature import parameters
from conch.core.errors import did_you_mean
from conch.machine import extras
from conch.repository.checks.finding import CheckedModel, Finding
from conch.repository.checks.python_model import UNREADABLE, Imported, changes_path, imports_of

# Only the interpreter that runs conch is started, and only to query its import finders: an environment may have come
# with the model, so its interpreter could run arbitrary code.


#: Modules that every worker provides to its model.
GIVEN: Final = frozenset({"triton_python_backend_utils", "c_python_backend_utils", "conch"})

#: The first entry of the path is the current directory, which workers do not search.
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
#: Files in ``site-packages`` that do not extend the path.
_HARMLESS: Final = frozenset({"distutils-precedence.pth", "_virtualenv.pth"})


def missing_modules(python: str, names: Collection[str]) -> frozenset[str]:
    """Return the top-level ``names`` that the interpreter does not find; empty if that cannot be determined."""
    imported = sorted(set(names) - GIVEN)
    if not imported:
        return frozenset()
    if python != sys.executable:
        return _missing_in(Path(python).parent.parent, imported)
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM], input=json.dumps(imported), capture_output=True, text=True, timeout=_SECONDS
        )
        return frozenset(json.loads(done.stdout)) if done.returncode == 0 else frozenset()
    except (OSError, subprocess.SubprocessError, ValueError):
        return frozenset()


def _missing_in(environment: Path, names: Iterable[str]) -> frozenset[str]:
    """Return the ``names`` that an environment's folders lack; empty if it also uses other folders."""
    directories: list[Path] = []
    for site in environment.glob("lib/python3*/site-packages"):
        if any(path.name not in _HARMLESS for path in site.glob("*.pth")):
            return frozenset()
        library = site.parent
        directories += (site, library, library / "lib-dynload")
        settings = _settings(environment / "pyvenv.cfg")
        if settings.get("include-system-site-packages", "").lower() == "true":
            return frozenset()
        if "home" in settings:  # a virtual environment uses the standard library of its base installation
            base = Path(settings["home"]).parent / "lib" / library.name
            directories += (base, base / "lib-dynload")
    if not directories:
        return frozenset()
    return frozenset(
        name
        for name in names
        if name not in sys.stdlib_module_names and all(_module(directory, name) is None for directory in directories)
    )


def _settings(path: Path) -> dict[str, str]:
    """Return the settings in a ``pyvenv.cfg``, empty without the file."""
    try:
        lines = read_small(path).decode("utf-8", "replace").splitlines()
    except OSError:
        return {}
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition("=") for line in lines)}


def neighbour(imported: Imported, version_directory: Path) -> Path | None:
    """Return the file or folder in the model's own directories for the first part of an import, or None."""
    directories = (version_directory,) if imported.level else (version_directory, version_directory.parent)
    return next((path for directory in directories if (path := _module(directory, imported.top)) is not None), None)


def neighbour_source(imported: Imported, version_directory: Path) -> Path | None:
    """Return the source file in the model's directories that an import runs.

    None if a part of its name is missing or is not Python source.
    """
    at = neighbour(imported, version_directory)
    for part in imported.name.split(".")[1:]:
        at = _module(at, part) if at is not None and at.is_dir() else None
    if at is not None and at.is_dir():
        at = at / "__init__.py"
    return at if at is not None and at.suffix == ".py" and at.is_file() else None


def interpreter_of(environment: str, model_directory: Path) -> str | None:
    """Return the interpreter for an ``EXECUTION_ENV_PATH``; None for an archive, which is not unpacked here."""
    if not environment:
        return sys.executable
    home = Path(environment.replace("$$TRITON_MODEL_DIRECTORY", str(model_directory)))
    python = home / "bin" / "python"
    return str(python) if python.exists() else None


def _module(directory: Path, name: str) -> Path | None:
    for path in (directory / f"{name}.py", directory / name, *directory.glob(f"{name}.*.so"), directory / f"{name}.so"):
        if path.exists():
            return path
    return None


#: Package names that differ from their module's.
_PACKAGES: Final = {
    "bs4": "beautifulsoup4", "cv2": "opencv-python-headless", "dateutil": "python-dateutil", "dotenv": "python-dotenv",
    "faiss": "faiss-cpu", "PIL": "pillow", "skimage": "scikit-image", "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip
#: Frequently imported modules, used to recognize misspelt names.
_COMMON: Final = (
    "accelerate", "cv2", "datasets", "faiss", "librosa", "numpy", "onnxruntime", "openvino", "pandas", "peft",
    "requests", "safetensors", "scipy", "sentence_transformers", "sentencepiece", "sklearn", "soundfile", "tensorflow",
    "tokenizers", "torch", "torchaudio", "torchvision", "transformers", "triton_python_backend_utils",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Use:
    """An import in a source of a model; ``unsure`` if the source changes ``sys.path``."""

    source: Path
    imported: Imported
    version_directory: Path
    unsure: bool


def check_imports(models: Iterable[CheckedModel]) -> Iterator[Finding]:
    """Yield unguarded imports that the model's interpreter does not find."""
    uses: defaultdict[str, list[_Use]] = defaultdict(list)
    for model in models:
        if implementation(model.config) != "python":
            continue
        environment = parameters(model.config).get("EXECUTION_ENV_PATH") or model.files.backend_environment()
        python = interpreter_of(environment, model.files.directory)
        if python is not None:
            for path in model.sources():
                uses[python] += _uses(path)
    for python, used in uses.items():
        outside = {use.imported.top for use in used if not use.imported.level}
        missing = missing_modules(python, outside)
        yield from (finding for use in used if (finding := _finding(use, missing, python)) is not None)


def packages_of(model: CheckedModel) -> set[str]:
    """Return the top-level modules of other packages that a Python model always imports.

    Empty for a model with its own environment.
    """
    if parameters(model.config).get("EXECUTION_ENV_PATH") or model.files.backend_environment():
        return set()
    uses = [use for path in model.sources() for use in _uses(path)]
    return {
        use.imported.top
        for use in uses
        if use.imported.certain
        and not use.imported.level
        and use.imported.top not in sys.stdlib_module_names
        and use.imported.top not in GIVEN
        and neighbour(use.imported, use.version_directory) is None
    }


def packages_with(modules: Collection[str]) -> set[str]:
    """Return the package names, as used by pip, of installed top-level modules.

    A namespace may belong to several packages; a module without a known package keeps its own name.
    """
    named = {_PACKAGES[module] for module in modules if module in _PACKAGES}
    others = [module for module in modules if module not in _PACKAGES]
    if not others:
        return named
    installed = packages_distributions()  # slow: reads the files of every package
    return named.union(*(installed.get(module, [module]) for module in others))


def _uses(path: Path) -> Iterator[_Use]:
    """Yield the imports of a ``model.py``, and of the model's own modules that it imports."""
    waiting, seen = [path], {path}
    while waiting:
        source = waiting.pop()
        try:
            tree = ast.parse(read_small(source), str(source))
        except UNREADABLE:
            continue  # another check reports model.py
        unsure = changes_path(tree)
        for imported in imports_of(tree):
            yield _Use(source, imported, path.parent, unsure)
            beside = neighbour_source(imported, path.parent)
            if beside is not None and imported.certain and beside not in seen:
                seen.add(beside)
                waiting.append(beside)


def _finding(use: _Use, missing: frozenset[str], python: str) -> Finding | None:
    imported = use.imported
    if imported.level > 1 or (imported.level and use.source.parent != use.version_directory):
        return None  # inside one of the model's own packages
    if neighbour(imported, use.version_directory) is not None:
        return None
    if not imported.level and imported.top not in missing:
        return None
    sure = imported.certain and not use.unsure
    problem = f"there is no module '{'.' * imported.level}{imported.top}'"
    if use.unsure:
        problem += ", unless a directory added to sys.path contains it"
    elif not imported.certain:
        problem += ", which a function imports when it is called"
    return Finding(use.source, imported.line, "error" if sure else "warning", problem, _fix(use, python))


def _fix(use: _Use, python: str) -> str:
    name, directory = use.imported.top, use.version_directory
    beside = [path.stem for path in (*directory.glob("*.py"), *directory.parent.glob("*.py")) if path != use.source]
    known = {*beside} if use.imported.level else {*beside, *_COMMON, *sys.stdlib_module_names} - {name}
    if hint := did_you_mean(name, known, likeness=0.8):
        return hint
    file = directory / f"{name}.py"
    if use.imported.level:
        return f"put it at {file}"
    if name in extras.PACKAGES and python == sys.executable:
        return extras.command_for(name)
    if name in _PACKAGES:
        return f"{python} -m pip install {_PACKAGES[name]}"
    return f"install the package that provides it for {python}, or put it at {file}"
