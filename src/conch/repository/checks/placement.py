"""Checks that files are where a repository requires them, and have the required names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from conch.config.reading import read_json
from conch.config.remote import is_remote
from conch.core.errors import nearest
from conch.repository.checks.finding import Finding
from conch.repository.directory_kinds import is_checkpoint, is_model_directory, repository_problem
from conch.repository.model_files import CONFIG_FILE, ModelFiles
from conch.repository.scan import ModelRepository

#: Files that identify the model in a version directory.
_MODEL_FILES: Final = ("model.py", "model.json", "config.json", "conch.json", "model.onnx", "model.xml")
#: A Triton configuration has at least one of these fields.
_CONFIGURATION_FIELDS: Final = frozenset({"backend", "platform", "input", "output"})
#: Keys that identify a checkpoint's config.json.
_CHECKPOINT_KEYS: Final = frozenset({"architectures", "model_type"})


def check_directory(directory: Path) -> Finding | None:
    """Return why ``directory`` is not a model repository; None if it may be one."""
    problem = repository_problem(directory)
    return Finding(directory, 0, "error", problem.message, problem.hint) if problem is not None else None


def check_contents(repository: ModelRepository) -> Iterator[Finding]:
    """Yield directories that cannot be models, and warn of a repository without models."""
    for path in repository.unnameable():
        yield Finding(path, 0, "error", "the name of a model must be UTF-8", "rename it")
    if not repository.names():
        for place in repository.paths:
            fix = f"make a directory for each model, such as {place}/NAME/1/model.json"
            yield Finding(Path(str(place)), 0, "warning", "there are no models in this repository", fix, str(place))


def check_placement(files: ModelFiles) -> Iterator[Finding]:
    """Yield files of a model that the server ignores because of their name or location."""
    directory = files.directory
    names = [path.name for path in directory.iterdir() if path.is_file()]
    if CONFIG_FILE not in names:
        yield from _misspelt_configuration(directory, names)
        if "config.json" in names and files.config_path is None and _is_configuration(directory / "config.json"):
            problem = f"the server reads {CONFIG_FILE} only, and this is a configuration in JSON"
            fix = f"write it as text proto to {CONFIG_FILE}"
            yield Finding(directory / "config.json", 0, "error", problem, fix)
            names.remove("config.json")
    if not files.versions:
        yield from _outside_versions(directory, names)
    for version in [] if is_remote(files.config) else files.versions:
        yield from _misspelt_model(files.version_directory(version), files.config.default_model_filename)


def _misspelt_configuration(directory: Path, names: list[str]) -> Iterator[Finding]:
    if near := nearest(CONFIG_FILE, [name for name in names if not name.endswith((".json", ".md", "~"))], 0.75):
        yield Finding(directory / near, 0, "error", f"the server reads {CONFIG_FILE} only", f"rename it {CONFIG_FILE}")


def _is_configuration(path: Path) -> bool:
    """Return whether a ``config.json`` is a model configuration, not a checkpoint's."""
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return False
    keys = set(document) if isinstance(document, dict) else set()
    return bool(keys & _CONFIGURATION_FIELDS) and not keys & _CHECKPOINT_KEYS


def _outside_versions(directory: Path, names: list[str]) -> Iterator[Finding]:
    misplaced = next((name for name in _MODEL_FILES if name in names), "")
    if not misplaced and is_checkpoint(directory):
        misplaced = next(
            name for name in sorted(names) if Path(name).suffix in (".safetensors", ".gguf", ".onnx", ".xml")
        )
    if misplaced:
        yield Finding(
            directory / misplaced,
            0,
            "error",
            "a model's files must be in a version directory",
            f"move them to {directory / '1'}",
        )
        return
    inner = next((path for path in sorted(directory.iterdir()) if path.is_dir() and is_model_directory(path)), None)
    if inner is not None:
        problem = f"this is a repository of models such as '{inner.name}', in the place of a model"
        yield Finding(directory, 0, "error", problem, f"give {directory}")


def _misspelt_model(version: Path, named: str) -> Iterator[Finding]:
    names = [path.name for path in version.iterdir() if path.is_file()]
    if any(name == named or name in _MODEL_FILES or name.endswith((".gguf", ".plan", ".pt", ".pt2")) for name in names):
        return
    for name in sorted(names):
        near = nearest(name, _MODEL_FILES, 0.8)
        if near and not name.endswith(".pyc"):
            yield Finding(version / name, 0, "error", f"the server reads {near} only", f"rename it {near}")
