"""Shrinks a failing program: leaves out steps and models while it still fails in the same way."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.simulation.programs import Program
from tests.simulation.simulation import simulate
from tests.simulation.virtual_time import real_monotonic

#: Time limit for shrinking a program (s, real time).
SECONDS = 30.0
#: The number of schedules tried for a smaller program: with fewer steps, all later draws change.
SCHEDULES = 4


def shrink(program: Program, violations: list[str]) -> tuple[Program, list[str]]:
    """Return the smallest program found that fails in the same way, and its violations."""
    kind = kind_of(violations)
    deadline = real_monotonic() + SECONDS
    size = max(len(program.steps) // 2, 1)
    while real_monotonic() < deadline:
        smaller = _without_some(program, size, kind, deadline)
        if smaller is not None:
            program, violations = smaller
        elif size > 1:
            size //= 2
        else:
            break
    return program, violations


def _without_some(program: Program, size: int, kind: str, deadline: float) -> tuple[Program, list[str]] | None:
    """Return a program without ``size`` of the steps, or without some models, that fails in the same way, if any."""
    candidates = [program.without(set(range(start, start + size))) for start in range(0, len(program.steps), size)]
    used = {arguments.get("model") for _, _, arguments in program.steps}
    needed = {other for spec in program.models.values() for other in (*spec.get("steps", ()), spec.get("calls"))}
    unused = set(program.models) - used - needed
    if unused and "load_model" not in program.settings:
        models = {name: spec for name, spec in program.models.items() if name not in unused}
        candidates.insert(0, replace(program, models=models))
    for candidate in candidates:
        for schedule in range(SCHEDULES):
            if real_monotonic() > deadline:
                return None
            attempt = replace(candidate, schedule=program.schedule + schedule)
            violations = simulate(attempt)
            if violations and kind_of(violations) == kind:
                return attempt, violations
    return None


def kind_of(violations: list[str]) -> str:
    """Return the first violation without numbers and names, for comparing failures."""
    return re.sub(r"'[^']*'|\d+|\[[^]]*\]", "", violations[0])[:60]
