"""Temporary repositories for a single model, removed when the server ends.

``conch serve MODEL`` and ``conch.Server(MODEL)`` create one before the server starts. The backend reads the
checkpoint; this module only chooses the model's name and location.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

from conch.config.reading import gguf_files, gguf_stem
from conch.core.errors import invalid, unsupported
from conch.machine.temporary import TemporaryFolder
from conch.options.declaration import Values, option, options_of
from conch.options.settings import Settings
from conch.repository.directory_kinds import is_model_directory, is_version_directory, similar_directory
from conch.repository.names import is_directory_name
from conch.repository.stores.urls import is_url, parse_url

_SECTION: Final = "For one MODEL"


@dataclass(frozen=True)
class ModelOptions:
    """The options of the single model; all but ``name`` are written to ``model.json`` if they are given."""

    # fmt: off
    name: str = option("", _SECTION, "Name to serve it under.", common=True)
    task: Annotated[str, Values("tasks")] = option(
        "", _SECTION, "The task, such as text-classification.", common=True
    )
    engine: Annotated[str, Values("engines")] = option(
        "",
        _SECTION,
        "torch, onnxruntime or openvino; to generate text llamacpp, openvino, transformers or vllm.",
        common=True,
    )
    revision: str = option("", _SECTION, "Branch, tag or commit on the Hub.", common=True)
    trust_remote_code: bool = option(False, _SECTION, "Run Python code from the checkpoint.", common=True)
    verify_on_load: bool | None = option(
        None,
        _SECTION,
        "false: serve the model even if its response to an example differs from that of transformers.",
        common=True,
        switch=False,
    )
    # fmt: on


MODEL_OPTIONS: Final = options_of(ModelOptions)


@contextmanager
def repository_of(model: str, name: str, values: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Create a repository with only ``model``, and yield it with the model's name; removed on exit.

    ``model`` is an id on the Hub, a checkpoint folder or a .gguf, .onnx or .xml file; ``values`` are written to
    ``model.json``. Raises INVALID_ARG for anything else.
    """
    with TemporaryFolder() as repository:
        path = Path(model).expanduser()
        chosen = name or model_name(_absolute(path) if path.exists() else Path(model.partition(":")[0]))
        if not is_directory_name(chosen) or ".." in chosen:
            raise invalid(f"'{chosen}' cannot be a model's name: set --name to one without slashes")
        version = repository / chosen / "1"
        version.mkdir(parents=True)
        if path.is_file() and path.suffix != ".gguf":
            _link(_absolute(path), version, values)
        else:
            source = checkpoint_source(model)
            (version / "model.json").write_text(json.dumps({"model": source, **values}) + "\n", encoding="utf-8")
        yield repository, chosen


def checkpoint_source(model: str) -> str:
    """Return the value of ``model`` in ``model.json``: an absolute path, or an id on the Hub.

    Raises INVALID_ARG for a path that does not exist.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return str(_absolute(path))
    return str(_checkpoint(path.resolve())) if path.is_dir() else _hub_id(model)


def _absolute(path: Path) -> Path:
    """Return an absolute path. The name of a file is kept, also where it is a link, as in the Hub's cache."""
    return path.parent.resolve() / path.name if path.is_file() else path.resolve()


def hub_hint(model: str) -> str:
    """Return a hint for a ``model`` missing on the Hub: a local folder does not exist, or has a similar name.

    Empty for an existing path, which is not looked up on the Hub.
    """
    path = Path(model).expanduser()
    if path.exists():
        return ""
    problem = f"there is no folder '{model}' here"
    suggestion = similar_directory(path)
    return f"{problem}; {suggestion}" if suggestion else f"{problem} either"


def model_name(path: Path) -> str:
    """Return a valid model name made from the last meaningful part of an id or a path."""
    parts = [part for part in path.parts if part != path.anchor]
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        parts = parts[-3].split("--")  # a folder of the Hub's cache
    elif len(parts) > 1 and parts[-1].isdigit():
        parts.pop()  # a version directory
    last = parts[-1] if parts else ""
    if path.suffix in (".onnx", ".xml", ".gguf"):
        last = gguf_stem(path)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", last).strip("._") or "model"


def settings_for(settings: Settings, repository: Path, name: str) -> Settings:
    """Return the settings that serve the model ``name`` of ``repository``."""
    names = settings.load_model
    if settings.model_control_mode == "explicit" and not names:
        names = (name,)
    return replace(settings, model_repository=(str(repository),), load_model=names)


def _link(path: Path, version: Path, values: Mapping[str, Any]) -> None:
    """Link a graph file and its weights into the version directory ``version``."""
    if path.suffix not in (".onnx", ".xml"):
        raise unsupported(
            f"'{path}' is not a model that can be served: use a Hub id, a checkpoint's folder, or a .gguf, .onnx or "
            ".xml file"
        )
    if values:
        option = next(iter(values)).replace("_", "-")
        raise invalid(f"--{option} is for checkpoints; '{path}' is served as a graph")
    (version / f"model{path.suffix}").symlink_to(path)
    if path.suffix == ".onnx":
        # An ONNX file names its external tensor files relative to itself, so they are linked beside it.
        for beside in path.parent.glob("*"):
            if (beside.name.startswith(path.name) and beside != path) or beside.suffix == ".data":
                (version / beside.name).symlink_to(beside)
        return
    weights = path.with_suffix(".bin")
    if not weights.is_file():
        raise invalid(f"'{path}' needs its weights in {weights}, which is missing")
    (version / "model.bin").symlink_to(weights)


def _checkpoint(folder: Path) -> Path:
    """Return the checkpoint in ``folder``.

    Raises INVALID_ARG if there is none, with the likely kind of the folder.
    """
    if any((folder / name).is_file() for name in ("config.json", "modules.json")):
        return folder
    models, projectors = gguf_files(folder)
    files = models or projectors
    if len(files) == 1:
        return folder if models and projectors else files[0]
    if files:
        raise invalid(f"'{folder}' has {len(files)} GGUF files: choose one, such as {files[0]}")
    directories = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    if (folder / "config.pbtxt").is_file() or any(path.name.isdigit() for path in directories):
        raise invalid(f"'{folder}' is a model of a repository: serve it with --model-repository={folder.parent}")
    if any(is_model_directory(path) for path in directories):
        raise invalid(f"'{folder}' is a model repository: serve it with --model-repository={folder}")
    graph = next((path for path in sorted(folder.iterdir()) if path.suffix in (".onnx", ".xml")), None)
    if graph is not None:
        raise invalid(
            f"'{folder}' has no checkpoint, because config.json is missing; to serve only the graph, pass {graph}"
        )
    if is_version_directory(folder):
        raise invalid(f"'{folder}' is a version of a model: serve it with --model-repository={folder.parent.parent}")
    raise invalid(f"'{folder}' has no checkpoint: config.json is missing")


def _hub_id(model: str) -> str:
    if is_url(model):
        raise invalid(
            f"'{parse_url(model)}' is not a model: serve the repository of models there with --model-repository"
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith((".onnx", ".xml", ".gguf", "/")):
        raise invalid(f"'{model}' does not exist")
    return model
