"""What a configuration is refused with is what Triton says of it, and what Triton accepts is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.config.complete import complete
from conch.config.pbtxt import parse
from conch.config.reading import Problem
from conch.config.schema import ModelConfig, is_ensemble
from conch.config.validate import validate_ensemble, validate_load
from conch.config.validate_ensemble import cycle_problem, version_problem
from conch.options.settings import Settings
from conch.repository.model_files import ModelFiles
from conch.server.models.version_loader import VersionLoader
from tests.conformance.rules import CRASHES, MEMBERS, NO_VERSION, RECORDED, RULES, name_of

EXPECTED: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())
#: How the rules were recorded, and which of them Triton survives.
CASES = [(mode, rule) for mode, rules in EXPECTED.items() for rule in rules if rules[rule] != CRASHES]


def artefacts(text: str) -> frozenset[str]:
    return frozenset() if "platform" in text else frozenset({"model.py"})


def completed(name: str, text: str) -> ModelConfig:
    return complete(parse(text, "config.pbtxt"), name, artefacts(text))


LOADED = {name: completed(name, text) for name, text in MEMBERS.items()}


def refusal(name: str, text: str, mode: str) -> str:
    """What loading the model is refused with; empty when it is not."""
    as_written = mode == "as written"
    settings = Settings(disable_auto_complete_config=as_written)
    nothing: Any = None  # no version is started
    config = parse(text, "config.pbtxt")
    files = (
        ModelFiles(name, Path(name), config)
        if as_written
        else ModelFiles(name, Path(name), config, versions=(1,), artefacts=artefacts(text))
    )
    try:
        config = VersionLoader(settings, (), nothing, nothing).configure(files)
        if is_ensemble(config):
            members = [step.model_name for step in config.ensemble_scheduling.step]
            problem = cycle_problem(name, {name: members}) or version_problem(config, dict.fromkeys(MEMBERS, (1,)))
            if problem is not None:
                raise problem
            validate_ensemble(config, LOADED)
        if not files.versions:
            return NO_VERSION
        validate_load(config)
    except Problem as problem:
        return problem.message
    return ""


def test_every_rule_was_recorded() -> None:
    assert all(list(rules) == list(RULES) for rules in EXPECTED.values())


@pytest.mark.parametrize(("mode", "rule"), CASES)
def test_rule(mode: str, rule: str) -> None:
    assert refusal(name_of(rule), RULES[rule], mode) == EXPECTED[mode][rule]
