"""Makes a failing program smaller: leaves out steps and models as long as it still fails in the same way."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.simulation.programs import Program
from tests.simulation.simulation import simulate
from tests.simulation.virtual_time import real_monotonic

#: How long a program is shrunk (s, of real time).
SECONDS = 30.0
#: How many schedules a smaller program is tried with: fewer steps shift everything that is drawn after them.
SCHEDULES = 4


def shrink(program: Program, violations: list[str]) -> tuple[Program, list[str]]:
    """The smallest program that was found to fail in the same way, and what is wrong with it."""
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
    """The program without ``size`` of its steps, or without some models, if one of those fails in the same way."""
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
    """The first violation without its numbers and names, by which failures are compared."""
    return re.sub(r"'[^']*'|\d+|\[[^]]*\]", "", violations[0])[:60]
