"""Which scheduler a configuration gets."""

from __future__ import annotations

import pytest

from conch.config import pbtxt
from conch.config.signature import signature
from conch.schedulers.batching import DirectScheduler, DynamicBatcher
from conch.server.scheduling import make_scheduler
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
    with pytest.raises(Exception, match="Exceeds maximum queue size"):
        queue.add(make_request(Answers()), 0)
    assert [scheduler.take(1).batch[0] for _ in range(2)] == [first, last]
    assert [first.priority, last.priority] == [1, 2]


def test_other_models_are_batched() -> None:
    config = pbtxt.parse('name: "m" backend: "onnxruntime" max_batch_size: 8 dynamic_batching { }', "a test")
    assert type(make_scheduler(config, signature(config, 1), limit=10)) is DynamicBatcher
