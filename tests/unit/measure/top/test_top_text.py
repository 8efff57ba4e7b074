"""Numbers, charts, order and columns of ``conch top``."""

from __future__ import annotations

import pytest

from conch.measure.top import text
from conch.measure.top.figures import TopModel

MODELS = [
    TopModel("small", "1", "READY", rate=5.0, p99=900.0),
    TopModel("large", "1", "READY", rate=50.0, p99=20.0),
    TopModel("broken", "1", "UNAVAILABLE"),
]
BY = {column.title: column for column in text.COLUMNS}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.number(None), "·"), (text.number(0.0), "0"), (text.number(0.25), "0.25"), (text.number(3.14), "3.1"),
        (text.number(1234.0), "1,234"), (text.number(56_700.0), "56.7k"), (text.number(2.5e6), "2.5M"),
        (text.milliseconds(0.42), "0.42 ms"), (text.milliseconds(8.13), "8.1 ms"), (text.milliseconds(238.4), "238 ms"),
        (text.milliseconds(1540.0), "1.54 s"), (text.size(25 << 20), "25 MiB"), (text.size(3 << 29), "1.5 GiB"),
        (text.share(0.954), "95 %"), (text.chart([0, 1, 2, 4], 3), "▃▅█"), (text.chart([0, 0], 5), "▁▁"),
    ],
)  # fmt: skip
def test_figures_are_short(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("pattern", "title", "reverse", "names"),
    [
        ("", "Req/s", True, ["large", "small", "broken"]),
        ("", "p99", True, ["small", "large", "broken"]),
        ("", "Model", False, ["broken", "large", "small"]),
        ("READY", "Model", True, ["small", "large"]),
        ("una", "Req/s", True, ["broken"]),
        ("l ready", "Req/s", False, ["small", "large"]),
    ],
)
def test_models_are_filtered_by_name_and_state_and_sorted(
    pattern: str, title: str, reverse: bool, names: list[str]
) -> None:
    assert [model.name for model in text.arranged(MODELS, pattern, BY[title], reverse)] == names


def test_a_narrow_terminal_leaves_out_the_least_important_columns() -> None:
    assert text.fitting(MODELS, 200) == list(text.COLUMNS)
    narrow = [column.title for column in text.fitting(MODELS, 70)]
    assert narrow[0] == "Model" and {"State", "Req/s", "p99"} <= set(narrow) and "Version" not in narrow
    assert [column.title for column in text.fitting(MODELS, 1)] == ["Model", "Req/s"]


def test_every_part_of_a_bar_is_visible_and_the_bar_is_as_wide_as_asked() -> None:
    assert text.bar([0.01, 50.0, 0.0, 50.0], 20) == [1, 9, 0, 10]
    assert sum(text.bar([1.0, 1.0, 1.0], 10)) == 10
    assert text.bar([0.0, 0.0], 10) == [0, 0]
