"""One report, and what each renderer makes of it."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from conch.measure.reports.html import html
from conch.measure.reports.numbers import milliseconds
from conch.measure.reports.report import (
    Block,
    Bullets,
    Chart,
    CodeBlock,
    Column,
    Note,
    Paragraph,
    Properties,
    Report,
    Row,
    Section,
    Table,
    Tile,
    Tiles,
)
from conch.measure.reports.terminal import show
from conch.measure.reports.text import csv_text, json_text, markdown, markdown_table

TABLE = Table(
    "By load",
    [
        Column("model"),
        Column("speeds", narrow="stack"),
        Column("Request Concurrency", number=True, short="conc."),
        Column("p99 (ms)", number=True, format=milliseconds),
        Column("Batch size", number=True, narrow="hide"),
    ],
    [Row(["resnet|50", "fast", 8, 0.01234, 4], "good"), Row(["bert", "slow", 16, None, 2.5])],
)


def on_terminal(*parts: Report | Section | Block, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(console, *parts)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_csv_has_values_and_readers_have_formatted_cells() -> None:
    assert csv_text(TABLE) == (
        "model,speeds,Request Concurrency,p99 (ms),Batch size\nresnet|50,fast,8,0.01234,4\nbert,slow,16,,2.5\n"
    )
    assert markdown_table(TABLE).splitlines() == [
        "| model | speeds | Request Concurrency | p99 (ms) | Batch size |",
        "| --- | --- | ---: | ---: | ---: |",
        "| resnet\\|50 | fast | 8 | 12.3 | 4 |",
        "| bert | slow | 16 | – | 2.5 |",
    ]
    assert on_terminal(TABLE) == (
        "By load\n"
        "                       Request   p99  Batch\n"
        "model      speeds  Concurrency  (ms)   size\n"
        "resnet|50  fast              8  12.3      4\n"
        "bert       slow             16     –    2.5"
    )


def test_a_cell_in_markdown_is_one_line() -> None:
    assert markdown_table(Table.of(["a"], [["first\nsecond"]])) == "| a |\n| --- |\n| first second |\n"


def test_a_narrow_terminal_hides_and_stacks_columns_and_shortens_headings() -> None:
    assert on_terminal(TABLE, width=30) == (
        "By load\n"
        "model              p99\n"
        "speeds     conc.  (ms)\n"
        "resnet|50      8  12.3\n"
        "fast\n"
        "\n"
        "bert          16     –\n"
        "slow"
    )


def terminal_text(report: Report) -> str:
    return on_terminal(report, width=200)


@pytest.mark.parametrize("render", [terminal_text, markdown])
def test_every_block_is_in_every_text(render: Callable[[Report], str]) -> None:
    blocks: list[Block] = [
        Paragraph("a [bold]paragraph[/bold]"), Bullets(["a bullet"]), Note("warning", "a note"),
        Tiles([Tile("71.9 infer/s", "throughput", "default: 20")]), Properties([("cores", "2")]),
        CodeBlock("conch perf", "a command"), TABLE, Chart("a chart", {}, "It rises."),
    ]  # fmt: skip
    text = render(Report("the title", "the lead", [Section("a section", blocks)], [Note("error", "an error")]))
    for expected in ("the title", "the lead", "a section", "a [bold]paragraph[/bold]", "- a bullet", "a note",
                     "throughput: 71.9 infer/s (default: 20)", "cores", "conch perf", "a command", "By load",
                     "12.3", "a chart: It rises.", "an error"):  # fmt: skip
        assert expected in text


def test_a_table_in_html_is_formatted() -> None:
    text = html(Report("t", "l", [Section("s", [TABLE])]))
    assert '<td class="n">12.3</td>' in text and '<td class="n">–</td>' in text


def test_text_is_wrapped_below_itself_and_commands_are_not_wrapped() -> None:
    command = f"conch perf {'-m model ' * 12}-u localhost".strip()
    section = Section("Level", [Properties([("latency", "11.6 ms on average, and more words")]), CodeBlock(command)])
    assert on_terminal(Paragraph("before"), section, width=30).splitlines() == [
        "before",
        "",
        "Level",
        "  latency  11.6 ms on average,",
        "           and more words",
        f"    {command}",
    ]


def test_json_is_indented() -> None:
    assert json_text({"p99": 0.5}) == '{\n  "p99": 0.5\n}\n'
