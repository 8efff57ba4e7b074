"""Checks of an ensemble against the models that its steps name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from conch.checks.finding import Finding
from conch.checks.model import CheckedModel
from conch.config.problem import Problem
from conch.config.validate_ensemble import member_problems, version_problem
from conch.errors import did_you_mean


def check_ensemble(model: CheckedModel, models: Mapping[str, CheckedModel]) -> Iterator[Finding]:
    """Steps that do not fit the ``models`` of the repository, by name."""
    yield from (model.finding(problem) for problem in _problems(model, models))


def _problems(model: CheckedModel, models: Mapping[str, CheckedModel]) -> Iterator[Problem]:
    used = {step.model_name for step in model.config.ensemble_scheduling.step}
    members = {name: models[name] for name in used if name in models}
    # Tensors that a member's backend fills in at load cannot be compared here.
    unknown = any(not (member.config.input and member.config.output) for member in members.values())
    for problem in member_problems(model.config, {name: member.config for name, member in members.items()}):
        if "not available or ambiguous" in problem.message:
            hints = (did_you_mean(name, models) for name in sorted(used - members.keys()))
            problem.hint = next(filter(None, hints), "add it to the repository")
            yield problem
        elif not unknown:
            yield problem
    if len(members) == len(used):
        versions = version_problem(model.config, {name: member.versions for name, member in members.items()})
        if versions:
            yield versions
