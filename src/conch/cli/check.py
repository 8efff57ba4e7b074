"""``conch check``: what is wrong with a model repository, with file and line, before a server meets it.

Reads files and starts nothing: no worker, no model code.  What only loading can tell (what a
backend completes, which devices there are) is left to the server.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from conch.backends.table import BACKENDS
from conch.cli.check_parameters import check_parameters
from conch.cli.finding import Finding
from conch.config.complete import complete
from conch.config.pbtxt import locate
from conch.config.problem import ConfigError, Problem
from conch.config.schema import ModelConfig, is_ensemble
from conch.config.signature import parameters
from conch.config.validate import directory_name_problems, static_problems
from conch.config.validate_ensemble import cycle_problem, member_problems, version_problem
from conch.config.validate_instances import instance_problems, warmup_problems
from conch.config.validate_io import io_problems
from conch.config.validate_scheduling import state_problems
from conch.errors import ConchError
from conch.repository.errors import PollError
from conch.repository.scan import ModelFiles, ModelRepository, read_labels
from conch.repository.versions import missing_version_warning, select_versions

#: Backends that repositories written for Triton name; those without an entry in the table are not available yet.
_KNOWN_ELSEWHERE: Final = frozenset(
    {
        *("dali", "fil", "huggingface", "identity", "onnxruntime", "openvino", "pytorch", "repeat", "sequence"),
        *("square", "tensorflow", "tensorrt", "tensorrtllm", "vllm"),
    }
)


def check(directories: Sequence[Path], config_name: str | None = None) -> list[Finding]:
    """All faults of the models in the repository ``directories``, sorted by path and line."""
    findings: list[Finding] = []
    usable: list[Path] = []
    for directory in directories:
        if not directory.is_dir():
            findings.append(Finding(directory, 0, "error", "there is no such directory", "give a model repository"))
        elif (directory / "config.pbtxt").is_file():
            findings.append(
                Finding(
                    directory, 0, "error", "this is a model, not a repository of models", f"give {directory.parent}"
                )
            )
        else:
            usable.append(directory)
    return sorted({*findings, *_check_repository(ModelRepository(usable, config_name))})


def render(findings: Iterable[Finding]) -> str:
    """The findings, one on each line."""
    return "".join(f"{finding}\n" for finding in findings)


@click.command("check")
@click.argument("directories", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIRECTORY…")
@click.option(
    "--model-config-name", "config_name", metavar="NAME", help="Check configs/NAME.pbtxt where a model has it."
)
def check_command(directories: tuple[Path, ...], config_name: str | None) -> int:
    """Say what is wrong with the models in a repository, without starting anything.

    The exit status is 1 when there is an error.
    """
    findings = check(directories, config_name)
    click.echo(render(findings), nl=False)
    errors = sum(finding.severity == "error" for finding in findings)
    click.echo(f"{errors} error(s), {len(findings) - errors} warning(s)", err=True)
    return 1 if errors else 0


@dataclass(frozen=True)
class _Model:
    """A readable model: its files, and its configuration completed as far as files tell."""

    files: ModelFiles
    config: ModelConfig

    @property
    def versions(self) -> tuple[int, ...]:
        return select_versions(self.config, self.files.versions).versions

    def finding(self, problem: Problem) -> Finding:
        return _finding(self.files, problem.message, problem.field, problem.hint)


def _finding(
    files: ModelFiles, problem: str, field: tuple[str | int, ...] = (), fix: str = "", severity: str = "error"
) -> Finding:
    if files.config_path is None:
        return Finding(files.directory, 0, severity, problem, fix)
    return Finding(files.config_path, locate(files.config_text, field), severity, problem, fix)


def _check_repository(repository: ModelRepository) -> Iterator[Finding]:
    models: dict[str, _Model] = {}
    for name in repository.names():
        try:
            files = repository.describe(name)
        except PollError as error:
            yield _unreadable(error, repository.paths)
            continue
        yield from (Finding(files.directory, 0, "warning", warning) for warning in files.warnings)
        try:
            config = complete(files.config, name, files.artefacts, gpus=_named_gpus(files.config))
        except Problem as problem:
            yield _finding(files, problem.message, problem.field, problem.hint)
            continue
        models[name] = _Model(files, config)
    for model in models.values():
        yield from _check_model(model)
    members_of = {
        name: [step.model_name for step in model.config.ensemble_scheduling.step] for name, model in models.items()
    }
    for name, model in models.items():
        if is_ensemble(model.config):
            problems = [*_ensemble_problems(model, models), cycle_problem(name, members_of)]
            yield from (model.finding(problem) for problem in problems if problem)


def _unreadable(error: PollError, roots: Sequence[Path]) -> Finding:
    cause = error.__cause__
    if isinstance(cause, ConfigError):
        detail = cause.message.removeprefix(f"failed to read text proto from {cause.path}: ")
        detail = detail.removeprefix(f"{cause.line}:{cause.column}: ")
        return Finding(Path(cause.path), cause.line, "error", f"failed to read text proto: {detail}", cause.hint)
    where = next((root / error.name for root in roots if (root / error.name).is_dir()), Path(error.name))
    return Finding(where, 0, "error", error.index_reason or str(cause or error.log))


def _check_model(model: _Model) -> Iterator[Finding]:
    config, files = model.config, model.files
    problems: list[Problem] = [*directory_name_problems(files.config, files.name), *static_problems(config)]
    problems += [
        problem
        for problem in io_problems(config)
        if not (_completes_itself(model) and "must specify" in problem.message)
    ]
    problems += state_problems(config)
    problems += instance_problems(config, _named_gpus(files.config))
    problems += warmup_problems(config)
    yield from (model.finding(problem) for problem in problems)
    yield from _check_backend(model)
    yield from check_parameters(config, files, model.versions)
    yield from _check_versions(model)
    yield from _check_side_files(model)


def _named_gpus(config: ModelConfig) -> list[int]:
    """The devices to check against: those that the configuration names, as the serving machine's are not known here."""
    return sorted({gpu for group in config.instance_group for gpu in group.gpus}) or [0]


def _completes_itself(model: _Model) -> bool:
    """Whether the backend may fill in tensors when it loads the model."""
    if model.config.backend != "python":
        return not is_ensemble(model.config)
    sources = [model.files.version_directory(version) / _filename(model) for version in model.versions]
    return any("auto_complete_config" in _text(source) for source in sources)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _filename(model: _Model) -> str:
    return str(model.config.default_model_filename)


def _check_backend(model: _Model) -> Iterator[Finding]:
    backend = model.config.backend
    if is_ensemble(model.config) or not backend or backend in BACKENDS:
        return
    if backend in _KNOWN_ELSEWHERE:
        problem, fix = f"backend '{backend}' is not available yet", f"available: {', '.join(sorted(BACKENDS))}"
    else:
        known = sorted({*BACKENDS, *_KNOWN_ELSEWHERE})
        nearest = difflib.get_close_matches(backend, known, n=1)
        problem = f"unknown backend '{backend}'"
        fix = f"did you mean '{nearest[0]}'?" if nearest else f"available: {', '.join(sorted(BACKENDS))}"
    yield _finding(model.files, problem, ("backend",), fix)


def _check_versions(model: _Model) -> Iterator[Finding]:
    files = model.files
    selection = select_versions(model.config, files.versions)
    for version in selection.missing:
        text = missing_version_warning(files.name, version)
        yield _finding(files, text, ("version_policy",), f"make {files.version_directory(version)}", "warning")
    if not selection.versions:
        yield _finding(
            files,
            f"at least one version must be available under the version policy of model '{files.name}'",
            ("version_policy",),
            f"make {files.version_directory(1)}" if not files.versions else "select a version that is there",
        )
    if is_ensemble(model.config) or not _filename(model):
        return
    for version in selection.versions:
        path = files.version_directory(version) / _filename(model)
        if not path.exists():
            yield Finding(
                path, 0, "error", "the model's file is missing", "put it there, or set default_model_filename"
            )
        elif model.config.backend == "python":
            yield from _check_python(path)


def _check_python(path: Path) -> Iterator[Finding]:
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = error.lineno or 0 if isinstance(error, SyntaxError) else 0
        yield Finding(
            path, line, "error", f"not valid Python: {error.msg if isinstance(error, SyntaxError) else error}"
        )
        return
    except OSError as error:
        yield Finding(path, 0, "error", f"cannot be read: {error.strerror}")
        return
    model = next(
        (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "TritonPythonModel"), None
    )
    if model is None:
        # It may also be imported or assigned; then its methods are not to be seen from here.
        if "TritonPythonModel" not in _names_bound(tree):
            yield Finding(path, 0, "error", "there is no class TritonPythonModel", "name the model's class so")
    elif not model.bases and "execute" not in _names_bound(model):
        yield Finding(
            path, model.lineno, "error", "TritonPythonModel has no method execute", "def execute(self, requests)"
        )


def _names_bound(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names.update(
                    "TritonPythonModel" if alias.name == "*" else alias.asname or alias.name for alias in aliases
                )
    return names


def _check_side_files(model: _Model) -> Iterator[Finding]:
    files, config = model.files, model.config
    for index, output in enumerate(config.output):
        if output.label_filename:
            try:
                read_labels(files.directory, output.label_filename)
            except ConchError as error:
                yield _finding(files, error.message, ("output", index, "label_filename"))
    for index, sample in enumerate(config.model_warmup):
        for name in sorted(sample.inputs):
            source = sample.inputs[name].input_data_file
            if source and not (files.directory / "warmup" / source).is_file():
                missing = f"warmup input '{name}' needs {files.directory / 'warmup' / source}, which is missing"
                yield _finding(files, missing, ("model_warmup", index, "inputs"))
    for index, state in enumerate(config.sequence_batching.state):
        for initial in state.initial_state:
            if initial.data_file and not (files.directory / "initial_state" / initial.data_file).is_file():
                where = ("sequence_batching", 0, "state", index, "initial_state")
                wanted = files.directory / "initial_state" / initial.data_file
                yield _finding(files, f"initial state '{initial.name}' needs {wanted}, which is missing", where)
    environment = parameters(config).get("EXECUTION_ENV_PATH", "")
    if environment:
        path = Path(environment.replace("$$TRITON_MODEL_DIRECTORY", str(files.directory)))
        if not path.exists():
            yield _finding(files, f"EXECUTION_ENV_PATH names {path}, which is missing", ("parameters",))


def _ensemble_problems(model: _Model, models: dict[str, _Model]) -> Iterator[Problem]:
    used = {step.model_name for step in model.config.ensemble_scheduling.step}
    members = {name: models[name] for name in used if name in models}
    # Tensors that a member's backend fills in at load cannot be compared here.
    unknown = any(not (member.config.input and member.config.output) for member in members.values())
    for problem in member_problems(model.config, {name: member.config for name, member in members.items()}):
        if not unknown or "not available or ambiguous" in problem.message:
            yield problem
    if len(members) == len(used):
        versions = version_problem(model.config, {name: member.versions for name, member in members.items()})
        if versions:
            yield versions
