"""Options in words, as reports show them."""

from __future__ import annotations

import pytest

from conch.measure.analyze.options.reading import read_settings


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"constraints": ["p99<100ms", "memory<4GB"]}, "p99 latency at most 100 ms, memory at most 4,000 MB"),
        ({"objectives": ["throughput", "latency:p99=2"]}, "throughput, latency_p99 (weight 2)"),
        ({"latency_budget": "100"}, "100 ms"),
        ({"price": "core=0.04,gpu=2"}, "0.04 a core, 2 a GPU an hour"),
        ({"perf_analyzer_flags": {"shape": ["x:3", "y:4"], "p": 300}}, "shape=x:3, y:4, p=300"),
        ({"bls_composing_models": "a,b"}, "a, b"),
        ({"concurrency": "1,8"}, "1, 8"),
        ({"request_rate": "16.5"}, "16.5"),
        ({"cpu_only": "true"}, "yes"),
        ({"export_path": "there"}, "there"),
    ],
)
def test_values_are_written_as_people_write_them(given: dict[str, object], shown: str) -> None:
    [(name, value)] = read_settings(given).settings.changed_options()
    assert (name, value) == (next(iter(given)), shown)


def test_no_option_shows_what_only_python_writes() -> None:
    given = {
        "constraints": ["p99<100ms"], "objectives": ["cost"], "price": "3", "cpu_only": "true", "sweep": "batch",
        "profile_models": {"a": {"weighting": 2}}, "bls_composing_models": {"b": None},
        "triton_server_flags": {"log-verbose": 1}, "perf_analyzer_flags": {"shape": ["x:3"]},
    }  # fmt: skip
    shown = [value for _, value in read_settings(given).settings.changed_options()]
    assert not [value for value in shown if any(mark in value for mark in ("(metric", "{", "[", "'", "None", "Price"))]
