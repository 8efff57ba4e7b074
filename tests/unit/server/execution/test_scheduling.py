"""Which scheduler a configuration gets."""

from __future__ import annotations

import pytest

from conch.config import pbtxt
from conch.config.signature import signature
from conch.core.errors import ConchError
from conch.server.execution.scheduling import DELAY_SCHEDULER, make_scheduler
from conch.server.schedulers.batching import DirectScheduler, DynamicBatcher, HeldScheduler
from tests.unit.server.fakes import Answers, make_request

TEXT_MODEL = 'backend: "huggingface" parameters { key: "task" value { string_value: "text-generation" } }'
QUEUES = """dynamic_batching {
  priority_levels: 2 default_priority_level: 2 default_queue_policy { max_queue_size: 1 }
}"""


def test_models_that_generate_take_requests_one_by_one_under_the_policies_of_their_queue() -> None:
    config = pbtxt.parse(f"name: 'm' {TEXT_MODEL} {QUEUES}", "a test")
    scheduler = make_scheduler(config, signature(config, 1), limit=10)
    assert type(scheduler) is DirectScheduler
    queue = scheduler.queue
    last, first = make_request(Answers()), make_request(Answers())
    first.priority = 1
    queue.add(last, 0)
    queue.add(first, 0)
    with pytest.raises(ConchError, match="Exceeds maximum queue size"):
        queue.add(make_request(Answers()), 0)
    assert [scheduler.take(1).batch[0] for _ in range(2)] == [first, last]
    assert [first.priority, last.priority] == [1, 2]


def test_other_models_are_batched() -> None:
    config = pbtxt.parse('name: "m" backend: "onnxruntime" max_batch_size: 8 dynamic_batching { }', "a test")
    assert type(make_scheduler(config, signature(config, 1), limit=10)) is DynamicBatcher


@pytest.mark.parametrize(
    ("value", "kind"), [("3", HeldScheduler), ("0", DynamicBatcher), ("", DynamicBatcher), ("many", DynamicBatcher)]
)
def test_environment_holds_the_first_requests_of_models_that_batch(
    monkeypatch: pytest.MonkeyPatch, value: str, kind: type
) -> None:
    monkeypatch.setenv(DELAY_SCHEDULER, value)
    config = pbtxt.parse('name: "m" backend: "python" max_batch_size: 8 dynamic_batching { }', "a test")
    assert type(make_scheduler(config, signature(config, 1), limit=10)) is kind


def test_models_without_a_batcher_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DELAY_SCHEDULER, "3")
    config = pbtxt.parse('name: "m" backend: "python" max_batch_size: 8', "a test")
    assert type(make_scheduler(config, signature(config, 1), limit=10)) is DirectScheduler
