"""All checks of a model repository, in one place: which there are, and in which order they are made."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from conch.checks.checkpoints import check_checkpoints
from conch.checks.configuration import check_backend, check_configuration, named_gpus
from conch.checks.ensembles import check_ensemble
from conch.checks.finding import Finding
from conch.checks.missing_imports import check_imports
from conch.checks.model import CheckedModel, in_configuration
from conch.checks.parameters import check_parameters
from conch.checks.placement import check_contents, check_directory, check_placement
from conch.checks.python_model import check_called_models, check_python_model
from conch.checks.side_files import check_side_files
from conch.checks.tensor_names import check_tensor_names
from conch.checks.versions import check_versions
from conch.config.problem import ConfigError, Problem
from conch.config.schema import implementation, is_ensemble
from conch.config.validate_ensemble import cycle_problem
from conch.errors import ConchError
from conch.repository.backends import USUAL_PLACES, BackendPlaces
from conch.repository.errors import PollError
from conch.repository.roots import Place
from conch.repository.scan import ModelRepository
from conch.repository.stores.urls import StoreUrl

#: What to do about a version directory that is none.
_NUMBER = "name it by a number, such as 1"


def check(
    places: Sequence[Place], config_name: str | None = None, backends: BackendPlaces = USUAL_PLACES
) -> list[Finding]:
    """All faults of the models in the repositories at ``places``, sorted by path and line.

    ``backends`` says where Python-based backends are.  Models in stores are downloaded, with all of their versions.
    """
    findings: list[Finding] = []
    usable: list[Place] = []
    for place in places:
        finding = check_directory(place) if isinstance(place, Path) else _check_store(place, config_name)
        if finding is None:
            usable.append(place)
        else:
            findings.append(finding)
    if usable:
        repository = ModelRepository(usable, config_name, backends, whole=True)
        findings += [_as_shown(finding, repository) for finding in _check_repository(repository)]
        repository.close()
    return sorted(set(findings))


def _check_store(url: StoreUrl, config_name: str | None) -> Finding | None:
    """Why the repository at ``url`` cannot be read; None where it can."""
    repository = ModelRepository([url], config_name)
    try:
        repository.open()
    except ConchError as error:
        return Finding(Path(str(url)), 0, "error", error.message, place=str(url))
    finally:
        repository.close()
    return None


def _as_shown(finding: Finding, repository: ModelRepository) -> Finding:
    """The finding with what a copy is a copy of in place of its path."""
    place = repository.shown(str(finding.path))
    if place == str(finding.path):
        return finding
    shown = repository.shown
    return replace(finding, place=place, problem=shown(finding.problem), fix=shown(finding.fix))


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


def _unless_unreadable(place: Path, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings, up to a file or a directory at ``place`` that may not be read; that is the last."""
    try:
        yield from findings
    except OSError as error:
        yield Finding(Path(error.filename or place), 0, "error", f"cannot be read: {error.strerror}")


def _check_model(model: CheckedModel, names: Collection[str], backends: BackendPlaces) -> Iterator[Finding]:
    """All faults of a model that its own files show; ``names`` are those of all models."""
    yield from check_configuration(model)
    yield from check_backend(model, backends)
    yield from check_parameters(model.config, model.files, model.versions)
    if implementation(model.config) == "python":
        for path in model.sources():
            if path.exists():
                decoupled = None if model.completes_itself() else model.config.model_transaction_policy.decoupled
                yield from check_python_model(path, decoupled=decoupled)
                yield from check_called_models(path, names)
        yield from check_tensor_names(model)
    yield from check_checkpoints(model)
    yield from check_side_files(model)


def _check_ensembles(models: Mapping[str, CheckedModel]) -> Iterator[Finding]:
    members_of = {
        name: [step.model_name for step in model.config.ensemble_scheduling.step] for name, model in models.items()
    }
    for name, model in models.items():
        if is_ensemble(model.config):
            yield from check_ensemble(model, models)
            if (cycle := cycle_problem(name, members_of)) is not None:
                yield model.finding(cycle)


def _unreadable(error: PollError, places: Sequence[Place]) -> Finding:
    cause = error.__cause__
    if isinstance(cause, ConfigError):
        detail = cause.message.removeprefix(f"failed to read text proto from {cause.path}: ")
        detail = detail.removeprefix(f"{cause.line}:{cause.column}: ")
        return Finding(Path(cause.path), cause.line, "error", f"failed to read text proto: {detail}", cause.hint)
    roots = [place for place in places if isinstance(place, Path)]
    where = next((root / error.name for root in roots if (root / error.name).is_dir()), Path(error.name))
    reason = cause.strerror if isinstance(cause, OSError) else None
    return Finding(where, 0, "error", error.index_reason or reason or str(cause or error.log))
