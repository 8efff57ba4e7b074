"""Compares the search modes of ``conch analyze``: full sweep, quick and optuna, in one run.

    python -m benchmarks.analyze_modes [--model minilm] [--instances 3] [--batches 32] [--seconds 0.5] [--rounds 10]

All three search the same space of a model of the demo's repository, each from scratch, for the highest throughput.
Then their results are measured again, in turns, on servers that run at the same time; the ratio to the sweep's result
has a confidence interval over the rounds. Measurements are made as in the search.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Final

from benchmarks.tables import markdown
from conch.cli.demo.command import build, require_packages
from conch.measure.analyze.options.settings import AnalyzeSettings, ModelSettings, SearchMode
from conch.measure.analyze.profiling.measurement import at_load, plan_of
from conch.measure.analyze.profiling.profile import Profile
from conch.measure.analyze.profiling.progress import SearchProgress
from conch.measure.analyze.results import CandidateResult, Point, Trial
from conch.measure.analyze.saved_results import SearchOutcome
from conch.measure.analyze.servers import LocalServer, Overrides
from conch.measure.perf.figures import mean_interval
from conch.measure.perf.run import Measurement
from conch.repository.scan import ModelRepository

MODES: Final = ("brute", "quick", "optuna")
TEXT: Final = "A sentence of a usual length, as people send it to have it embedded."


class Counting:
    """Counts the measurements, and reports the count on standard error."""

    def __init__(self, mode: str) -> None:
        self.mode, self.points, self.failures = mode, 0, 0

    def say(self, line: str) -> None:
        print(f"{self.mode}: {line}", file=sys.stderr)

    def measuring(self, trial: Trial, progress: SearchProgress) -> None:
        left = f", {progress.left:.0f} s left"
        print(f"{self.mode} {progress.done}/{progress.expected}{left}: {trial.candidate.name}", file=sys.stderr)

    def measured(self, trial: Trial, point: Point, *, before: bool) -> None:
        self.points += 1

    def failed(self, trial: Trial, error: str, *, before: bool) -> None:
        self.failures += 1
        self.say(f"{trial.candidate.name}: {error}")


@dataclass
class Found:
    """The result of a mode: the best candidate and its best load; ``again`` are its throughputs in turns (infer/s)."""

    mode: str
    points: int
    seconds: float
    best: CandidateResult
    point: Point
    overrides: Overrides
    again: list[float]

    @property
    def choice(self) -> tuple[str, float]:
        """The key that is equal for modes with the same result."""
        return json.dumps(self.overrides, sort_keys=True), self.point.load


def main() -> int:
    arguments = _arguments()
    require_packages()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repository = build(folder)
        settings = _settings(arguments, repository)
        searches = [_search(settings, mode, folder / mode) for mode in arguments.modes]
        _in_turns(settings, ModelRepository([repository]), searches, arguments, folder)
    heads = ["mode", "measurements", f"of {searches[0].mode}'s", "time (s)", "found", "at", "infer/s", "ratio in turns"]
    print(markdown([heads, *_rows(searches)]))
    for search in searches:
        print(f"\n{search.mode} found: {json.dumps(search.overrides)}")
    return 0


def _search(settings: AnalyzeSettings, mode: SearchMode, folder: Path) -> Found:
    counting = Counting(mode)
    start = monotonic()
    mode_settings = replace(settings, run_config_search_mode=mode, export_path=folder, final_rounds=0)
    with Profile(mode_settings, counting) as profile:
        [outcome] = profile.run()
        best, point = _best(outcome)
        overrides = profile.changes(best.candidate)
    return Found(mode, counting.points, monotonic() - start, best, point, overrides, [])


def _best(outcome: SearchOutcome) -> tuple[CandidateResult, Point]:
    """Return the winner; if all measurements were disturbed, the first in the ranking."""
    ranking = outcome.recommendation.ranking
    row = ranking.winner or ranking.rows[0]
    assert row.point is not None
    return row.result, row.point


def _in_turns(
    settings: AnalyzeSettings, repository: ModelRepository, searches: Sequence[Found], arguments: argparse.Namespace,
    folder: Path,
) -> None:  # fmt: skip
    """Measure each result once in every round; the other servers are idle."""
    with ExitStack() as stack:
        measurements = []
        for search in searches:
            server = stack.enter_context(
                LocalServer(
                    repository, [arguments.model], folder / f"{search.mode}.log", protocol=settings.client_protocol
                )
            )
            server.load(search.overrides)
            plan = replace(plan_of(settings, arguments.model, server.address), trials=3)
            measurements.append(stack.enter_context(Measurement(at_load(plan, search.point.load, rate=False))))
        for _ in range(arguments.rounds):
            for search, measurement in zip(searches, measurements, strict=True):
                search.again.append(measurement.measure(search.point.load).figures.throughput)


def _rows(searches: Sequence[Found]) -> list[list[str]]:
    return [
        [
            search.mode, str(search.points), f"{search.points / searches[0].points:.2f}", f"{search.seconds:.0f}",
            search.best.candidate.name, f"{search.point.load:g}", f"{sum(search.again) / len(search.again):.1f}",
            "the same" if search.choice == searches[0].choice else _ratio(search.again, searches[0].again),
        ]
        for search in searches
    ]  # fmt: skip


def _ratio(throughputs: Sequence[float], other: Sequence[float]) -> str:
    """Return the geometric mean of the ratios within rounds, and its 95 % confidence interval."""
    logs = [
        math.log(throughput / reference)
        for throughput, reference in zip(throughputs, other, strict=True)
        if throughput and reference
    ]
    if not logs:
        return "–"
    mean = sum(logs) / len(logs)
    if len(logs) < 2:
        return f"{math.exp(mean):.3f}"
    # ``mean_interval`` does not accept values that may be negative.
    lowest = min(logs)
    interval = mean_interval([value - lowest for value in logs])
    assert interval is not None
    return f"{math.exp(mean):.3f} ({math.exp(interval.low + lowest):.3f}–{math.exp(interval.high + lowest):.3f})"


def _settings(arguments: argparse.Namespace, repository: Path) -> AnalyzeSettings:
    return AnalyzeSettings(
        model_repository=repository,
        profile_models=(ModelSettings(name=arguments.model),),
        sweep=tuple(arguments.sweep),
        run_config_search_max_instance_count=arguments.instances,
        run_config_search_max_model_batch_size=arguments.batches,
        concurrency=tuple(arguments.concurrency),
        perf_analyzer_flags={
            "string-data": TEXT,
            "measurement-interval": arguments.seconds * 1000,
            "max-trials": 5,
            "warm-up": arguments.seconds,
        },
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm", help="a model of the demo that takes one text")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES, help="the first one is compared with")
    parser.add_argument("--sweep", nargs="+", default=["instances", "batch", "threads"], help="the dimensions")
    parser.add_argument("--instances", type=int, default=3, help="instances at most")
    parser.add_argument("--batches", type=int, default=32, help="max_batch_size at most")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32], help="the loads")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a window")
    parser.add_argument("--rounds", type=int, default=10, help="in turns, at the end")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
