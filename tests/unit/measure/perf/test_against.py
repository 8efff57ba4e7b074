"""Alternating between two servers: drift cancels out, noise is no difference, disturbed rounds are repeated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from conch.cli import main
from conch.measure.perf.against import THROUGHPUT, ComparedFigure, Comparison, compare
from conch.measure.perf.figures import figures_of
from conch.measure.perf.measured import Measured
from conch.measure.perf.senders.records import RECORD
from tests.unit.measure.perf.known_server import KnownServer, running


def turn(requests: int, *, disturbed: bool = False, errors: dict[str, int] | None = None, gone: str = "") -> Measured:
    """A second with so many answers, each after a share of it."""
    records = np.zeros(requests, RECORD)
    records["end"] = 10**9
    records["due"] = records["sent"] = records["written"] = 10**9 - 10**9 // max(1, requests)
    figures = figures_of(records, [(0, 10**9)], np.array([1]))
    return Measured(
        1, figures, None, (figures,), True, (), errors or {}, 0.1, 0, 0, disturbed=disturbed, gone=gone
    )  # fmt: skip


def taking(throughputs: Iterator[float]) -> Callable[[], Measured]:
    return lambda: turn(round(next(throughputs)))


def figure(found: Comparison, name: str = THROUGHPUT) -> ComparedFigure:
    return next(one for one in found.figures if one.name == name)


def test_a_machine_that_becomes_slower_does_so_for_both() -> None:
    """Every measurement finds the machine 5 % slower than the one before; B answers twice as many."""
    speeds = [100_000 * 0.95**number for number in range(100)]
    drift = iter(speeds)
    found = compare(1, lambda: turn(round(next(drift))), lambda: turn(round(2 * next(drift))), 5)
    assert len(found.rounds) == 5
    assert figure(found).ratio == pytest.approx(2, rel=1e-3) and figure(found).differs
    assert figure(found, "p50").ratio == pytest.approx(0.5, rel=1e-3)
    expected = "B has 2.00 times the throughput (2.00 … 2.00): the difference is larger than the noise"
    assert found.sentence() == expected
    assert found.sentence(open_load=True).startswith("B has 0.50 times the median latency")
    assert found.whole


def test_noise_is_no_difference() -> None:
    """Of 50 comparisons of a server with itself, about 5 % may report a false difference."""
    random = Random(7)

    def noisy() -> Iterator[float]:
        while True:
            yield 500 * random.lognormvariate(0, 0.1)

    wrong = sum(figure(compare(1, taking(noisy()), taking(noisy()), 5)).differs for _ in range(50))
    assert wrong <= 6
    found = compare(1, taking(iter([100, 101, 99, 100])), taking(iter([101, 99, 100, 101])), 2)
    assert found.sentence().startswith("no significant difference: B has 1.0")
    assert "a single round" in compare(1, taking(iter([1, 1])), taking(iter([2, 2])), 1).sentence()


def test_disturbed_rounds_are_repeated_and_do_not_count() -> None:
    disturbed = iter([True, True, *[False] * 6])
    found = compare(1, lambda: turn(100, disturbed=next(disturbed)), lambda: turn(200), 3)
    assert (len(found.rounds), len(found.counted), found.disturbed) == (4, 3, False)
    assert list(found.warnings) == []
    never = compare(1, lambda: turn(100, disturbed=True), lambda: turn(200), 3)
    assert (len(never.rounds), len(never.counted), never.disturbed) == (6, 6, True)
    [warning] = never.warnings
    assert warning.startswith("other processes used the machine in 6 of 6 rounds")
    assert "times" not in never.sentence() and "no ratio is reliable" in never.sentence()


def test_a_side_that_ends_leaves_the_rounds_before() -> None:
    turns = iter([turn(100), turn(100), turn(100), turn(0, errors={"no": 3}, gone="refused")])
    found = compare(1, lambda: turn(100), lambda: next(turns), 5)
    assert len(found.rounds) == 1 and not found.whole
    ended, failed = found.warnings
    assert ended == "B: the server stopped responding before the first response: refused"
    assert failed == "3 requests to B failed and are excluded from the latencies: no"
    nothing = compare(1, lambda: turn(0, gone="refused"), lambda: turn(1), 5)
    assert nothing.sentence() == "nothing could be compared"


def test_ctrl_c_keeps_whole_rounds() -> None:
    def interrupt() -> Measured:
        if len(taken) == 3:
            raise KeyboardInterrupt
        taken.append(turn(200))
        return taken[-1]

    taken: list[Measured] = []
    found = compare(1, lambda: turn(100), interrupt, 5)
    assert found.stopped and len(found.rounds) == 1 and figure(found).ratio == 2


@pytest.mark.long
def test_two_servers_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "out.json"
    with running(KnownServer(service=0.01)) as a, running(KnownServer(service=0.04)) as b:
        options = ["-u", f"127.0.0.1:{a.port}", "--against", f"http://127.0.0.1:{b.port}", "--json", str(document)]
        for window in ("100", "1000", "5000"):  # a busy machine may complete no request in a short one
            status = main(["perf", "-m", "known", "-p", window, "--warm-up", "0.05", "--rounds", "2", *options])
            if status == 0:
                break
        assert a.answered and b.answered
    assert status == 0
    shown = capsys.readouterr().out
    assert ("B has 0." in shown or "no ratio is reliable" in shown) and "infer/s" in shown
    [level] = json.loads(document.read_text())["levels"]
    # One caller: 100 answers a second against 25, less what the machine takes.
    assert 0.1 < level["figures"][0]["ratio"] < 0.6
    assert main(["perf", "-m", "known", "-i", "openai", "--against", "grpc://h:1"]) == 1
    assert "is compared with OpenAI's API only" in capsys.readouterr().err
