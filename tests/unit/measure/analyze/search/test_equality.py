"""Configurations count as the same only where the server's schedulers form the same batches of them."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from conch.config.complete import normalise
from conch.config.signature import signature
from conch.core.inference import InferRequest
from conch.measure.analyze.search.space import ModelFacts, as_served, key, message
from conch.server.execution.scheduling import make_scheduler
from tests.unit.measure.analyze.configs import batching_model

US = 1000
SIZES = (1, 2, 3, 4, 6, 8, 64)
BATCHING: Sequence[dict[str, Any] | None] = (
    None,
    *(
        {"max_queue_delay_microseconds": delay, "preferred_batch_size": list(preferred)}
        for delay, preferred in product((0, 300), ((), (2,), (4,), (2, 4), (1,)))
    ),
)


def configs(backend: str, request_batch: int) -> Iterator[dict[str, Any]]:
    for size, batching in product(SIZES, BATCHING):
        if size >= max([request_batch, *((batching or {}).get("preferred_batch_size") or [])]):
            chosen = {"dynamic_batching": batching} if batching is not None else {}
            config = batching_model(backend=backend, platform="", max_batch_size=size)
            del config["dynamic_batching"]
            yield config | chosen


def batches(config: dict[str, Any], request_batch: int, callers: int, seed: int) -> list[tuple[int, int]]:
    """When the scheduler runs how many requests, of callers that send again after a while."""
    draw = random.Random(seed)
    completed = message(config)
    normalise(completed)
    scheduler = make_scheduler(completed, signature(completed, 1), limit=1000)
    found: list[tuple[int, int]] = []
    idle = 2
    events = [(draw.randrange(500) * US, 0, number) for number in range(callers)]
    heapq.heapify(events)
    while events and len(found) < 60:
        now, ended, _ = heapq.heappop(events)  # ended requests; 0 where one arrives, -1 where the scheduler wakes up
        idle += ended > 0
        for _ in range(ended):
            heapq.heappush(events, (now + draw.randrange(200) * US, 0, draw.randrange(1 << 30)))
        if ended == 0:
            request = InferRequest("m", {}, print)
            request.batch_size, request.length = request_batch, 8
            scheduler.queue.add(request, now)
        while idle:
            decision = scheduler.take(now)
            if not decision.batch:
                if decision.wake_at > now:
                    heapq.heappush(events, (decision.wake_at, -1, 0))
                break
            idle -= 1
            found.append((now, len(decision.batch)))
            heapq.heappush(events, (now + 400 * US, len(decision.batch), draw.randrange(1 << 30)))
    return found


@pytest.mark.parametrize("backend", ["onnxruntime", "huggingface", "python"])
@pytest.mark.parametrize(
    ("request_batch", "callers"), [(1, 3), pytest.param(1, 40, marks=pytest.mark.long), (3, 2), (3, 9)]
)
def test_what_is_skipped_runs_the_same_batches(backend: str, request_batch: int, callers: int) -> None:
    same = defaultdict(list)
    for config in configs(backend, request_batch):
        facts = ModelFacts("m", config, request_batch=request_batch, most_waiting=callers * request_batch)
        same[key(as_served(config, facts))].append(config)
    for group in same.values():
        for seed in range(5):
            runs = [batches(config, request_batch, callers, seed) for config in group]
            assert all(run == runs[0] for run in runs), group
    assert len(same) < len(list(configs(backend, request_batch)))


def test_threads_that_the_instances_share_are_compared_by_what_each_pool_gets() -> None:
    def served(instances: int, threads: str = "", shown: str = "2") -> dict[str, Any]:
        own = batching_model(parameters={"conch.machine.threads": {"string_value": shown}})
        group = [{"name": "m_0", "kind": "KIND_CPU", "count": instances}]
        chosen = {"intra_op_thread_count": {"string_value": threads}} if threads else {}
        config = batching_model(instance_group=group, parameters=own["parameters"] | chosen)
        return as_served(config, ModelFacts("m", own, threads=2))

    assert served(1) == served(1, "2") != served(1, "1")
    assert served(3) == served(3, "1") != served(3, "2")
    assert served(3, shown="") != served(3, "1", shown=""), "another server shares threads in its own way"


def test_instances_of_a_model_that_generates_are_one_engine() -> None:
    def served(instances: int) -> dict[str, Any]:
        config = batching_model(
            backend="huggingface",
            parameters={"task": {"string_value": "text-generation"}},
            instance_group=[{"name": "m_0", "kind": "KIND_CPU", "count": instances}],
        )
        return as_served(config, ModelFacts("m", config))

    assert served(1) == served(5)
