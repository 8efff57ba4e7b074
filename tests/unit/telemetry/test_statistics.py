"""Counting as Triton does; the layouts and counts were seen on Triton 2.51."""

from __future__ import annotations

import pytest

from conch.telemetry.statistics import MAX_RESPONSES, FailureReason, ModelStatistics


@pytest.fixture
def statistics() -> ModelStatistics:
    return ModelStatistics("m", 1, clock=lambda: 1_795_189_432_719_000_000)


def counts(statistics: ModelStatistics) -> dict[str, int]:
    return {name: leaf["count"] for name, leaf in statistics.snapshot()["inference_stats"].items() if leaf["count"]}


def test_fresh_statistics_have_every_field(statistics: ModelStatistics) -> None:
    nothing = {"count": 0, "ns": 0}
    names = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    assert statistics.snapshot() == {
        "name": "m",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": dict.fromkeys(names, nothing),
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def test_request_alone_in_its_batch(statistics: ModelStatistics) -> None:
    statistics.record_execution(3, 20, 30, 40)
    statistics.record_success(3, 10, 20, 30, 40, 105)
    snapshot = statistics.snapshot()
    assert (snapshot["inference_count"], snapshot["execution_count"]) == (3, 1)
    assert snapshot["last_inference"] == 1_795_189_432_719
    assert snapshot["inference_stats"] == {
        "success": {"count": 1, "ns": 105},
        "fail": {"count": 0, "ns": 0},
        "queue": {"count": 1, "ns": 10},
        "compute_input": {"count": 1, "ns": 20},
        "compute_infer": {"count": 1, "ns": 30},
        "compute_output": {"count": 1, "ns": 40},
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }
    assert snapshot["batch_stats"] == [
        {
            "batch_size": 3,
            "compute_input": {"count": 1, "ns": 20},
            "compute_infer": {"count": 1, "ns": 30},
            "compute_output": {"count": 1, "ns": 40},
        }
    ]


def test_three_requests_in_one_batch_are_three_successes_and_one_execution(statistics: ModelStatistics) -> None:
    statistics.record_execution(3, 1, 2, 3)
    for _ in range(3):
        statistics.record_success(1, 0, 1, 2, 3, 6)
    snapshot = statistics.snapshot()
    assert (snapshot["inference_count"], snapshot["execution_count"]) == (3, 1)
    assert counts(statistics) == {"success": 3, "queue": 3, "compute_input": 3, "compute_infer": 3, "compute_output": 3}
    assert [batch["compute_infer"] for batch in snapshot["batch_stats"]] == [{"count": 1, "ns": 2}]


def test_batch_sizes_are_listed_in_ascending_order(statistics: ModelStatistics) -> None:
    for size in (4, 1, 2, 1):
        statistics.record_execution(size, 0, 0, 0)
    batches = statistics.snapshot()["batch_stats"]
    assert [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in batches] == [(1, 2), (2, 1), (4, 1)]


def test_model_without_batch_dimension_counts_one(statistics: ModelStatistics) -> None:
    statistics.record_execution(0, 0, 0, 0)
    statistics.record_success(0, 0, 0, 0, 0, 0)
    snapshot = statistics.snapshot()
    assert snapshot["inference_count"] == 1
    assert [batch["batch_size"] for batch in snapshot["batch_stats"]] == [1]


def test_failed_execution_counts_as_execution_but_not_as_inference(statistics: ModelStatistics) -> None:
    statistics.record_execution(2, 1, 2, 3)
    statistics.record_failure(FailureReason.BACKEND, 7)
    statistics.record_failure(FailureReason.BACKEND, 8)
    snapshot = statistics.snapshot()
    assert (snapshot["inference_count"], snapshot["execution_count"]) == (0, 1)
    assert snapshot["inference_stats"]["fail"] == {"count": 2, "ns": 15}
    assert counts(statistics) == {"fail": 2}
    assert statistics.failures[FailureReason.BACKEND] == 2
    assert statistics.failures[FailureReason.REJECTED] == 0


def test_cache_hit_is_a_success_that_computed_nothing(statistics: ModelStatistics) -> None:
    statistics.record_cache_miss(50)
    statistics.record_execution(1, 1, 2, 3)
    statistics.record_success(1, 4, 1, 2, 3, 60)
    statistics.record_cache_hit(queue_ns=5, lookup_ns=20, total_ns=30)
    snapshot = statistics.snapshot()
    assert (snapshot["inference_count"], snapshot["execution_count"]) == (1, 1)
    stats = snapshot["inference_stats"]
    assert (stats["success"], stats["queue"]) == ({"count": 2, "ns": 90}, {"count": 2, "ns": 9})
    assert stats["compute_infer"] == {"count": 1, "ns": 2}
    assert (stats["cache_hit"], stats["cache_miss"]) == ({"count": 1, "ns": 20}, {"count": 1, "ns": 50})


def test_responses_are_counted_by_their_index(statistics: ModelStatistics) -> None:
    statistics.record_response(0, 10, 1)
    statistics.record_response(1, 20, 1, failed=True)
    statistics.record_empty_response(2, 5)
    statistics.record_response(0, 10, 1)
    responses = statistics.snapshot()["response_stats"]
    assert list(responses) == ["0", "1", "2"]
    assert responses["0"] == {
        "compute_infer": {"count": 2, "ns": 20},
        "compute_output": {"count": 2, "ns": 2},
        "success": {"count": 2, "ns": 22},
        "fail": {"count": 0, "ns": 0},
        "empty_response": {"count": 0, "ns": 0},
        "cancel": {"count": 0, "ns": 0},
    }
    assert responses["1"]["fail"] == {"count": 1, "ns": 21}
    assert responses["2"]["empty_response"] == {"count": 1, "ns": 5}


def test_responses_of_an_endless_stream_are_counted_in_a_bounded_number_of_rows() -> None:
    statistics = ModelStatistics("m", 1)
    for index in range(MAX_RESPONSES + 5):
        statistics.record_response(index, 1, 0)
    rows = statistics.snapshot()["response_stats"]
    assert len(rows) == MAX_RESPONSES
    assert rows[str(MAX_RESPONSES - 1)]["success"]["count"] == 6
