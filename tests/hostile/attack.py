"""The declaration of attacks, and the measurements during an attack."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Final

import psutil

from tests.conftest import Server
from tests.hostile.health_watch import HealthWatch

#: Sends something to a server, and returns when the server has responded or the connection has ended. It adds the
#: connections that it leaves open to the stack, which is closed after the server's memory has been measured.
Run = Callable[[Server, ExitStack], None]

MEBIBYTE: Final = 1 << 20


@dataclass(frozen=True)
class Attack:
    """An attack: ``title`` is its row in SECURITY.md; ``conch_only`` attacks use features that Triton does not have."""

    name: str
    title: str
    run: Run
    conch_only: bool


ATTACKS: Final[dict[str, Attack]] = {}


def attack(title: str, *, conch_only: bool = False) -> Callable[[Run], Run]:
    """Declare a function as an attack; its name must be unique."""

    def declare(run: Run) -> Run:
        name = run.__name__
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(name, title, run, conch_only)
        return run

    return declare


@dataclass(frozen=True)
class Outcome:
    """The effect of an attack.

    ``longest_wait`` is the longest wait of a health request (s), without waiting for a core, and ``seconds`` the
    duration of the attack. ``peak`` and ``kept`` are the growth of the server's resident memory (MiB): its maximum, and
    after the attack, with the connections still open.
    """

    longest_wait: float
    seconds: float
    peak: float
    kept: float


def measure(attack: Attack, server: Server, *, enough: float = 4.0, settle: float = 10.0) -> Outcome:
    """Run an attack during health requests.

    ``kept`` is the least memory within ``settle`` seconds after it, or the first that is at most ``enough`` MiB.
    """
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    with ExitStack() as stack:
        watch = stack.enter_context(HealthWatch(server.http, server.process.pid))
        started = monotonic()
        attack.run(server, stack)
        seconds = monotonic() - started
        seen = watch.stop()
        kept = process.memory_info().rss
        until = monotonic() + settle
        while monotonic() < until and kept - before > enough * MEBIBYTE:
            sleep(0.05)
            kept = min(kept, process.memory_info().rss)
    return Outcome(seen.longest_wait, seconds, max(0, seen.peak - before) / MEBIBYTE, (kept - before) / MEBIBYTE)
