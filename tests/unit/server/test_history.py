"""Rates and latencies of the last seconds, and the samples of the last hour."""

from __future__ import annotations

from math import isnan, nan

import pytest

from conch.server.overview import MOST_SERIES, SAMPLES, Meter, SampleHistory
from conch.telemetry.statistics import FINE_LATENCY_BUCKETS, FailureReason, Histogram, ModelStatistics


def statistics() -> ModelStatistics:
    return ModelStatistics("m", 1, fine_latency=Histogram(FINE_LATENCY_BUCKETS))


def serve(model: ModelStatistics, milliseconds: float, times: int = 1) -> None:
    for _ in range(times):
        model.record_success(1, 0, 0, 0, 0, int(milliseconds * 1e6))


def test_rates_cover_the_last_ten_seconds() -> None:
    model = statistics()
    meter = Meter(model)
    meter.read(0)
    serve(model, 1, times=15)
    model.record_failure(FailureReason.BACKEND, 1)
    recent = meter.read(8)
    assert (recent.rate, recent.failures) == (2.0, 1 / 8)
    meter.read(9)
    assert meter.read(19).rate == 0


def test_quantiles_are_within_eight_percent_and_forget_after_a_minute() -> None:
    model = statistics()
    meter = Meter(model)
    meter.read(0)
    serve(model, 10, times=98)
    serve(model, 500, times=2)
    recent = meter.read(2)
    assert recent.p50 == pytest.approx(10, rel=0.08)
    assert recent.p99 == pytest.approx(500, rel=0.08)
    meter.read(4)
    recent = meter.read(65)
    assert isnan(recent.p50) and isnan(recent.p99)


def test_latencies_outside_of_all_buckets_count() -> None:
    model = statistics()
    meter = Meter(model)
    meter.read(0)
    serve(model, 0.000_001)
    assert meter.read(1).p99 == pytest.approx(0.02)
    serve(model, 10_000_000, times=200)
    assert meter.read(2).p50 == pytest.approx(FINE_LATENCY_BUCKETS[-1] / 1000)


def test_requests_of_steps_have_a_rate_of_their_own() -> None:
    counts = iter([(0, 0), (30, 10)])
    meter = Meter(statistics(), lambda: next(counts))
    meter.read(0)
    recent = meter.read(10)
    assert (recent.rate, recent.step_rate, recent.step_failures) == (0, 3, 1)


def test_history_has_the_last_hour_in_order() -> None:
    history = SampleHistory(["rate", "queue"])
    for sample in range(SAMPLES + 5):
        assert history.due(sample * 10)
        history.add(sample * 10, {"a": [sample, 0]})
    series = history.series("a")
    assert series["time"] == [sample * 10 for sample in range(5, SAMPLES + 5)]
    assert series["rate"] == list(range(5, SAMPLES + 5))
    assert not history.due((SAMPLES + 4) * 10 + 5)


def test_history_of_a_version_that_was_not_loaded_has_gaps() -> None:
    history = SampleHistory(["rate"])
    history.add(0, {})
    history.add(10, {"a": [1]})
    history.add(20, {})
    assert history.series("unknown") == {}
    assert history.series("a")["time"] == [0, 10, 20]
    assert history.series("a")["rate"] == pytest.approx([nan, 1, nan], nan_ok=True)


def test_history_forgets_the_versions_that_were_seen_least_recently() -> None:
    history = SampleHistory(["rate"])
    history.add(0, {"old": [1]})
    history.add(10, {f"m{number}": [1] for number in range(MOST_SERIES)})
    assert history.series("old") == {}
    for sample in range(SAMPLES + 1):
        history.add(20 + sample * 10, {"new": [1]})
    assert history.series("m0") == {}
    assert history.series("new")
