"""Writes the repository of a local server: the user's models under other configurations.

The copy is a separate directory; the user's repository is only read. All files except configurations are links, so that
they need no space and paths within a model stay valid.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from conch.config.editing import edit
from conch.core.errors import ConchError, invalid
from conch.measure.analyze.servers.base import Overrides
from conch.repository.model_files import CONFIG_FILE, config_path, read_config
from conch.repository.scan import ModelRepository


def config_text(repository: ModelRepository, model: str) -> tuple[str, Path]:
    """Return the configuration of a model in its repository (empty if it has none), and the path of its file.

    Raises INVALID_ARG for an unknown model, and INTERNAL for a file that is not text.
    """
    try:
        directory = repository.directory(model)
    except ConchError as error:
        raise invalid(repository.no_such_model(model)) from error
    file = config_path(directory, repository.config_name)
    return (read_config(file) if file else ""), file or directory / CONFIG_FILE


def write_repository(folder: Path, source: ModelRepository, overrides: Overrides) -> None:
    """Write the models of ``source`` into ``folder`` with overrides, replacing models that are there.

    Unchanged models are included, because others may call them. Raises INVALID_ARG for an invalid override.
    """
    texts = {}
    for model, changes in overrides.items():
        text, file = config_text(source, model)
        texts[model] = edit(text, changes, str(file))
    folder.mkdir(parents=True, exist_ok=True)
    for model in source.names():
        copy = folder / model
        _remove(copy)
        if model not in texts:
            copy.symlink_to(source.directory(model))
            continue
        copy.mkdir()
        for path in source.directory(model).iterdir():
            if path.name not in (CONFIG_FILE, "configs"):
                (copy / path.name).symlink_to(path)
        if texts[model]:
            (copy / CONFIG_FILE).write_text(texts[model], encoding="utf-8")


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)  # rmtree does not follow links
