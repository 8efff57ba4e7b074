"""The repository that a server of one's own serves: the user's models under other configurations.

What is written lies in a folder of its own; a user's repository is only read.  Everything but the configuration is
linked, so that it costs no space and paths within a model stay as they are.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from conch.analyze.servers.base import Overrides
from conch.config.editing import edit
from conch.errors import ConchError, invalid
from conch.repository.model_files import CONFIG_FILE, config_path, read_config
from conch.repository.scan import ModelRepository


def config_text(repository: ModelRepository, model: str) -> tuple[str, Path]:
    """The configuration that a model has in its repository, empty without one, and the path of its file.

    Raises INVALID_ARG for a model that is not there, INTERNAL for a file that is no text.
    """
    try:
        directory = repository.directory(model)
    except ConchError as error:
        raise invalid(repository.no_such_model(model)) from error
    file = config_path(directory, repository.config_name)
    return (read_config(file) if file else ""), file or directory / CONFIG_FILE


def write_repository(folder: Path, source: ModelRepository, overrides: Overrides) -> None:
    """Write the models of ``source`` into ``folder``, over what was there, with changes to the configurations.

    A model that does not change is there as well: another one may call it.  Raises INVALID_ARG for a change that is
    none to a configuration.
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
        shutil.rmtree(path)  # which follows no links
