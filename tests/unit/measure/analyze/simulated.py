"""A server made of arithmetic: what a configuration gives at a load, by a queueing model, with noise from a seed.

N callers wait for answers from k instances, each of which takes batches of up to b. With n inferences in a batch that
takes s(n) seconds, an instance that is always busy answers n / s(n) a second; callers that are too few to keep it busy
wait for one batch, the network and the queue delay. Latency follows from N = throughput x latency (Little's law).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any

from conch.measure.analyze.results import Candidate, ModelFigures, Point
from conch.measure.analyze.search.space import DELAY, at, merged
from conch.measure.perf.server.resources import ResourceFigures


@dataclass(frozen=True)
class Shape:
    """A kind of model on a kind of machine.

    ``batch_seconds`` takes the inferences in a batch; ``slowdown`` the instances that compute at the same time, and the
    threads of each, and says how many times as long a batch takes for that.
    """

    batch_seconds: Callable[[int], float]
    slowdown: Callable[[int, float], float]
    memory_base: float = 200e6
    memory_instance: float = 300e6
    memory_inference: float = 2e6
    network: float = 0.0003
    cores: int = 4


def _overhead_bound(n: int) -> float:
    return 0.004 + 0.00012 * n


def _memory_bound(n: int) -> float:
    # Weights are read once for a batch; past 16 activations no longer fit into the cache.
    return 0.006 + 0.0011 * n + 0.0004 * max(0, n - 16)


def _padded(n: int) -> float:
    """Batches are padded to the sizes that were compiled, so that 2 to 7 and 9 to 31 are worse than 1 and 8."""
    return 0.003 + 0.0006 * next((size for size in (1, 8, 32) if n <= size), 128)


def _shared_cores(instances: int, threads: float) -> float:
    """Cores are shared: four of them, and switching between more threads costs."""
    wanted = instances * threads
    alone = 1 / (0.15 + 0.85 / threads)  # Amdahl: how much faster one batch is with so many threads
    crowded = max(1.0, wanted / 4) * (1 + 0.06 * max(0.0, wanted / 4 - 1))
    return crowded / alone


def _gpu(instances: int, threads: float) -> float:
    """Two instances hide each other's copies; more share the processor."""
    return max(1.0, instances / 1.7) * (1 + 0.03 * instances)


SHAPES: Mapping[str, Shape] = {
    "overhead-bound": Shape(_overhead_bound, _gpu),
    "memory-bound": Shape(_memory_bound, _shared_cores, memory_inference=8e6),
    "padded": Shape(_padded, _gpu),
}


class SimulatedServer:
    """Answers what a candidate would measure at a load. Configurations of one model called ``m``."""

    def __init__(self, shape: Shape, config: Mapping[str, Any], *, noise: float = 0.02, seed: int = 0) -> None:
        self.shape, self.config, self.noise = shape, config, noise
        self._random = random.Random(seed)
        self.measured: list[tuple[str, float]] = []
        self._configs: dict[str, Mapping[str, Any]] = {}

    def measure(self, candidate: Candidate, load: float) -> Point:
        """The point with noise; notes that it was asked for."""
        self.measured.append((candidate.name, load))
        return self._point(candidate, load, self._random.gauss)

    def exact(self, candidate: Candidate, load: float) -> Point:
        """The point without noise."""
        return self._point(candidate, load, lambda mean, sd: mean)

    def _config(self, candidate: Candidate) -> Mapping[str, Any]:
        if candidate.name not in self._configs:
            self._configs[candidate.name] = merged(self.config, candidate.overrides.get("m", {}))
        return self._configs[candidate.name]

    def _point(self, candidate: Candidate, load: float, drawn: Callable[[float, float], float]) -> Point:
        config = self._config(candidate)
        instances = int(config["instance_group"][0]["count"])
        batching = config.get("dynamic_batching")
        most = int(config["max_batch_size"]) if batching is not None else 1
        delay = int(at(config, DELAY) or 0) / 1e6
        threads = int(at(config, ("parameters", "intra_op_thread_count", "string_value")) or self.shape.cores)
        waiting = load / instances
        # Without a delay, half of the callers of an instance wait while the other half is computed.
        batch = max(1, min(most, round(waiting if delay else waiting / 2)))
        seconds = self.shape.batch_seconds(batch) * self.shape.slowdown(instances, threads / instances)
        alone = seconds + self.shape.network + (delay if batch < most else delay / 4)
        capacity = instances * batch / seconds
        throughput = min(capacity, load / alone) * exp(drawn(0, self.noise))
        latency = load / throughput
        percentiles = {
            50: latency,
            90: latency * 1.2,
            95: latency * 1.3,
            99: latency * 1.5 * exp(drawn(0, self.noise)),
        }
        stages = {"queue": max(0.0, latency - seconds), "compute_infer": seconds}
        figures = ModelFigures(
            throughput, latency, percentiles, 0.0001, latency, stages, requests=round(throughput * 15)
        )  # fmt: skip
        memory = self.shape.memory_base + instances * (self.shape.memory_instance + most * self.shape.memory_inference)
        return Point(load, {"m": figures}, ResourceFigures(min(4.0, instances), round(memory)))


class RateServer(SimulatedServer):
    """Is sent requests at a rate: it answers as many as it can, and latency grows as in a queue (M/M/1) up to that."""

    def _point(self, candidate: Candidate, load: float, drawn: Callable[[float, float], float]) -> Point:
        busy, idle = super()._point(candidate, 1024, drawn), super()._point(candidate, 1, drawn)
        use = load / busy.throughput
        slower = 1 / (1 - use) if use < 0.999 else 1000.0
        figures = idle.models["m"]
        answered = replace(
            figures,
            throughput=min(load, busy.throughput),
            average=figures.average * slower,
            percentiles={number: value * slower for number, value in figures.percentiles.items()},
        )
        return replace(busy, load=load, models={"m": answered})


@dataclass(frozen=True)
class Step:
    """Other load on the machine, from one measurement to another: how many times as long all takes, and whether the
    measurement notices it."""

    first: int
    last: int
    slowdown: float
    noticed: bool


class SharedServer(SimulatedServer):
    """Other programs come and go on its machine."""

    def __init__(
        self, shape: Shape, config: Mapping[str, Any], steps: Sequence[Step], *, noise: float, seed: int
    ) -> None:
        super().__init__(shape, config, noise=noise, seed=seed)
        self.steps = steps

    def measure(self, candidate: Candidate, load: float) -> Point:
        now = len(self.measured)
        found = super().measure(candidate, load)
        noise = {"throughput": self.noise, "latency_p99": self.noise}
        found = replace(found, models={"m": replace(found.models["m"], noise=noise)})
        for step in self.steps:
            if step.first <= now <= step.last:
                figures = found.models["m"]
                slower = replace(
                    figures,
                    throughput=figures.throughput / step.slowdown,
                    average=figures.average * step.slowdown,
                    percentiles={number: value * step.slowdown for number, value in figures.percentiles.items()},
                )
                found = replace(found, models={"m": slower}, disturbed=found.disturbed or step.noticed)
        return found


def drawn_shape(draw: random.Random) -> Shape:
    """Any kind of model: batches that cost something each and something for each inference, perhaps padded, on a
    machine of a few cores, on which instances are in each other's way."""
    overhead, each = draw.uniform(0.0005, 0.01), 10 ** draw.uniform(-4.3, -2.3)
    padded, cores, crowd = draw.random() < 0.3, draw.choice((1, 2, 4)), draw.uniform(0.0, 0.3)

    def batch_seconds(n: int) -> float:
        size = next((size for size in (1, 4, 16, 64) if n <= size), 256) if padded else n
        return overhead + each * size

    def slowdown(instances: int, threads: float) -> float:
        return max(1.0, instances / cores) * (1 + crowd * max(0.0, instances / cores - 1))

    return Shape(batch_seconds, slowdown, cores=cores)
