"""The text format, as Prometheus' own parser reads it."""

from __future__ import annotations

from math import inf, nan

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conch.telemetry.exposition import Metric, MetricSample, label_text, number, page


def test_family_without_samples_is_listed() -> None:
    assert page([(Metric("a", "gauge", "Help of a"), [])]) == b"# HELP a Help of a\n# TYPE a gauge\n"


def test_counter_has_no_suffix() -> None:
    text = page([(Metric("requests", "counter", "All"), [MetricSample(label_text({"model": "m"}), 3)])]).decode()
    assert text.endswith('requests{model="m"} 3\n')


def test_label_values_survive_a_parser() -> None:
    odd = 'quote " backslash \\ line\nbreak é'
    text = page([(Metric("a", "gauge", "Help"), [MetricSample(label_text({"x": odd, "y": ""}), 1)])]).decode()
    (family,) = text_string_to_metric_families(text)
    assert family.samples[0].labels == {"x": odd, "y": ""}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2**53 + 1, "9007199254740993"),
        (2.0, "2"),
        (0.25, "0.25"),
        (nan, "NaN"),
        (inf, "+Inf"),
        (-inf, "-Inf"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text
