"""Figures of ``conch top`` from metrics pages: totals, rates, percentiles and what a server lacks."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from conch.measure.top.counts import read_counts
from conch.measure.top.figures import ServerHistory, TopServer, quantile
from conch.telemetry.metrics import MetricsConfig, Registry
from conch.telemetry.statistics import FailureReason, RestartReason

MILLISECOND = 1_000_000


def registry(**config: Any) -> Registry:
    return Registry(MetricsConfig(**config), gpu=False, cpu=False)


def figures(history: ServerHistory, now: float, registry: Registry, *index: dict[str, str]) -> TopServer:
    return history.add(now, read_counts(registry.render().decode()), index, {"m": 2})


def test_rates_percentiles_and_means_are_those_of_the_window() -> None:
    page = registry(histogram_latencies=True)
    statistics = page.statistics("m", 1)
    page.register(statistics)
    history = ServerHistory()
    statistics.record_success(1, 0, 0, 900 * MILLISECOND, 0, 900 * MILLISECOND)  # before the window
    figures(history, 100.0, page)
    for _ in range(20):
        statistics.record_success(2, 3 * MILLISECOND, MILLISECOND, 4 * MILLISECOND, 0, 8 * MILLISECOND)
        statistics.record_execution(2, 0, 0, 0)
    statistics.record_failure(FailureReason.BACKEND, 5)
    statistics.restarts[RestartReason.SIGKILL] += 1
    server = figures(history, 110.0, page, {"name": "m", "version": "1", "state": "READY"}, {"name": "other"})
    model, other = server.models
    assert (model.name, model.version, model.state, model.instances) == ("m", "1", "READY", 2)
    assert (model.rate, model.failing, model.mean, model.batch) == (2.0, 0.1, 8.0, 2.0)
    assert (model.median, model.p99) == (7.5, 9.95)  # the bucket from 5 to 10 ms
    assert model.parts == {"queue": 3.0, "compute_input": 1.0, "compute_infer": 4.0, "compute_output": 0.0}
    assert (model.restarts, dict(model.restarts_by_reason)["sigkill"], model.failures["BACKEND"]) == (1, 1, 1)
    assert (other.name, other.state, other.rate, other.loaded) == ("other", "UNLOADED", None, False)
    assert (server.rate, server.failing, server.ready) == (2.0, 0.1, 1)


def test_a_model_that_is_loaded_again_begins_anew() -> None:
    history = ServerHistory()
    for successes, now in ((10, 0.0), (30, 1.0), (2, 2.0), (6, 3.0)):
        page = registry()
        statistics = page.statistics("m", 1)
        page.register(statistics)
        for _ in range(successes):
            statistics.record_success(1, 0, 0, 0, 0, MILLISECOND)
        model = figures(history, now, page).models[0]
        assert model.rate == {0.0: None, 1.0: 20.0, 2.0: None, 3.0: 4.0}[now]
    assert list(model.history) == [20.0, 4.0]


def test_triton_has_quantiles_of_its_summary_and_no_memory_or_restarts() -> None:
    page = (
        'nv_inference_request_success{model="a \\"b\\"",version="1"} %d\n'
        'nv_inference_request_summary_us{model="a \\"b\\"",version="1",quantile="0.5"} 1500\n'
        'nv_inference_request_summary_us{model="a \\"b\\"",version="1",quantile="0.99"} 9000\n'
        "nv_cpu_utilization 0.25\n"
    )
    history = ServerHistory()
    history.add(0.0, read_counts(page % 1), (), {})
    server = history.add(1.0, read_counts(page % 3), (), {})
    (model,) = server.models
    assert (model.name, model.rate, model.median, model.p99) == ('a "b"', 2.0, 1.5, 9.0)
    assert (model.memory, model.restarts, model.instances, server.cpu) == (None, None, None, 0.25)
    assert model.state == "READY" and not read_counts(page % 1).conch


def test_utilization_of_several_gpus_is_their_mean() -> None:
    page = 'nv_gpu_utilization{gpu_uuid="a"} 0.9\nnv_gpu_utilization{gpu_uuid="b"} 0.5\n'
    assert ServerHistory().add(0.0, read_counts(page), (), {}).gpu == pytest.approx(0.7)


def test_memory_of_parts_counts_once_and_a_loaded_model_that_cannot_run_is_not_ready() -> None:
    page = (
        '# TYPE conch_model_ready gauge\nconch_model_ready{model="m",version="1"} 0\n'
        'conch_model_memory_bytes{model="m",version="1",kind="workers"} 100\n'
        'conch_model_memory_bytes{model="m",version="1",kind="gpu"} 10\n'
        'conch_model_memory_bytes{model="m",version="1",kind="weights"} 90\n'
        'vllm:num_requests_waiting{model="m",version="1",model_name="m"} 4\n'
    )
    counts = read_counts(page)
    (model,) = ServerHistory().add(0.0, counts, [{"name": "m", "version": "1", "state": "READY"}], {}).models
    assert (model.memory, model.state, model.waiting, counts.conch) == (110, "NOT READY", 4, True)


@pytest.mark.parametrize(
    ("rank", "buckets", "value"),
    [
        (0.5, {10.0: 10.0, inf: 10.0}, 5.0),
        (0.5, {10.0: 0.0, 20.0: 10.0, inf: 10.0}, 15.0),
        (0.99, {10.0: 5.0, inf: 10.0}, 10.0),
        (0.5, {10.0: 0.0, inf: 0.0}, None),
        (0.5, {}, None),
    ],
)
def test_quantiles_are_interpolated_as_in_prometheus(
    rank: float, buckets: dict[float, float], value: float | None
) -> None:
    assert quantile(rank, buckets) == value
