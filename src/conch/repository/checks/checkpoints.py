"""Checks that the checkpoints of models exist, are complete, and fit their configured tasks.

A checkpoint is opened as in a worker, but without the libraries that run models. Checkpoints on the Hub are checked
only when the server starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import MODEL_FILE, is_hub_id, local_path
from conch.checkpoints.options import Options
from conch.checkpoints.task import canonical, misfit, suggested_task
from conch.config.reading import read_small
from conch.config.signature import parameters
from conch.core.errors import ConchError
from conch.machine import extras
from conch.repository.checks.finding import CheckedModel, Finding, line_of, with_fix

#: The modules that each engine needs.
_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("torch", "transformers"), ("torch", "transformers")),
    "llamacpp": ("llama_cpp",),
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino",),
    "pytorch": ("torch",),
    "vllm": ("vllm",),
}


def engine_problem(engine: str, *, gguf: bool = False) -> tuple[str, str]:
    """Return why the engine cannot run on this machine, and the command that installs it; both empty if it can.

    ``gguf``: it is to serve a GGUF file.
    """
    modules = _MODULES.get(engine, ())
    if engine == "openvino" and gguf:
        modules = (*modules, "openvino_genai")
    absent = [module for module in modules if not is_installed(module)]
    if not absent:
        return "", ""
    return f"engine '{engine}' is not installed; the model cannot load on this machine", extras.command_for(*absent)


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be found."""
    return find_spec(module) is not None


#: Matches the option in an error message.
_OPTION: Final = re.compile(r"(?:parameter '|(?=task '|engine '|variant '))(\w+)")


def check_checkpoints(model: CheckedModel) -> Iterator[Finding]:
    """Yield why checkpoints cannot be served, for backends that serve checkpoints."""
    if model.config.backend not in ("huggingface", "vllm"):
        if model.config.backend in ("onnxruntime", "openvino", "pytorch"):
            problem, command = engine_problem(model.config.backend)
            if problem:
                yield model.warning(problem, ("backend",), command)
        return
    for version in model.versions:
        options_file = _OptionsFile(model, model.files.version_directory(version))
        document = options_file.document()
        if document is None:
            continue  # reported by the check of parameter names
        try:
            if model.config.backend == "vllm":
                yield from _check_named(options_file, document)
            else:
                yield from _check_checkpoint(options_file, document)
        except ConchError as error:
            yield options_file.finding(error.message)


@dataclass(frozen=True)
class _OptionsFile:
    """The source of a version's options: its ``model.json``, or the configuration's parameters."""

    model: CheckedModel
    directory: Path

    def document(self) -> dict[str, Any] | None:
        """Return the content of ``model.json``, empty without the file; None if it is not a JSON object."""
        try:
            document = json.loads(read_small(self.directory / MODEL_FILE))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError):
            return None
        return document if isinstance(document, dict) else None

    def finding(self, problem: str, fix: str = "") -> Finding:
        """Return a finding at the problem's option; else at the checkpoint's name, or at its folder."""
        about = _OPTION.search(problem)
        for name in (about[1] if about else "model", "model"):
            path, text = self._file_with(name)
            if text:
                return with_fix(path, line_of(text, name), "error", problem, fix or "choose another checkpoint")
        beside = "copy the whole checkpoint there, or " if any(self.directory.iterdir()) else ""
        return with_fix(self.directory, 0, "error", problem, fix or f"{beside}name it in {self.directory / MODEL_FILE}")

    def _file_with(self, option: str) -> tuple[Path, str]:
        """Return the file that sets the option, and its text; the text is empty if no file sets it."""
        files, path = self.model.files, self.directory / MODEL_FILE
        if files.config_path is not None and option in files.config.parameters:
            return files.config_path, files.config_text
        return path, read_small(path).decode("utf-8", "replace") if option in (self.document() or {}) else ""


def _check_named(options_file: _OptionsFile, document: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a ``model.json`` of the backend ``vllm``, which contains engine arguments and must name the model."""
    model = document.get("model")
    if isinstance(model, str):
        yield from _check_path(options_file, model)
    else:
        path = options_file.directory / MODEL_FILE
        line = 1 if path.is_file() else 0
        yield Finding(path, line, "error", "it must name the model", '{"model": "org/name"}, or a folder')


def _check_checkpoint(options_file: _OptionsFile, document: Mapping[str, Any]) -> Iterator[Finding]:
    overrides = Options.from_values(parameters(options_file.model.config))
    options = overrides.over(document)
    if suggestion := suggested_task(options.task):
        yield options_file.finding(f"task '{options.task}' is not known", suggestion)
        return
    if options.model:
        unreachable = list(_check_path(options_file, options.model))
        yield from unreachable
        if unreachable or local_path(options_file.directory, options.model) is None:
            return
    checkpoint = Checkpoint.open(options_file.directory, overrides, model_file=document)
    if checkpoint.warning:
        yield replace(options_file.finding(checkpoint.warning), severity="warning")
    architectures = misfit(canonical(options.task), checkpoint.config)
    if architectures:
        named = ", ".join(checkpoint.config.get("architectures") or ())
        yield options_file.finding(
            f"task '{options.task}' does not fit the checkpoint, which is a {named}",
            f"remove 'task', or choose a checkpoint whose architecture is {' or '.join(architectures)}",
        )
    problem, command = engine_problem(checkpoint.engine, gguf=checkpoint.gguf is not None)
    if problem:
        yield replace(options_file.finding(problem, command), severity="warning")


def _check_path(options_file: _OptionsFile, model: str) -> Iterator[Finding]:
    """Yield a finding for a model that is neither a path in the version's or model's directory nor a Hub id."""
    from_there = f"relative paths start at {options_file.directory} or {options_file.directory.parent}"
    try:
        if local_path(options_file.directory, model) is not None:
            return
    except ConchError as error:
        yield options_file.finding(error.message, from_there)
        return
    if not is_hub_id(model):
        yield options_file.finding(
            f"'{model}' is neither a folder, a .gguf file nor an id on the Hugging Face Hub (org/name)", from_there
        )
    elif Path(model).is_dir():
        problem = f"'{model}' is a folder in the current directory, but the server would look for it on the Hub"
        yield options_file.finding(problem, f'"model": "{Path(model).resolve()}"')
