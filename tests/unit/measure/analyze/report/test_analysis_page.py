"""The page of an analysis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conch.measure.analyze.judging.ranking import Advice
from conch.measure.analyze.report.page import report
from conch.measure.reports.html import html
from conch.measure.reports.report import Chart, Table
from tests.unit.measure.analyze.report.analyses import analysis, nothing


def test_the_page_has_the_ranking_the_curves_and_a_section_for_each() -> None:
    made = report(analysis())
    titles = [section.title for section in made.sections]
    assert titles[:5] == [
        "Ranking", "Latency, throughput and memory", "Missing and failed measurements", "Machine and settings",
        "How to reproduce and to apply",
    ]  # fmt: skip
    assert titles[5] == "falcon7b_config_5" and "falcon7b_config_default" in titles
    [table, chart, *_] = made.sections[5].blocks
    assert isinstance(table, Table) and [row.cells[0] for row in table.rows][:2] == ["256", "128"]
    assert isinstance(chart, Chart)
    text = html(made)
    assert "CUDA out of memory &lt;4096&gt;" in text and "maximum 1.50 s" in text
    assert 'href="#falcon7b_config_5"' in text and "conch analyze apply" in text


@pytest.mark.parametrize(
    ("advice", "title"),
    [
        ("use", "A better configuration of falcon7b"),
        ("keep", "Keep the configuration of falcon7b"),
        ("unproven", "No configuration of falcon7b is proven to be better"),
        ("none", "No configuration of falcon7b satisfies the constraints"),
    ],
)
def test_the_title_says_what_was_found(advice: Advice, title: str) -> None:
    assert report(replace(analysis(), advice=advice)).title == title


def test_names_in_rows_lead_only_to_sections_that_are_there() -> None:
    made = report(analysis(many=40))
    anchors = {section.anchor for section in made.sections}
    [table] = [block for block in made.sections[0].blocks if isinstance(block, Table)]
    assert len(table.rows) == 42 and {row.target for row in table.rows} - {""} <= anchors


def test_a_run_without_a_valid_point_gives_a_partial_report() -> None:
    text = html(report(nothing()))
    assert "There is no valid measurement" in text and "port 8000 is taken" in text
    assert "vegaEmbed=" not in text
