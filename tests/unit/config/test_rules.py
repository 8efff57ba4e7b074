"""What a configuration is refused with is what Triton says of it, and what Triton accepts is accepted."""

from __future__ import annotations

import json

import pytest

from conch.config.complete import complete
from conch.config.pbtxt import parse
from conch.config.problem import Problem
from conch.config.schema import ModelConfig, is_ensemble
from conch.config.validate import validate_ensemble, validate_load
from conch.config.validate_ensemble import cycle_problem, version_problem
from tests.conformance.rules import CRASHES, MEMBERS, RECORDED, RULES, name_of

EXPECTED: dict[str, str] = json.loads(RECORDED.read_text())


def completed(name: str, text: str) -> ModelConfig:
    return complete(parse(text, "config.pbtxt"), name, set() if "platform" in text else {"model.py"})


LOADED = {name: completed(name, text) for name, text in MEMBERS.items()}


def refusal(name: str, text: str) -> str:
    """What loading the model is refused with; empty when it is not."""
    config = completed(name, text)
    try:
        validate_load(config)
        if is_ensemble(config):
            members = [step.model_name for step in config.ensemble_scheduling.step]
            problem = cycle_problem(name, {name: members}) or version_problem(config, dict.fromkeys(MEMBERS, (1,)))
            if problem is not None:
                raise problem
            validate_ensemble(config, LOADED)
    except Problem as problem:
        return problem.message
    return ""


def test_every_rule_was_recorded() -> None:
    assert list(EXPECTED) == list(RULES)


@pytest.mark.parametrize("rule", [rule for rule in EXPECTED if EXPECTED[rule] != CRASHES])
def test_rule(rule: str) -> None:
    assert refusal(name_of(rule), RULES[rule]) == EXPECTED[rule]
