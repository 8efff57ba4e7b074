"""Metrics that models make: who shares them, how long they are there, and how the page shows them."""

from __future__ import annotations

import pytest

from conch.core.errors import ConchError
from conch.telemetry.custom import CustomMetrics, MetricsHolder
from conch.telemetry.exposition import Metric, MetricSample, page


def make(types: dict[str, str] | None = None) -> tuple[CustomMetrics, MetricsHolder, MetricsHolder]:
    metrics = CustomMetrics(types or {})
    return metrics, metrics.holder(), metrics.holder()


def shown(metrics: CustomMetrics) -> str:
    return page(metrics.joined(iter(()))).decode()


def test_series_of_the_same_labels_is_shared_in_any_order_of_the_labels() -> None:
    metrics, one, other = make()
    one.add_family(1, "toys", "Counts toys", "COUNTER")
    one.add_series(2, 1, {"b": "2", "a": "1"}, ())
    other.add_family(1, "toys", "said otherwise", "COUNTER")
    other.add_series(2, 1, {"a": "1", "b": "2"}, ())
    one.change(2, False, 2.5, ())
    other.change(2, False, 1, ())
    assert one.value(2) == other.value(2) == 3.5
    assert shown(metrics) == '# HELP toys Counts toys\n# TYPE toys counter\ntoys{a="1",b="2"} 3.5\n'


def test_series_is_there_as_long_as_anybody_holds_it() -> None:
    metrics, one, other = make()
    for holder in (one, other):
        holder.add_family(1, "queue", "Waiting", "GAUGE")
        holder.add_series(2, 1, {}, ())
    one.add_series(3, 1, {"only": "one"}, ())
    one.change(2, True, 7, ())
    one.close()
    assert shown(metrics).endswith("gauge\nqueue 7\n")
    other.drop_series(2)
    assert shown(metrics) == ""
    other.close()
    other.add_family(4, "queue", "Waiting, counted", "COUNTER")  # nothing of the gauge is left


def test_family_takes_its_series_along_and_what_still_changes_them_is_passed_over() -> None:
    metrics, one, _ = make()
    one.add_family(1, "queue", "Waiting", "GAUGE")
    one.add_series(2, 1, {}, ())
    one.drop_family(1)
    one.change(2, True, 7, ())
    one.drop_series(2)
    assert shown(metrics) == ""


def test_histogram_adds_up_what_workers_counted() -> None:
    metrics, one, other = make()
    for holder in (one, other):
        holder.add_family(1, "size", "Sizes", "HISTOGRAM")
        holder.add_series(2, 1, {"k": "a"}, (1, 2.5))
    one.change(2, False, 10, [(0, 1), (2, 1)])
    other.change(2, False, 2, [(1, 1)])
    assert shown(metrics).splitlines()[2:] == [
        'size_count{k="a"} 3',
        'size_sum{k="a"} 12',
        'size_bucket{k="a",le="1"} 1',
        'size_bucket{k="a",le="2.5"} 2',
        'size_bucket{k="a",le="+Inf"} 3',
    ]


def test_what_a_model_adds_to_a_family_of_the_server_is_under_one_head() -> None:
    metrics, one, _ = make({"vllm:waiting": "gauge"})
    one.add_family(1, "vllm:waiting", "as vLLM says", "GAUGE")
    one.add_series(2, 1, {"model": "m"}, ())
    own = [(Metric("vllm:waiting", "gauge", "as conch says"), [MetricSample('{model="own"}', 1)])]
    assert page(metrics.joined(iter(own))).decode() == (
        '# HELP vllm:waiting as conch says\n# TYPE vllm:waiting gauge\nvllm:waiting{model="own"} 1\n'
        'vllm:waiting{model="m"} 0\n'
    )


def test_description_of_two_lines_stays_on_one() -> None:
    metrics, one, _ = make()
    one.add_family(1, "toys", "one\\\ntwo", "COUNTER")
    one.add_series(2, 1, {}, ())
    assert shown(metrics).startswith("# HELP toys one\\\\\\ntwo\n# TYPE")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("two words", "COUNTER", "Invalid metric name"),
        ("", "COUNTER", "Invalid metric name"),
        ("toys", "GAUGE", "Family name already exists with different type"),
        ("vllm:waiting", "COUNTER", "Family name already exists with different type"),
        ("nv_mine", "COUNTER", "Family name 'nv_mine' begins with 'nv_', which is reserved for metrics of the server"),
    ],
)
def test_family_that_cannot_be_is_refused(name: str, kind: str, message: str) -> None:
    _, one, _ = make({"vllm:waiting": "gauge"})
    one.add_family(1, "toys", "Counts toys", "COUNTER")
    with pytest.raises(ConchError) as refused:
        one.add_family(2, name, "", kind)  # type: ignore[arg-type]
    assert refused.value.message == message


@pytest.mark.parametrize("label", ["a-b", "__name", "le", ""])
def test_label_that_cannot_be_is_refused(label: str) -> None:
    metrics, one, _ = make()
    one.add_family(1, "size", "Sizes", "HISTOGRAM")
    with pytest.raises(ConchError, match=r"^Invalid label name$"):
        one.add_series(2, 1, {label: "x"}, (1,))
    assert shown(metrics) == ""


def test_histogram_keeps_the_buckets_of_its_first_holder() -> None:
    metrics, one, other = make()
    for holder in (one, other):
        holder.add_family(1, "sizes", "Sizes", "HISTOGRAM")
    assert one.add_series(2, 1, {}, (1.0, 2.0)) == (1.0, 2.0)
    assert other.add_series(2, 1, {}, (1.0, 2.0, 3.0, 4.0)) == (1.0, 2.0)
    other.change(2, False, 9.0, [(2, 1)])
    assert 'sizes_bucket{le="2"} 0\nsizes_bucket{le="+Inf"} 1\n' in shown(metrics)
