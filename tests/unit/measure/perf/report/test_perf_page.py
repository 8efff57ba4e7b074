"""The report of a measurement: warnings first, charts of what was measured, the command."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from conch.cli import main
from conch.machine.facts import MachineFacts
from conch.machine.processes import Interference
from conch.measure.perf.figures import GenerationFigures, LatencyFigures
from conch.measure.perf.measured import LevelDistributions, MachineFigures
from conch.measure.perf.report.page import report
from conch.measure.perf.report.terminal import level_section
from conch.measure.perf.server.resources import GpuFigures, ResourceFigures
from conch.measure.reports.html import html
from conch.measure.reports.report import Chart, Note, Report, Table, Tiles
from tests.unit.measure.perf.known_server import KnownServer, running
from tests.unit.measure.perf.report.test_perf_files import PLAN, latency, level


def test_a_run_is_reported_with_its_command(tmp_path: Path) -> None:
    page, lines = tmp_path / "report.html", tmp_path / "requests.jsonl"
    with running(KnownServer(service=0.002, fails=7)) as server:
        given = ["-m", "known", "-u", f"127.0.0.1:{server.port}", "-p", "200", "--warm-up", "0.1", "-s", "900"]
        main(["perf", *given, "--concurrency-range", "1:2", "--html", str(page), "--jsonl", str(lines)])
    text = page.read_text()
    for title in ("Latency against throughput", "Distribution of latency", "Average time of a request by stage",
                  "Throughput by window", "Errors", "How to reproduce"):  # fmt: skip
        assert title in text
    assert "requests failed and are excluded from the latencies" in text and "it is the turn of an error" in text
    written = lines.read_text().splitlines()
    assert any('"outcome":"refused"' in line for line in written) and any('"concurrency":2' in line for line in written)


def test_warnings_come_before_figures_and_nothing_is_no_silent_zero() -> None:
    none = replace(level(), figures=replace(level().figures, requests=0, throughput=0.0, latency=None), windows=())
    made = report(PLAN, "server at x", "conch perf -m m", [none], [LevelDistributions()])
    assert isinstance(made.opening[0], Note) and made.opening[0].kind == "error"
    assert "no request completed" in made.opening[0].text
    assert made.lead == "m answered no request."
    assert "conch perf -m m" in html(made)


def test_text_and_gpus_have_sections_where_they_are_known() -> None:
    tokens = GenerationFigures(100, 640.0, 42.0, latency(0.2), latency(0.02), 3.5)
    used = ResourceFigures(1.5, 10**9, {"GPU-1": GpuFigures(0.9, 46 * 10**9, 210.0)})
    one = replace(level(), generation=tokens, resources=used)
    spread = LevelDistributions([(0.5, 0.1), (0.9, 0.2)], [(0.5, 0.1), (0.9, 0.2)], [(0.5, 0.01), (0.9, 0.02)])
    made = report(PLAN, "server", "conch", [one, one], [spread, spread])
    sections = {section.title: section.blocks for section in made.sections}
    titles = [block.title for block in sections["Tokens"] if isinstance(block, Chart)]
    assert titles == ["Time to the first token", "Time between tokens"]
    [table] = [block for block in sections["Server resources"] if isinstance(block, Table)]
    assert table.texts(table.rows[0]) == ["1", "1.50", "1,000", "90 %", "46,000", "210"]
    assert "Errors" not in sections


def _captions(made: Report) -> str:
    return " ".join(block.caption for section in made.sections for block in section.blocks if isinstance(block, Chart))


def test_figures_that_others_disturbed_are_no_headline() -> None:
    seen = MachineFigures(MachineFacts.read(), 1.0, 3.0, Interference(0.8))
    disturbed = replace(level(2), disturbed=True, machine=seen)
    made = report(PLAN, "server", "conch", [level(1), disturbed], [LevelDistributions()] * 2)
    alone = report(PLAN, "server", "conch", [disturbed], [LevelDistributions()])
    quiet = report(PLAN, "server", "conch", [level(1)], [LevelDistributions()])

    assert "undisturbed windows" in _captions(quiet) and "Grey" not in quiet.lead + _captions(quiet)
    assert "Disturbed windows count at concurrency 2." in _captions(made)
    assert "undisturbed windows" not in _captions(made) + _captions(alone)
    assert alone.lead == (
        "The speed of m is not known: other processes used the machine during the whole measurement. Repeat it on an"
        " idle machine."
    )
    [tiles] = [block.items for block in alone.opening if isinstance(block, Tiles)]
    assert {tile.tone for tile in tiles} == {"muted"} and all("disturbed" in tile.detail for tile in tiles)
    [table] = [block for block in made.sections[0].blocks if isinstance(block, Table)]
    assert [row.tone for row in table.rows] == ["", "muted"]


def test_disturbed_levels_are_grey_and_do_not_count() -> None:
    """Although their throughput is the highest."""
    best = level(4)
    fastest = replace(level(8), disturbed=True, figures=replace(best.figures, throughput=999.0))
    spread = LevelDistributions([(0.5, 0.1), (0.9, 0.2)], (), ())
    made = report(PLAN, "server", "conch", [best, fastest], [spread, spread])
    assert made.lead.startswith(
        "m answers up to 200 requests per second for 4 clients at once: half of the answers take"
    )
    assert made.lead.endswith("Grey levels were disturbed by other processes and do not count.")
    [tiles] = [block.items for block in made.opening if isinstance(block, Tiles)]
    assert tiles[0].value == "200 infer/s" and {tile.tone for tile in tiles} == {""}
    charts = {block.title: block for section in made.sections for block in section.blocks if isinstance(block, Chart)}
    rows = charts["Latency against throughput"].spec["data"]["values"]
    assert {row["label"]: row.get("muted", False) for row in rows} == {"4": False, "8": True}
    assert "200 infer/s" in charts["Latency against throughput"].alt
    assert "concurrency 8, disturbed" in str(charts["Distribution of latency"].spec)


def test_failures_are_in_the_first_sentence() -> None:
    lead = report(PLAN, "server", "conch", [level(errors={"refused": 1000})], [LevelDistributions()]).lead
    assert "50 % of the requests failed." in lead


def test_the_terminal_marks_them() -> None:
    assert level_section(PLAN, level()).title == "concurrency 1: 200.0 infer/s, 1000 requests"
    shown = level_section(PLAN, replace(level(2), disturbed=True))
    assert shown.title == "concurrency 2: 200.0 infer/s, 1000 requests, disturbed"


def test_many_levels_leave_charts_readable() -> None:
    levels = [level(number) for number in range(1, 41)]
    spread = LevelDistributions([(0.0, 0.1), (0.9, 0.2)], (), ())
    made = report(PLAN, "server", "conch", levels, [spread] * 40)
    [chart] = next(section.blocks for section in made.sections if section.title == "Latency")
    assert isinstance(chart, Chart)
    names = chart.spec["layer"][0]["encoding"]["color"]["scale"]["domain"]
    assert len(names) == 6 and names[0] == "concurrency 1" and names[-1] == "concurrency 40"


@pytest.mark.parametrize("latest", [None, LatencyFigures(0.1, 0, {50: 0.1, 90: 0.1, 95: 0.1, 99: 0.1}, 0.1)])
def test_a_level_without_answers_is_a_row_beside_others(latest: LatencyFigures | None) -> None:
    other = replace(level(2), figures=replace(level().figures, latency=latest, requests=5 if latest else 0))
    made = report(PLAN, "server", "conch", [level(1), other], [LevelDistributions()] * 2)
    table = made.sections[0].blocks[0]
    assert isinstance(table, Table) and [row.cells[0] for row in table.rows] == ["1", "2"]
    assert (table.rows[1].tone == "bad") == (latest is None)


def test_a_comparison_is_reported_with_its_ratios(tmp_path: Path) -> None:
    report = tmp_path / "against.html"
    with running(KnownServer(service=0.001)) as a, running(KnownServer(service=0.003)) as b:
        given = ["-m", "known", "-u", f"127.0.0.1:{a.port}", "--against", f"127.0.0.1:{b.port}"]
        given += ["--warm-up", "0.05", "--rounds", "2", "--concurrency-range", "1:2", "--html", str(report)]
        for window in ("100", "1000", "5000"):  # a busy machine may complete no request in a short one
            main(["perf", *given, "-p", window])
            if "B over A" in (text := report.read_text()):
                break
    assert "B over A" in text
    assert re.search(r"At concurrency 1: (B has|no significant difference|other processes used the machine)", text)
    assert f"127.0.0.1:{b.port}" in text and "p99 (ms)" in text
