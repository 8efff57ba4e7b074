"""The metrics page, compared with what Triton 2.51 prints."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conch.core.errors import ConchError
from conch.telemetry.exposition import Metric, MetricSample
from conch.telemetry.metrics import MetricsConfig, Registry
from conch.telemetry.statistics import FIRST_RESPONSE, LATENCIES, FailureReason, ModelStatistics, RestartReason

#: The beginning of the page of a fresh server, before any model.
EMPTY_PAGE = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
# HELP nv_inference_request_failure Number of failed inference requests, all batch sizes
# TYPE nv_inference_request_failure counter
# HELP nv_inference_count Number of inferences performed (does not include cached requests)
# TYPE nv_inference_count counter
# HELP nv_inference_exec_count Number of model executions performed (does not include cached requests)
# TYPE nv_inference_exec_count counter
# HELP nv_inference_request_duration_us Cumulative inference request duration in microseconds (includes cached requests)
# TYPE nv_inference_request_duration_us counter
# HELP nv_inference_queue_duration_us Cumulative inference queuing duration in microseconds (includes cached requests)
# TYPE nv_inference_queue_duration_us counter
# HELP nv_inference_compute_input_duration_us Cumulative compute input duration in microseconds (does not include \
cached requests)
# TYPE nv_inference_compute_input_duration_us counter
# HELP nv_inference_compute_infer_duration_us Cumulative compute inference duration in microseconds (does not include \
cached requests)
# TYPE nv_inference_compute_infer_duration_us counter
# HELP nv_inference_compute_output_duration_us Cumulative inference compute output duration in microseconds (does not \
include cached requests)
# TYPE nv_inference_compute_output_duration_us counter
# HELP nv_cache_num_hits_per_model Number of cache hits per model
# TYPE nv_cache_num_hits_per_model counter
# HELP nv_cache_hit_duration_per_model Total cache hit duration per model, in microseconds
# TYPE nv_cache_hit_duration_per_model counter
# HELP nv_cache_num_misses_per_model Number of cache misses per model
# TYPE nv_cache_num_misses_per_model counter
# HELP nv_cache_miss_duration_per_model Total cache miss (insert+lookup) duration per model, in microseconds
# TYPE nv_cache_miss_duration_per_model counter
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
# HELP nv_model_load_duration_secs Model load time in seconds
# TYPE nv_model_load_duration_secs gauge
# HELP nv_pinned_memory_pool_total_bytes Pinned memory pool total memory size, in bytes
# TYPE nv_pinned_memory_pool_total_bytes gauge
nv_pinned_memory_pool_total_bytes 0
# HELP nv_pinned_memory_pool_used_bytes Pinned memory pool used memory size, in bytes
# TYPE nv_pinned_memory_pool_used_bytes gauge
nv_pinned_memory_pool_used_bytes 0
# HELP conch_worker_restarts_total Number of workers that ended and were restarted, by reason
# TYPE conch_worker_restarts_total counter
"""


def registry(**config: Any) -> Registry:
    return Registry(MetricsConfig(**config), cpu=False, gpu=False)


def samples(registry: Registry, prefix: str) -> dict[str, str]:
    lines = registry.render().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line.startswith(prefix))


def served(registry: Registry, name: str = "m", **registration: Any) -> ModelStatistics:
    statistics = registry.statistics(name, 1)
    registry.register(statistics, **registration)
    return statistics


def test_every_family_is_listed_before_any_model() -> None:
    assert registry().render().decode() == EMPTY_PAGE


def test_counters_show_what_was_recorded() -> None:
    page = registry()
    statistics = served(page)
    statistics.record_execution(2, 2_000, 3_999, 4_000)
    statistics.record_success(2, 1_000, 2_000, 3_999, 4_000, 12_345)
    statistics.queue = [object()]
    statistics.load_ns = 1_500_000_000
    assert samples(page, "nv_inference") | samples(page, "nv_model") == {
        'nv_inference_request_success{model="m",version="1"}': "1",
        'nv_inference_request_failure{model="m",reason="REJECTED",version="1"}': "0",
        'nv_inference_request_failure{model="m",reason="CANCELED",version="1"}': "0",
        'nv_inference_request_failure{model="m",reason="BACKEND",version="1"}': "0",
        'nv_inference_request_failure{model="m",reason="OTHER",version="1"}': "0",
        'nv_inference_count{model="m",version="1"}': "2",
        'nv_inference_exec_count{model="m",version="1"}': "1",
        'nv_inference_request_duration_us{model="m",version="1"}': "12",
        'nv_inference_queue_duration_us{model="m",version="1"}': "1",
        'nv_inference_compute_input_duration_us{model="m",version="1"}': "2",
        'nv_inference_compute_infer_duration_us{model="m",version="1"}': "3",
        'nv_inference_compute_output_duration_us{model="m",version="1"}': "4",
        'nv_inference_pending_request_count{model="m",version="1"}': "1",
        'nv_model_load_duration_secs{model="m",version="1"}': "1.5",
    }


def test_failure_is_counted_under_its_reason() -> None:
    page = registry()
    served(page).record_failure(FailureReason.CANCELED, 5)
    failed = {labels: value for labels, value in samples(page, "nv_inference_request_failure").items() if value != "0"}
    assert failed == {'nv_inference_request_failure{model="m",reason="CANCELED",version="1"}': "1"}


def test_labels_are_ordered_by_name() -> None:
    page = registry()
    served(page, tags={"team": "a"}, namespace="/r")
    (label,) = samples(page, "nv_inference_count")
    assert label == 'nv_inference_count{_team="a",model="m",namespace="/r",version="1"}'


def test_only_models_with_a_response_cache_have_cache_counters() -> None:
    page = registry()
    served(page, "plain")
    served(page, "cached", cached=True).record_cache_hit(1, 7_000, 8_000)
    assert samples(page, "nv_cache") == {
        'nv_cache_num_hits_per_model{model="cached",version="1"}': "1",
        'nv_cache_hit_duration_per_model{model="cached",version="1"}': "7",
        'nv_cache_num_misses_per_model{model="cached",version="1"}': "0",
        'nv_cache_miss_duration_per_model{model="cached",version="1"}': "0",
    }


def test_unloaded_model_leaves_the_page() -> None:
    page = registry()
    statistics = served(page)
    page.unregister(statistics)
    assert page.render().decode() == EMPTY_PAGE


def test_reloaded_model_replaces_its_former_self() -> None:
    page = registry()
    before = served(page)
    before.record_success(1, 0, 0, 0, 0, 0)
    after = served(page)
    page.unregister(before)
    assert samples(page, "nv_inference_request_success") == {'nv_inference_request_success{model="m",version="1"}': "0"}
    assert after.success_count == 0


def test_counter_latencies_can_be_left_out() -> None:
    page = registry(counter_latencies=False)
    served(page).record_success(1, 0, 0, 0, 0, 0)
    assert "duration_us" not in page.render().decode()
    assert samples(page, "nv_inference_request_success") == {'nv_inference_request_success{model="m",version="1"}': "1"}


def test_summaries_show_count_sum_and_quantiles() -> None:
    page = registry(summary_latencies=True, quantiles=(0.5, 0.99))
    statistics = served(page)
    for total in (1_000, 2_000, 9_000):
        statistics.record_success(1, 0, 0, 0, 0, total)
    assert samples(page, "nv_inference_request_summary_us") == {
        'nv_inference_request_summary_us_count{model="m",version="1"}': "3",
        'nv_inference_request_summary_us_sum{model="m",version="1"}': "12",
        'nv_inference_request_summary_us{model="m",version="1",quantile="0.5"}': "2",
        'nv_inference_request_summary_us{model="m",version="1",quantile="0.99"}': "9",
    }


def test_models_with_a_response_cache_have_no_request_summary() -> None:
    page = registry(summary_latencies=True)
    served(page, cached=True).record_cache_hit(1_000, 2_000, 3_000)
    assert samples(page, "nv_inference_request_summary_us") == {}
    assert samples(page, "nv_inference_queue_summary_us_sum") == {
        'nv_inference_queue_summary_us_sum{model="m",version="1"}': "1"
    }
    assert samples(page, "nv_cache_hit_summary_per_model_sum") == {
        'nv_cache_hit_summary_per_model_sum{model="m",version="1"}': "2"
    }


def test_first_response_of_a_decoupled_model_falls_into_its_bucket() -> None:
    page = registry(histogram_latencies=True)
    statistics = page.statistics("m", 1, decoupled=True)
    page.register(statistics)
    statistics.record_first_response(250_000_000)
    name = "nv_inference_first_response_histogram_ms"
    assert samples(page, name) == {
        f'{name}_count{{model="m",version="1"}}': "1",
        f'{name}_sum{{model="m",version="1"}}': "250",
        f'{name}_bucket{{model="m",version="1",le="100"}}': "0",
        f'{name}_bucket{{model="m",version="1",le="500"}}': "1",
        f'{name}_bucket{{model="m",version="1",le="2000"}}': "1",
        f'{name}_bucket{{model="m",version="1",le="5000"}}': "1",
        f'{name}_bucket{{model="m",version="1",le="+Inf"}}': "1",
    }


def test_models_own_buckets_are_used() -> None:
    page = registry(histogram_latencies=True)
    page.register(page.statistics("m", 1, decoupled=True, buckets={FIRST_RESPONSE: [-1, 0, 1, 2.5]}))
    name = "nv_inference_first_response_histogram_ms_bucket"
    bounds = [label.split('le="')[1].rstrip('"}') for label in samples(page, name)]
    assert bounds == ["-1", "0", "1", "2.5", "+Inf"]


def test_latencies_of_every_model_are_counted_and_a_cache_hit_has_no_computation() -> None:
    page = registry(histogram_latencies=True)
    statistics = page.statistics("m", 1, buckets={name: [3] for name in LATENCIES})
    page.register(statistics)
    statistics.record_success(1, 1_000_000, 0, 2_500_000, 0, 4_000_000)
    statistics.record_cache_hit(500_000, 100_000, 1_000_000)
    labels = 'model="m",version="1"'
    for name, below, count, total in zip(LATENCIES, "121", "221", ("5", "1.5", "2.5"), strict=True):
        assert samples(page, name) == {
            f"{name}_count{{{labels}}}": count,
            f"{name}_sum{{{labels}}}": total,
            f'{name}_bucket{{{labels},le="3"}}': below,
            f'{name}_bucket{{{labels},le="+Inf"}}': count,
        }


def test_latencies_are_not_kept_unless_they_are_configured() -> None:
    page = registry()
    assert page.statistics("m", 1).latencies is None
    assert "histogram_ms" not in page.render().decode()


def test_restarts_are_shown_by_reason_before_the_first_too() -> None:
    page = registry()
    statistics = served(page)
    statistics.restarts[RestartReason.SIGKILL] += 2
    name = "conch_worker_restarts_total"
    assert samples(page, name) == {
        f'{name}{{model="m",reason="{reason}",version="1"}}': "2" if reason == "sigkill" else "0"
        for reason in ("exit", "signal", "sigkill", "killed")
    }


def test_histogram_is_for_decoupled_models_only() -> None:
    page = registry(histogram_latencies=True)
    served(page).record_first_response(1)
    assert samples(page, "nv_inference_first_response") == {}


def test_collector_adds_its_families() -> None:
    page = registry()
    page.add(lambda: [(Metric("custom", "gauge", "Mine"), [MetricSample("", 4.5)])])
    assert page.render().decode() == EMPTY_PAGE + "# HELP custom Mine\n# TYPE custom gauge\ncustom 4.5\n"


def test_page_of_a_real_machine_is_readable_by_prometheus() -> None:
    page = Registry(MetricsConfig(summary_latencies=True, histogram_latencies=True))
    page.register(page.statistics("m", 1, decoupled=True), tags={"odd": 'a"b\\c\nd'})
    families = {family.name: family for family in text_string_to_metric_families(page.render().decode())}
    assert families["nv_cpu_memory_total_bytes"].samples[0].value > 0
    assert families["nv_inference_count"].samples[0].labels == {"_odd": 'a"b\\c\nd', "model": "m", "version": "1"}


def test_configuration_from_the_option() -> None:
    config = MetricsConfig.parse(
        {
            "counter_latencies": "FALSE",
            "summary_latencies": "True",
            "summary_quantiles": "0.5:0.05,0.99:0.001",
            "unknown": "x",
        }
    )
    assert config == MetricsConfig(counter_latencies=False, summary_latencies=True, quantiles=(0.5, 0.99))


@pytest.mark.parametrize("text", ["abc", "0.5", "0.5:0.1:2", "50:0.1", ""])
def test_wrong_quantiles_are_refused(text: str) -> None:
    with pytest.raises(ConchError, match="summary_quantiles is <quantile>:<error>"):
        MetricsConfig.parse({"summary_quantiles": text})


def test_models_may_come_and_go_while_the_page_is_made() -> None:
    registry = Registry(cpu=False, gpu=False)
    for name in ("a", "b"):
        registry.register(registry.statistics(name, 1))
    lines = registry.lines()
    first = next(lines)
    registry.register(registry.statistics("c", 1))
    assert first.startswith("# HELP")
    assert "".join([first, *lines]).count('model="b"') > 5
