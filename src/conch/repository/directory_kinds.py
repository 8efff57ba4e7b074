"""What a directory seems to be: a model repository, a model of one, or a checkpoint that somebody took for one.

Asked before a directory is read as a repository, by the server and by ``conch check``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from conch.config.problem import Problem
from conch.errors import nearest
from conch.repository.stores.urls import FORMS

#: Files that are, or that hold, a model by themselves.
_WEIGHTS: Final = (".safetensors", ".gguf", ".onnx", ".xml")

#: How the path begins that somebody has made of a URL.
_STORES: Final = tuple(f"{scheme}:" for scheme in FORMS)

#: The files by which a version directory is told from a checkpoint's folder.
_VERSION_FILES: Final = ("model.py", "model.json")


def is_model_directory(path: Path) -> bool:
    """Whether ``path`` looks like a model of a repository: it has a configuration or a version directory."""
    try:
        return (path / "config.pbtxt").is_file() or any(one.name.isdigit() for one in path.iterdir() if one.is_dir())
    except OSError:
        return False


def is_version_directory(path: Path) -> bool:
    """Whether ``path`` looks like a version of a model: a number with the files of one, or beside a configuration."""
    path = path.resolve()
    if not path.name.isdigit():
        return False
    return any((path / name).is_file() for name in _VERSION_FILES) or (path.parent / "config.pbtxt").is_file()


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` looks like a checkpoint's folder: its configuration or its weights lie there."""
    try:
        return (path / "config.json").is_file() or any(one.suffix in _WEIGHTS for one in path.iterdir())
    except OSError:
        return False


def repository_problem(path: Path) -> Problem | None:
    """Why ``path`` cannot be a model repository, with what to give in its place; None where it can."""
    if path.parts and path.parts[0] in _STORES and not path.exists():
        return Problem(
            f"the repository in a store ({path.parts[0]}//…) cannot be used here", hint="copy it to a directory"
        )
    if not path.exists():
        return Problem(f"repository path is not a valid directory: {path} does not exist", hint=_nearest(path))
    if not path.is_dir():
        hint = f"serve it with 'conch serve {path}'" if path.suffix in _WEIGHTS else "give a model repository"
        return Problem(f"repository path is not a valid directory: {path} is a file", hint=hint)
    try:
        directories = [one for one in path.iterdir() if one.is_dir() and not one.name.startswith(".")]
    except OSError as error:
        return Problem(f"repository path {path} cannot be read: {error.strerror}", hint="give a model repository")
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
    """The directory so many levels above ``path``, as it was given where it names that directory."""
    named = len(path.parts) >= levels and ".." not in path.parts
    return (path if named else path.resolve()).parents[levels - 1]


def _holds_models(path: Path) -> bool:
    try:
        return any(is_model_directory(one) for one in path.iterdir() if one.is_dir())
    except OSError:
        return False


def _nearest(path: Path) -> str:
    try:
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except OSError:
        beside = []
    near = nearest(path.name, beside, 0.7)
    return f"did you mean '{path.parent / near}'?" if near else "give a model repository"
