"""The part of ``conch check`` that reads a model's parameters: those of its configuration, and its ``model.json``.

Names are compared with the tables that backends declare, as workers do when they load a model; values are left to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from conch.backends.table import BACKENDS
from conch.checks.finding import Finding, line_of, with_fix
from conch.config.parameters import ParameterTable
from conch.config.reading import read_small
from conch.config.remote import is_remote, value_problems
from conch.config.schema import ModelConfig, implementation
from conch.config.signature import parameters
from conch.repository.model_files import ModelFiles

#: The parameters of a Python model that Triton reads; all others are the model's own.
_PYTHON: Final = ParameterTable("python", accepted=frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"}))
_MODEL_FILE: Final = "model.json"
_PLACEHOLDER: Final = re.compile(r"\s*(\$\{[^{}]*\}\s*)?")


def check_parameters(config: ModelConfig, files: ModelFiles, versions: Iterable[int]) -> Iterator[Finding]:
    """Faults in the parameters' names, and in the ``model.json`` of each of ``versions``, those that are served."""
    runs_on = implementation(config)
    backend = BACKENDS.get(runs_on)
    if backend is None:
        return
    given = parameters(config)
    if runs_on == "python":
        # A guess, as the model may well have a parameter of that name.
        for name in _PYTHON.unknown(given):
            problem = _PYTHON.problem(name)
            if problem is not None:
                yield _in_config(files, name, "warning", problem.message)
        return
    table = _table(backend.parameters)
    for name in table.unknown(given):
        if config.backend == "tensorrtllm" and _PLACEHOLDER.fullmatch(given[name]):
            continue  # not set
        problem = table.problem(name)
        if problem is not None:
            yield _in_config(files, name, "error", problem.message)
        elif name in files.config.parameters:
            yield _in_config(
                files,
                name,
                "warning",
                f"parameter '{name}' has no effect: backend '{config.backend}' has none of that name",
            )
    if is_remote(config):
        for problem in value_problems(config):
            yield _in_config(files, str(problem.field[1]), "error", problem.message, "")
    if config.backend in ("huggingface", "vllm"):
        arguments = table if table.strict else _table("conch.backends.contracts.vllm:ENGINE_ARGUMENTS")
        for version in versions:
            path = files.version_directory(version) / _MODEL_FILE
            if path.exists():
                yield from _check_model_file(path, arguments)


def _table(place: str) -> ParameterTable:
    """The table that a backend declares as ``module:name``."""
    module, _, name = place.partition(":")
    table: ParameterTable = getattr(import_module(module), name)
    return table


def _check_model_file(path: Path, table: ParameterTable) -> Iterator[Finding]:
    try:
        text = read_small(path).decode("utf-8")
        document: Any = json.loads(text)
    except json.JSONDecodeError as error:
        fault = f"not valid JSON: {error.msg} at column {error.colno}"
        yield Finding(path, error.lineno, "error", fault, _json_fix(error, path))
        return
    except OSError as error:
        yield Finding(path, 0, "error", f"cannot be read: {error.strerror}")
        return
    except (ValueError, RecursionError) as error:
        yield Finding(path, 0, "error", f"cannot be read: {error}", "write it as UTF-8")
        return
    if not isinstance(document, dict):
        yield Finding(path, 1, "error", "must hold a JSON object", '{"model": "org/name"}')
        return
    for name in table.unknown(document):
        problem = table.problem(name)
        if problem is not None:
            yield with_fix(path, line_of(text, name), "error", problem.message)


def _json_fix(error: json.JSONDecodeError, path: Path) -> str:
    if error.msg.startswith("Expecting ','"):
        return "put a ',' before it"
    if "property name" in error.msg or "trailing comma" in error.msg:
        return "names stand in double quotation marks, and there is no ',' after the last value"
    return f"python -m json.tool {path} shows the place"


def _in_config(files: ModelFiles, name: str, severity: str, problem: str, fix: str = "leave it out") -> Finding:
    if files.config_path is None:
        return with_fix(files.directory, 0, severity, problem, fix)
    return with_fix(files.config_path, line_of(files.config_text, name), severity, problem, fix)
