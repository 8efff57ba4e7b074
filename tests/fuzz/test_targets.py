"""Runs every target for a moment, on the same inputs every time."""

from __future__ import annotations

import json
from random import Random
from time import monotonic

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

import tests.fuzz.targets  # noqa: F401 (declares them)
from tests.fuzz.mutation import inputs, replacements
from tests.fuzz.target import TARGETS, Target, check

#: Inputs of each target at most, and how long they may take (s).
COUNT = 3000
SECONDS = 0.5

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_any_input_is_dealt_with(target: Target) -> None:
    until = monotonic() + SECONDS
    for _, data in zip(range(COUNT), inputs(target, Random(0)), strict=False):
        if monotonic() > until:
            break
        try:
            check(target, data)
        except Exception as error:
            error.add_note(f"input: {data!r}")
            raise


@pytest.mark.parametrize("name", ["json_infer", "json_generate", "json_control_bodies", "openai", "retrieval"])
def test_every_value_of_a_body_may_have_any_type(name: str) -> None:
    target = TARGETS[name]
    for seed in target.seeds:
        at = seed.index(b"{")
        for document in replacements(json.loads(seed[at:])):
            try:
                check(target, seed[:at] + json.dumps(document).encode())
            except Exception as error:
                error.add_note(f"body: {document}")
                raise


def test_mutations_of_a_seed_are_the_same_every_time() -> None:
    target = next(iter(TARGETS.values()))
    first, second = ([data for _, data in zip(range(50), inputs(target, Random(7)), strict=False)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 25
