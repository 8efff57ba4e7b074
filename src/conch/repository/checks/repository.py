"""Runs all checks of a model repository, in order, beginning with the locations and names of its files."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tarfile import is_tarfile
from typing import Any, Final

from conch.backends.table import BACKENDS
from conch.config.parameters import ParameterTable
from conch.config.reading import ConfigError, Problem, read_json, read_small
from conch.config.remote import is_remote, value_problems
from conch.config.schema import ModelConfig, implementation, is_ensemble
from conch.config.signature import parameters
from conch.config.validate_ensemble import cycle_problem, step_model_problems, version_problem
from conch.core.errors import ConchError, did_you_mean, nearest
from conch.repository.backends import DEFAULT_BACKEND_DIRECTORIES, BackendDirectories
from conch.repository.checks.checkpoints import check_checkpoints
from conch.repository.checks.configuration import check_backend, check_configuration, named_gpus
from conch.repository.checks.finding import CheckedModel, Finding, in_configuration, line_of, with_fix
from conch.repository.checks.missing_imports import check_imports
from conch.repository.checks.python_model import check_called_models, check_python_model, read_python_model
from conch.repository.directory_kinds import WEIGHTS, is_model_directory, repository_problem
from conch.repository.errors import PollError
from conch.repository.model_files import CONFIG_FILE, ModelFiles, read_labels
from conch.repository.roots import RepositoryLocation
from conch.repository.scan import ModelRepository
from conch.repository.stores.urls import StoreUrl
from conch.repository.versions import missing_version_warning, select_versions

#: Files that identify the model in a version directory.
_MODEL_FILES: Final = ("model.py", "model.json", "config.json", "conch.json", "modules.json", "model.onnx", "model.xml")
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
        for location in map(str, repository.paths):
            fix = f"make a directory for each model, such as {location}/NAME/1/model.json"
            yield Finding(Path(location), 0, "warning", "this repository has no models", fix, location)


def check_placement(files: ModelFiles) -> Iterator[Finding]:
    """Yield files of a model that the server ignores because of their name or location."""
    directory = files.directory
    names = [path.name for path in directory.iterdir() if path.is_file()]
    if CONFIG_FILE not in names:
        yield from _misspelt_configuration(directory, names)
        if "config.json" in names and files.config_path is None and _is_configuration(directory / "config.json"):
            problem = f"the server reads {CONFIG_FILE} only, but this is a configuration in JSON"
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
    if not misplaced:
        misplaced = next((name for name in sorted(names) if Path(name).suffix in WEIGHTS), "")
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
        problem = f"this is a repository of models such as '{inner.name}', not a model"
        yield Finding(directory, 0, "error", problem, f"give {directory}")


def _misspelt_model(version: Path, named: str) -> Iterator[Finding]:
    names = [path.name for path in version.iterdir() if path.is_file()]
    if any(name == named or name in _MODEL_FILES or name.endswith((".gguf", ".plan", ".pt", ".pt2")) for name in names):
        return
    for name in sorted(names):
        near = nearest(name, _MODEL_FILES, 0.8)
        if near and not name.endswith(".pyc"):
            yield Finding(version / name, 0, "error", f"the server reads {near} only", f"rename it {near}")


def check_versions(model: CheckedModel) -> Iterator[Finding]:
    """Yield versions that the policy selects but that do not exist, and versions without the model's file."""
    files = model.files
    selection = select_versions(model.config, files.versions)
    for version in selection.missing:
        text = missing_version_warning(files.name, version)
        yield model.warning(text, ("version_policy",), f"make {files.version_directory(version)}")
    if not selection.versions:
        yield model.finding(
            Problem(
                f"at least one version must be available under the version policy of model '{files.name}'",
                ("version_policy",),
                hint=f"make {files.version_directory(1)}" if not files.versions else "select an existing version",
            )
        )
    for path in model.model_files():
        if not path.exists():
            yield Finding(
                path, 0, "error", "the model's file is missing", "put it there, or set default_model_filename"
            )


def check_tensor_names(model: CheckedModel, path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Yield inputs and outputs that the Python model at ``path`` uses but its configuration does not declare."""
    config = model.config
    if model.completes_itself():
        return
    sequences = config.sequence_batching
    inputs = [tensor.name for tensor in (*config.input, *sequences.control_input)]
    inputs += [state.input_name for state in sequences.state]
    outputs = [tensor.name for tensor in config.output] + [state.output_name for state in sequences.state]
    if config.input:
        yield from _unknown(path, _names(tree, "get_input_tensor_by_name", 1), inputs, "input")
    # A model with BLS calls also makes tensors for other models' inputs.
    if config.output and not any(_called(node) == "InferenceRequest" for node in ast.walk(tree)):
        yield from _unknown(path, _names(tree, "Tensor", 0), outputs, "output")


def _unknown(path: Path, names: Iterator[tuple[str, int]], known: Collection[str], kind: str) -> Iterator[Finding]:
    for name, line in names:
        if name not in known:
            fix = did_you_mean(name, known, f"it declares {', '.join(known)}")
            problem = f"the configuration declares no {kind} '{name}'"
            yield Finding(path, line, "warning", problem, fix)


def _names(tree: ast.Module, function: str, index: int) -> Iterator[tuple[str, int]]:
    """Yield the constant texts at argument index ``index`` in calls of ``function``, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == function and len(node.args) > index:
            argument = node.args[index]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, argument.lineno


def _called(node: ast.AST) -> str:
    """Return the attribute that a call calls (``Tensor`` of ``pb_utils.Tensor(…)``); empty for other nodes."""
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def check_side_files(model: CheckedModel) -> Iterator[Finding]:
    """Yield files that the configuration names but that are missing or unreadable."""
    for problem in _side_file_problems(model):
        problem.hint = problem.hint or "put the file there, or leave the field out"
        yield model.finding(problem)


def _side_file_problems(model: CheckedModel) -> Iterator[Problem]:
    directory, config = model.files.directory, model.config
    for index, output in enumerate(config.output):
        if output.label_filename:
            labels = directory / output.label_filename
            if labels.exists() and not labels.is_file():
                yield Problem(f"label file {labels}: it is not a regular file", ("output", index, "label_filename"))
                continue
            try:
                read_labels(directory, output.label_filename)
            except ConchError as error:
                yield Problem(error.message, ("output", index, "label_filename"))
    for index, sample in enumerate(config.model_warmup):
        for name in sorted(sample.inputs):
            source = sample.inputs[name].input_data_file
            if source and not (directory / "warmup" / source).is_file():
                file = directory / "warmup" / source
                yield Problem(
                    f"warmup input '{name}' needs {file}, which is missing", ("model_warmup", index, "inputs")
                )
    for index, state in enumerate(config.sequence_batching.state):
        for initial in state.initial_state:
            file = directory / "initial_state" / initial.data_file
            if initial.data_file and not file.is_file():
                field = ("sequence_batching", 0, "state", index, "initial_state")
                yield Problem(f"initial state '{initial.name}' needs {file}, which is missing", field)
    environment = parameters(config).get("EXECUTION_ENV_PATH", "")
    if environment:
        path = Path(environment.replace("$$TRITON_MODEL_DIRECTORY", str(directory)))
        if not path.exists():
            yield Problem(f"EXECUTION_ENV_PATH names {path}, which is missing", ("parameters",))
        elif path.is_dir() and not all((path / "bin" / name).exists() for name in ("activate", "python")):
            problem = f"EXECUTION_ENV_PATH names {path}, which has no bin/activate and bin/python"
            yield Problem(problem, ("parameters",), hint=f"python -m venv {path}, or a conda-pack archive")
        elif path.is_file() and not is_tarfile(path):
            problem = f"EXECUTION_ENV_PATH names {path}, which is not an archive"
            yield Problem(problem, ("parameters",), hint="use a folder, or an archive made by conda-pack")


def check_ensemble(model: CheckedModel, models: Mapping[str, CheckedModel]) -> Iterator[Finding]:
    """Yield steps that do not fit the ``models`` of the repository."""
    yield from (model.finding(problem) for problem in _ensemble_problems(model, models))


def _ensemble_problems(model: CheckedModel, models: Mapping[str, CheckedModel]) -> Iterator[Problem]:
    used = {step.model_name for step in model.config.ensemble_scheduling.step}
    step_models = {name: models[name] for name in used if name in models}
    # Tensors that a backend adds when it loads a step's model cannot be compared here.
    unknown = any(not (step.config.input and step.config.output) for step in step_models.values())
    for problem in step_model_problems(model.config, {name: step.config for name, step in step_models.items()}):
        if "not available or ambiguous" in problem.message:
            hints = (did_you_mean(name, models) for name in sorted(used - step_models.keys()))
            problem.hint = next(filter(None, hints), "add it to the repository")
            yield problem
        elif not unknown:
            yield problem
    if len(step_models) == len(used):
        versions = version_problem(model.config, {name: step.versions for name, step in step_models.items()})
        if versions:
            yield versions


# Names are compared with the tables that backends declare, as workers do when they load a model. Workers alone check
# the values.


#: Parameters of a Python model that Triton reads; all others belong to the model.
_PYTHON: Final = ParameterTable("python", accepted=frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"}))
_MODEL_FILE: Final = "model.json"
_PLACEHOLDER: Final = re.compile(r"\s*(\$\{[^{}]*\}\s*)?")


def check_parameters(config: ModelConfig, files: ModelFiles, versions: Iterable[int]) -> Iterator[Finding]:
    """Yield errors in parameter names, and in the ``model.json`` of each of the served ``versions``."""
    runs_on = implementation(config)
    backend = BACKENDS.get(runs_on)
    if backend is None:
        return
    parameter_values = parameters(config)
    if runs_on == "python":
        # Only a warning, because the model may have a parameter of that name.
        for name in _PYTHON.unknown(parameter_values):
            problem = _PYTHON.problem(name)
            if problem is not None:
                yield _in_config(files, name, "warning", problem.message)
        return
    table = _table(backend.parameters)
    for name in table.unknown(parameter_values):
        if config.backend == "tensorrtllm" and _PLACEHOLDER.fullmatch(parameter_values[name]):
            continue  # an unset parameter
        problem = table.problem(name)
        if problem is not None:
            yield _in_config(files, name, "error", problem.message)
        elif name in files.config.parameters:
            yield _in_config(
                files,
                name,
                "warning",
                f"parameter '{name}' has no effect: backend '{config.backend}' has no such parameter",
            )
    if is_remote(config):
        for problem in value_problems(config):
            yield _in_config(files, str(problem.field[1]), "error", problem.message, "")
    if config.backend in ("huggingface", "vllm"):
        arguments = table if table.strict else _table("conch.backends.io_formats.vllm:ENGINE_ARGUMENTS")
        for version in versions:
            path = files.version_directory(version) / _MODEL_FILE
            if path.exists():
                yield from _check_model_file(path, arguments)


def _table(reference: str) -> ParameterTable:
    """Import the table that a backend declares as ``module:name``."""
    module, _, name = reference.partition(":")
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
        return "names need double quotation marks, and no ',' may follow the last value"
    return f"python -m json.tool {path} shows the position"


def _in_config(files: ModelFiles, name: str, severity: str, problem: str, fix: str = "leave it out") -> Finding:
    if files.config_path is None:
        return with_fix(files.directory, 0, severity, problem, fix)
    return with_fix(files.config_path, line_of(files.config_text, name), severity, problem, fix)


#: The fix for a version directory with an invalid name.
_NUMBER = "use a number as its name, such as 1"


def check(
    locations: Sequence[RepositoryLocation],
    config_name: str | None = None,
    backends: BackendDirectories = DEFAULT_BACKEND_DIRECTORIES,
) -> list[Finding]:
    """Return all problems of the models in the repositories at ``locations``, sorted by path and line.

    ``backends`` are the directories of Python-based backends. Models in stores are downloaded with all their versions.
    """
    findings: list[Finding] = []
    usable: list[RepositoryLocation] = []
    for location in locations:
        finding = check_directory(location) if isinstance(location, Path) else _check_store(location, config_name)
        if finding is None:
            usable.append(location)
        else:
            findings.append(finding)
    if usable:
        repository = ModelRepository(usable, config_name, backends, whole=True)
        findings += [_as_shown(finding, repository) for finding in _check_repository(repository)]
        repository.close()
    return sorted(set(findings))


def _check_store(url: StoreUrl, config_name: str | None) -> Finding | None:
    """Return why the repository at ``url`` cannot be read; None if it can."""
    repository = ModelRepository([url], config_name)
    try:
        repository.open()
    except ConchError as error:
        return Finding(Path(str(url)), 0, "error", error.message, location=str(url))
    finally:
        repository.close()
    return None


def _as_shown(finding: Finding, repository: ModelRepository) -> Finding:
    """Replace the paths of local copies in a finding with their original locations."""
    original = repository.shown(str(finding.path))
    if original == str(finding.path):
        return finding
    shown = repository.shown
    return replace(finding, location=original, problem=shown(finding.problem), fix=shown(finding.fix))


def _check_repository(repository: ModelRepository) -> Iterator[Finding]:
    models: dict[str, CheckedModel] = {}
    misplaced: set[str] = set()
    yield from check_contents(repository)
    names = repository.names()
    for name in names:
        try:
            files = repository.describe(name)
        except PollError as error:
            yield _unreadable(error, repository.paths)
            continue
        if placement := list(_unless_unreadable(files.directory, check_placement(files))):
            yield from placement
            misplaced.add(name)
        elif files.warnings:
            severity = "warning" if files.versions else "error"
            yield from (Finding(files.directory, 0, severity, warning, _NUMBER) for warning in files.warnings)
            if not files.versions:
                misplaced.add(name)
        try:
            config = files.completed(named_gpus(files.config))
        except Problem as problem:
            if name not in misplaced:
                yield in_configuration(files, problem.message, problem.field, problem.hint)
            continue
        models[name] = CheckedModel(files, config)
    for name, model in models.items():
        yield from _unless_unreadable(model.files.directory, _check_model(model, names, repository.backends))
        if name not in misplaced:
            yield from _unless_unreadable(model.files.directory, check_versions(model))
    yield from _unless_unreadable(Path(str(repository.paths[0])), check_imports(models.values()))
    yield from _check_ensembles(models)


def _unless_unreadable(path: Path, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings; an unreadable file or directory ends them with a separate finding."""
    try:
        yield from findings
    except OSError as error:
        yield Finding(Path(error.filename or path), 0, "error", f"cannot be read: {error.strerror}")


def _check_model(model: CheckedModel, names: Collection[str], backends: BackendDirectories) -> Iterator[Finding]:
    """Yield all problems in a model's own files; ``names`` are those of all models."""
    yield from check_configuration(model)
    yield from check_backend(model, backends)
    yield from check_parameters(model.config, model.files, model.versions)
    if implementation(model.config) == "python":
        decoupled = None if model.completes_itself() else model.config.model_transaction_policy.decoupled
        for path in filter(Path.exists, model.sources()):
            tree = read_python_model(path)
            if isinstance(tree, Finding):
                yield tree
                continue
            yield from check_python_model(path, tree, decoupled=decoupled)
            yield from check_called_models(path, tree, names)
            yield from check_tensor_names(model, path, tree)
    yield from check_checkpoints(model)
    yield from check_side_files(model)


def _check_ensembles(models: Mapping[str, CheckedModel]) -> Iterator[Finding]:
    step_models = {
        name: [step.model_name for step in model.config.ensemble_scheduling.step] for name, model in models.items()
    }
    for name, model in models.items():
        if is_ensemble(model.config):
            yield from check_ensemble(model, models)
            if (cycle := cycle_problem(name, step_models)) is not None:
                yield model.finding(cycle)


def _unreadable(error: PollError, locations: Sequence[RepositoryLocation]) -> Finding:
    cause = error.__cause__
    if isinstance(cause, ConfigError):
        detail = cause.message.removeprefix(f"failed to read text proto from {cause.path}: ")
        detail = detail.removeprefix(f"{cause.line}:{cause.column}: ")
        return Finding(Path(cause.path), cause.line, "error", f"failed to read text proto: {detail}", cause.hint)
    roots = [location for location in locations if isinstance(location, Path)]
    where = next((root / error.name for root in roots if (root / error.name).is_dir()), Path(error.name))
    reason = cause.strerror if isinstance(cause, OSError) else None
    return Finding(where, 0, "error", error.index_reason or reason or str(cause or error))
