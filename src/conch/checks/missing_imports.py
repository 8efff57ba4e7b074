"""Checks that what Python models import can be found, in the environment that they run in.

Their own modules beside ``model.py`` are followed, and what those import is checked as well.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Final

from conch import extras
from conch.checks.finding import Finding
from conch.checks.imports import UNREADABLE, Imported, changes_path, imports_of
from conch.checks.model import CheckedModel
from conch.checks.modules import GIVEN, interpreter_of, missing_modules, neighbour, neighbour_source
from conch.config.reading import read_small
from conch.config.schema import implementation
from conch.config.signature import parameters
from conch.errors import did_you_mean

#: Packages whose name is not that of their module.
_PACKAGES: Final = {
    "bs4": "beautifulsoup4", "cv2": "opencv-python-headless", "dateutil": "python-dateutil", "dotenv": "python-dotenv",
    "faiss": "faiss-cpu", "PIL": "pillow", "skimage": "scikit-image", "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip
#: Modules that models import most, whose misspelt names are told from missing ones.
_COMMON: Final = (
    "accelerate", "cv2", "datasets", "faiss", "librosa", "numpy", "onnxruntime", "openvino", "pandas", "peft",
    "requests", "safetensors", "scipy", "sentence_transformers", "sentencepiece", "sklearn", "soundfile", "tensorflow",
    "tokenizers", "torch", "torchaudio", "torchvision", "transformers", "triton_python_backend_utils",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Use:
    """An import in a source of a model; ``unsure`` where the source changes ``sys.path``."""

    source: Path
    imported: Imported
    version_directory: Path
    unsure: bool


def check_imports(models: Iterable[CheckedModel]) -> Iterator[Finding]:
    """Imports that nothing guards and that the model's interpreter does not find."""
    uses: defaultdict[str, list[_Use]] = defaultdict(list)
    for model in models:
        if implementation(model.config) != "python":
            continue
        environment = parameters(model.config).get("EXECUTION_ENV_PATH") or model.files.backend_environment()
        python = interpreter_of(environment, model.files.directory)
        if python is not None:
            for path in model.sources():
                uses[python] += _uses(path)
    for python, found in uses.items():
        outside = {use.imported.top for use in found if not use.imported.level}
        missing = missing_modules(python, outside)
        yield from (finding for use in found if (finding := _finding(use, missing, python)) is not None)


def packages_of(model: CheckedModel) -> set[str]:
    """The modules of other packages that a Python model is sure to import, by their top-level names.

    Empty for a model with an environment of its own.
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
    """What pip calls the packages with top-level modules that are installed here.

    Several where packages share a namespace; a module's own name where no package is known to have it.
    """
    named = {_PACKAGES[module] for module in modules if module in _PACKAGES}
    others = [module for module in modules if module not in _PACKAGES]
    if not others:
        return named
    installed = packages_distributions()  # reads the files of every package
    return named.union(*(installed.get(module, [module]) for module in others))


def _uses(path: Path) -> Iterator[_Use]:
    """The imports of a ``model.py``, and of the neighbours that these lead to."""
    waiting, seen = [path], {path}
    while waiting:
        source = waiting.pop()
        try:
            tree = ast.parse(read_small(source), str(source))
        except UNREADABLE:
            continue  # said of model.py elsewhere
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
        return None  # within a package of the model's own
    if neighbour(imported, use.version_directory) is not None:
        return None
    if not imported.level and imported.top not in missing:
        return None
    sure = imported.certain and not use.unsure
    problem = f"there is no module '{'.' * imported.level}{imported.top}'"
    if use.unsure:
        problem += ", unless what is added to sys.path has it"
    elif not imported.certain:
        problem += ", which a function imports when it is called"
    return Finding(use.source, imported.line, "error" if sure else "warning", problem, _fix(use, python))


def _fix(use: _Use, python: str) -> str:
    name, place = use.imported.top, use.version_directory
    beside = [path.stem for path in (*place.glob("*.py"), *place.parent.glob("*.py")) if path != use.source]
    known = {*beside} if use.imported.level else {*beside, *_COMMON, *sys.stdlib_module_names} - {name}
    if hint := did_you_mean(name, known, likeness=0.8):
        return hint
    file = place / f"{name}.py"
    if use.imported.level:
        return f"put it at {file}"
    if name in extras.PACKAGES and python == sys.executable:
        return extras.command_for(name)
    if name in _PACKAGES:
        return f"{python} -m pip install {_PACKAGES[name]}"
    return f"install the package that has it for {python}, or put it at {file}"
