"""Runs seeds for a given time, shrinks failing programs, and prints the command to run one again."""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

from tests.simulation.programs import Program, generate
from tests.simulation.shrinking import shrink
from tests.simulation.simulation import simulate
from tests.simulation.virtual_time import real_monotonic

#: All seeds that ever failed, each with a line about the fault that it found.
KNOWN_SEEDS = Path(__file__).with_name("seeds.txt")
#: How many violations of a program are shown, and how many characters of each.
_SHOWN, _LENGTH = 5, 600


def known_seeds() -> list[int]:
    """Return all seeds that ever failed."""
    lines = KNOWN_SEEDS.read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line.strip() and not line.startswith("#")]


def main() -> int:
    """Run the seeds that the command line selects; returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description="Run random programs on a server in simulated surroundings.")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long new seeds are run")
    parser.add_argument("--first", type=int, help="the first of the new seeds; without it, one from the clock")
    parser.add_argument("--known", action="store_true", help="run the seeds that have ever failed first")
    parser.add_argument("--seed", type=int, help="run this seed alone, and show what happens")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for a smaller program that fails")
    options = parser.parse_args()
    gc.collect()
    gc.freeze()  # exclude imported modules from the collections after each program
    if options.seed is not None:
        return _run_one(options.seed)
    failed = 0
    for seed in known_seeds() if options.known else ():
        failed += _fails(seed, shrinks=False)
    begun = real_monotonic()
    first = options.first if options.first is not None else int.from_bytes(os.urandom(4), "little")
    print(f"new seeds from {first} on", flush=True)
    seed = first
    while real_monotonic() < begun + options.seconds:
        failed += _fails(seed, shrinks=not options.no_shrink, begun=begun)
        seed += 1
        if failed and not options.keep_going:
            break
    print(f"{seed - first} programs in {real_monotonic() - begun:.0f} s, {failed} broke a promise")
    return 1 if failed else 0


def _run_one(seed: int) -> int:
    trace: list[str] = []
    program = generate(seed)
    violations = simulate(program, trace)
    _show(program)
    print(*trace, *violations, sep="\n")
    return 1 if violations else 0


def _fails(seed: int, *, shrinks: bool, begun: float | None = None) -> bool:
    program = generate(seed)
    violations = simulate(program)
    if not violations:
        return False
    after = f" after {real_monotonic() - begun:.1f} s" if begun is not None else ""
    print(f"\nseed {seed}{after}: run it alone with python -m tests.simulation --seed {seed}")
    print(*(f"    {violation[:_LENGTH]}" for violation in violations[:_SHOWN]), sep="\n", flush=True)
    if shrinks:
        smaller, violations = shrink(program, violations)
        print(f"the smallest program that fails like this has {len(smaller.steps)} steps:")
        _show(smaller)
        for seconds, what, arguments in smaller.steps:
            print(f"    after {seconds:.6f} s: {what} {arguments}")
        print(*(f"    {violation[:_LENGTH]}" for violation in violations[:_SHOWN]), sep="\n", flush=True)
    return True


def _show(program: Program) -> None:
    print(f"    settings: {program.settings}")
    for name, spec in program.models.items():
        print(f"    model {name}: {spec}")
