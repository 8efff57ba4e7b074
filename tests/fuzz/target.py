"""The declaration of targets, and the limits within which every input is dealt with."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import Final

#: How long any input may take (s of one core), and how much more memory the process may have after it (bytes).
SECONDS: Final = 5.0
MEMORY: Final = 1 << 30

Run = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """``run`` takes any bytes and raises for a broken invariant alone.

    ``seeds`` are inputs from which others are made, ``tokens`` what is put into them; no input is longer than ``most``.
    """

    name: str
    run: Run
    seeds: tuple[bytes, ...]
    tokens: tuple[bytes, ...]
    most: int


TARGETS: Final[dict[str, Target]] = {}


def target(*, seeds: Sequence[bytes], tokens: Sequence[bytes] = (), most: int = 4096) -> Callable[[Run], Run]:
    """Declare a function as a target; its name must be unique."""

    def declare(run: Run) -> Run:
        assert run.__name__ not in TARGETS
        TARGETS[run.__name__] = Target(run.__name__, run, tuple(seeds), tuple(tokens), most)
        return run

    return declare


def check(target: Target, data: bytes) -> None:
    """Run a target on an input; raises what it raises, and AssertionError for one that takes too long or too much."""
    began, before = thread_time(), _peak()
    target.run(data)
    seconds, grown = thread_time() - began, _peak() - before
    assert seconds < SECONDS, f"{target.name} took {seconds:.1f} s"
    assert grown < MEMORY, f"{target.name} took {grown >> 20} MiB"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
