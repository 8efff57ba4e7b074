"""What models that write text have done: counted per worker and over a version's life, under vLLM's names."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from conch.telemetry.metrics import MetricsConfig, Registry
from conch.telemetry.statistics import ModelStatistics


def load(**values: Any) -> dict[str, Any]:
    """What a worker says of a step; nothing has happened unless ``values`` say so."""
    nothing = {
        "prompt": 0,
        "generated": 0,
        "preempted": 0,
        "queries": 0,
        "hits": 0,
        "first": [],
        "gaps": [],
        "ended": [],
    }
    return {"running": 0, "waiting": 0, "used": 0, "capacity": 0, "bytes": 0, **nothing, **values}


def test_nothing_is_shown_of_models_that_do_not_generate() -> None:
    statistics = ModelStatistics("m", 1)
    statistics.record_generation(7, {})
    assert "generation" not in statistics.snapshot()


def test_workers_are_added_up_and_forgotten_when_they_are_gone() -> None:
    statistics = ModelStatistics("m", 1)
    statistics.record_generation(1, load(running=3, used=30, capacity=100, generated=3))
    statistics.record_generation(2, load(running=1, waiting=2, used=10, bytes=100, capacity=100, generated=1))
    statistics.record_generation(1, load(running=2, used=20, bytes=200, capacity=100, generated=2))
    now = statistics.snapshot()["generation"]
    assert (now["running"], now["waiting"], now["kv_cache_tokens"], now["kv_cache_usage"]) == (3, 2, 30, 0.15)
    assert now["generation_tokens"] == 6
    assert statistics.generation is not None and statistics.generation.cache_bytes == 300
    statistics.record_generation(1, {})
    now = statistics.snapshot()["generation"]
    assert (now["running"], now["kv_cache_usage"], now["generation_tokens"]) == (1, 0.1, 6)


def test_the_metrics_page_has_vllms_names() -> None:
    registry = Registry(MetricsConfig(), cpu=False, gpu=False)
    statistics = registry.statistics("m", 1)
    registry.register(statistics)
    statistics.record_generation(
        1,
        load(
            running=1,
            capacity=64,
            used=16,
            prompt=12,
            generated=3,
            first=[0.03],
            gaps=[(0.02, 5)],
            ended=[(["stop", "length"], 0.5, 0.1, 0.2, 0.2, 12, 30, 64)],
        ),
    )
    samples = {
        (sample.name, sample.labels.get("le") or sample.labels.get("finished_reason", "")): sample.value
        for family in text_string_to_metric_families(registry.render().decode())
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }
    assert samples["vllm:num_requests_running", ""] == 1
    assert samples["vllm:kv_cache_usage_perc", ""] == 0.25
    assert samples["vllm:generation_tokens_total", ""] == 3
    assert samples["vllm:request_success_total", "stop"] == 1
    assert samples["vllm:request_success_total", "abort"] == 0
    assert samples["vllm:time_to_first_token_seconds_bucket", "0.02"] == 0
    assert samples["vllm:time_to_first_token_seconds_bucket", "0.04"] == 1
    assert samples["vllm:inter_token_latency_seconds_count", ""] == 5
    assert samples["vllm:inter_token_latency_seconds_sum", ""] == 0.1
    assert samples["vllm:request_params_n_sum", ""] == 2
