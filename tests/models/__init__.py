"""The toy repository: models written for the tests, each a folder below ``main`` or ``e2e``."""

from __future__ import annotations

import shutil
from pathlib import Path

HERE = Path(__file__).parent


def build(target: Path, *names: str, group: str = "main") -> Path:
    """Copy models (all of a group unless named) into ``target``, a model repository.

    Version directories that only link to another model's become copies, and ensembles get the
    empty version directory that version control does not keep.
    """
    target.mkdir(parents=True, exist_ok=True)
    for source in sorted(HERE.glob(f"{group}/*")):
        if names and source.name not in names:
            continue
        model = target / source.name
        shutil.copytree(source, model, ignore=shutil.ignore_patterns("__pycache__"))
        if not any(child.is_dir() for child in model.iterdir()):
            (model / "1").mkdir()
    return target


def write(repository: Path, name: str, config: str | None, files: dict[str, str] | None = None) -> Path:
    """Write one model: its ``config.pbtxt`` (none when ``None``) and ``files`` by path within the model."""
    model = repository / name
    model.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (model / "config.pbtxt").write_text(config)
    for path, text in (files or {}).items():
        (model / path).parent.mkdir(parents=True, exist_ok=True)
        (model / path).write_text(text)
    return model
