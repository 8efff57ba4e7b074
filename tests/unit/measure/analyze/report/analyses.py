"""Analyses whose figures follow from a simple queue, for the tests of reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conch.measure.analyze.report.analysis import Analysis, RankedCandidate
from conch.measure.analyze.results import Candidate, CandidateResult, ModelFigures, Point
from conch.measure.perf.server.resources import GpuFigures, ResourceFigures

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def figures(load: float, instances: int, batch: int, failed: int = 0) -> ModelFigures:
    """A model whose batch of n takes 30 + 10 n ms, on instances that share a device."""
    taken = min(batch, max(1.0, load / instances))
    infer = (0.030 + 0.010 * taken) * (1 + 0.35 * (instances - 1))
    capacity = instances * taken / infer
    latency = max(infer, load / capacity)
    queue = latency - infer
    return ModelFigures(
        load / latency, latency * 1.02, {50: latency, 90: latency * 1.2, 95: latency * 1.3, 99: latency * 1.5}, 0.00004,
        latency * 1.01, {"queue": queue, "compute_input": 0.00016, "compute_infer": infer, "compute_output": 0.0001},
        int(10 * load / latency), failed,
    )  # fmt: skip


def config(instances: int, batch: int, *, gpu: bool, batching: bool = True, delay: int = 0) -> dict[str, Any]:
    return {
        "name": "falcon7b",
        "max_batch_size": batch,
        "instance_group": [{"kind": "KIND_GPU" if gpu else "KIND_CPU", "count": instances}],
        **({"dynamic_batching": {"max_queue_delay_microseconds": delay} if delay else {}} if batching else {}),
    }


def candidate(
    name: str, instances: int, batch: int, *, gpu: bool = True, limit: float = 5.0, loads: Sequence[int] = LOADS,
    overrides: Mapping[str, Any] | None = None, disturbed: bool = False, failed: int = 0, delay: int = 0,
    batching: bool = True, broken: Sequence[str] = (), tied: bool = False, model: str = "falcon7b",
) -> RankedCandidate:  # fmt: skip
    points = []
    for load in loads:
        one = figures(load, instances, batch if batching else 1, failed)
        gpus = {
            "GPU-57c7b00e": GpuFigures(
                min(1.0, 0.5 + load / 100), (900 + 15_100 * instances + 20 * batch) * 10**6, 210.0
            )
        }
        memory = (400 + 350 * instances + 3 * batch) * 10**6
        used = ResourceFigures(min(2.0, 0.3 + load / 20), memory, gpus if gpu else {})
        points.append(Point(load, {model: one}, used, disturbed=disturbed and load == 16))
    passing = frozenset(point.load for point in points if point.models[model].percentiles[99] <= limit)
    best = max((point for point in points if point.load in passing), key=lambda point: point.throughput, default=None)
    own = config(instances, batch, gpu=gpu, batching=batching, delay=delay)
    changes = {} if name.endswith("default") else {model: {key: own[key] for key in own if key != "name"}}
    if overrides:
        changes[model] = {**changes.get(model, {}), **overrides}
    result = CandidateResult(Candidate(name, changes), points, "", {model: own})
    return RankedCandidate(result, best or points[-1], passing, broken if best is None else (), tied=tied)


def analysis(*, gpu: bool = True, many: int = 8, **given: Any) -> Analysis:
    """Several configurations, a default, one that could not be served and one that keeps no constraint."""
    placed = [
        candidate(
            f"falcon7b_config_{number}",
            1 + number % 3,
            2 ** (1 + number % 6),
            gpu=gpu,
            limit=1.5,
            delay=100 * (number % 2),
            disturbed=number == 2,
            failed=3 if number == 4 else 0,
        )
        for number in range(many)
    ]
    default = candidate("falcon7b_config_default", 1, 8, gpu=gpu, limit=1.5, batching=False)
    placed = sorted([*placed, default], key=lambda one: -(one.point.throughput if one.point else 0))
    slow = candidate(
        "falcon7b_config_slow", 1, 1, gpu=gpu, limit=0.001, broken=["p99 latency is 61.2 ms and must be at most 1 ms"]
    )
    failed = CandidateResult(
        Candidate("falcon7b_config_9", {"falcon7b": {"max_batch_size": 4096}}), error="CUDA out of memory <4096>"
    )
    return Analysis(
        ("falcon7b",),
        "highest throughput with p99 latency at most 1,500 ms",
        [*placed, slow, RankedCandidate(failed, None)],
        latency_limit=1.5,
        server="conch 0.11.0 at 127.0.0.1:8000",
        machine=[("processor", "Intel(R) Core(TM) i9-13900K, 32 cores, 64 GiB"), ("GPU", "NVIDIA RTX A6000, 48 GB"),
                 ("load", "0.1 before, 2.3 during; other processes used 1 % of the cores")],
        settings=[("search", "quick, concurrency 1 to 256"), ("windows", "3 of 5 s that agree within 10 %")],
        reproduce="conch analyze profile -m model_repository --profile-models falcon7b --latency-budget 1500",
        apply="conch analyze apply --model falcon7b --config falcon7b_config_7",
        **given,
    )  # fmt: skip


def nothing() -> Analysis:
    """One in which every request failed or no server came up."""
    dead = CandidateResult(Candidate("m_config_default"), error="the server did not start: port 8000 is taken")
    other = CandidateResult(
        Candidate("m_config_1", {"m": {"max_batch_size": 2}}),
        [Point(1, {"m": ModelFigures(0.0, 0.0, {}, 0.0, 0.0, {}, 0, 40)}, None, warnings=("no request completed",))],
    )
    return Analysis(("m",), "highest throughput", [RankedCandidate(dead, None), RankedCandidate(other, None)])
