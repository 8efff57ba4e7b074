"""Recognises the kind of a directory: a model repository, a single model, a version or a checkpoint.

The server and ``conch check`` use it to reject a wrong directory before they read it as a repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from conch.config.reading import Problem
from conch.core.errors import did_you_mean
from conch.repository.stores.urls import FORMS

#: Suffixes of files that are a model, or the weights of one.
WEIGHTS: Final = (".safetensors", ".gguf", ".onnx", ".xml")

#: The advice if there is no better one.
_GIVE: Final = "use a model repository"

#: First part of a path that was made from a store's URL.
_STORES: Final = tuple(f"{scheme}:" for scheme in FORMS)

#: Files that distinguish a version directory from a checkpoint folder.
_VERSION_FILES: Final = ("model.py", "model.json")


def is_model_directory(path: Path) -> bool:
    """Return whether ``path`` looks like a model of a repository: it has a configuration or a version directory."""
    try:
        return (path / "config.pbtxt").is_file() or any(
            entry.name.isdigit() for entry in path.iterdir() if entry.is_dir()
        )
    except OSError:
        return False


def is_version_directory(path: Path) -> bool:
    """Return whether ``path`` looks like a version of a model.

    Its name must be a number; it must have a version's files, or its parent a configuration.
    """
    path = path.resolve()
    if not path.name.isdigit():
        return False
    return any((path / name).is_file() for name in _VERSION_FILES) or (path.parent / "config.pbtxt").is_file()


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` looks like a checkpoint folder: it contains a configuration or weights."""
    try:
        return (path / "config.json").is_file() or any(entry.suffix in WEIGHTS for entry in path.iterdir())
    except OSError:
        return False


def repository_problem(path: Path) -> Problem | None:
    """Return an error, with a hint that suggests the right argument, if ``path`` cannot be a model repository."""
    if path.parts and path.parts[0] in _STORES and not path.exists():
        return Problem(
            f"the repository in a store ({path.parts[0]}//…) cannot be used here", hint="copy it to a directory"
        )
    if not path.exists():
        return Problem(
            f"repository path is not a valid directory: {path} does not exist", hint=similar_directory(path) or _GIVE
        )
    if not path.is_dir():
        hint = f"serve it with 'conch serve {path}'" if path.suffix in WEIGHTS else _GIVE
        return Problem(f"repository path is not a valid directory: {path} is a file", hint=hint)
    try:
        directories = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        return Problem(f"repository path {path} cannot be read: {error.strerror}", hint=_GIVE)
    if any(is_model_directory(directory) for directory in directories):
        return None
    if is_model_directory(path):
        return Problem(f"{path} is a model, not a repository of models", hint=f"give {_above(path, 1)}")
    if is_version_directory(path):
        return Problem(f"{path} is a version of a model, not a repository of models", hint=f"give {_above(path, 2)}")
    if is_checkpoint(path):
        return Problem(
            f"{path} is a checkpoint, not a repository of models", hint=f"serve it with 'conch serve {path}'"
        )
    inner = next((directory for directory in sorted(directories) if _holds_models(directory)), None)
    if inner is not None:
        return Problem(f"{path} is not a repository of models, but {inner.name} in it is", hint=f"give {inner}")
    return None


def _above(path: Path, levels: int) -> Path:
    """Return the directory ``levels`` above ``path``, relative if ``path`` has enough parts."""
    named = len(path.parts) >= levels and ".." not in path.parts
    return (path if named else path.resolve()).parents[levels - 1]


def _holds_models(path: Path) -> bool:
    try:
        return any(is_model_directory(entry) for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return False


def similar_directory(path: Path) -> str:
    """Return a suggestion of the directory beside ``path`` that has the most similar name; empty if none."""
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    return did_you_mean(path.name, beside, likeness=0.7, shown=lambda name: str(path.parent / name))
