"""The report: every variant with its figures and its verdict, in every form."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from conch.checkpoints.manifest import Latency, Manifest, Source, Variant
from conch.convert.report import table
from conch.convert.verdict import NOT_ASKED_FOR
from conch.measure.reports.terminal import show
from conch.measure.reports.text import markdown

AGREEMENT: dict[str, dict[str, Any]] = {
    "embedding": {"cosine_min": 0.98, "cosine_mean": 0.99, "max_difference": 0.1, "argmax": None},
    "neighbours": {"cosine_min": 0.975, "argmax": None, "max_difference": 0.1, "rows": 6, "samples": 24},
    "task": {"name": "order of similarities", "value": 0.99, "delta": -0.01, "low": -0.012, "high": -0.008},
}


def latencies(*medians: float) -> tuple[Latency, ...]:
    return tuple(
        Latency(
            batch, 16, median, 0.1, median - 0.5, median + 1, median, median + 0.6, median + 0.9, runs=60, spread=0.08
        )
        for batch, median in zip((1, 8), medians, strict=True)
    )


MANIFEST = Manifest(
    source=Source("org/<model>|x", "abc"),
    task="feature-extraction",
    variants=(
        Variant("torch-fp32", "torch", "fp32", "", latencies(10, 40), AGREEMENT, True),
        Variant("onnxruntime-int8", "onnxruntime", "int8", "a.onnx", latencies(2, 8), AGREEMENT, True,
                disk_bytes=22_900_000, memory_bytes=310_200_000),
        Variant("onnxruntime-int8-static", "onnxruntime", "int8", "b.onnx", latencies(1, 2), AGREEMENT, False,
                ("cosine_min 0.93 of embedding is below 0.97",)),
        Variant("tensorrt-fp16", "tensorrt", "fp16", reasons=("tensorrt is not installed: pip install tensorrt",)),
    ),
    auto="onnxruntime-int8",
    files={},
    machine={"processor": "Some CPU", "cores": 2, "load_before": 0.31, "load_during": 2.0, "others": 0.034},
    settings={"samples": 99, "data": "built-in", "threads": 2},
    versions={"torch": "2.0"},
)  # fmt: skip


def shown(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(console, *table.summary(MANIFEST))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_log_has_a_line_for_each_variant_and_shape() -> None:
    lines = list(table.log_lines(MANIFEST))

    assert len(lines) == 6
    assert lines[1] == (
        "[ONNX Runtime (int8)] 1x16: mean=2.00ms, sd=0.10ms, min=1.50ms, max=3.00ms, median=2.00ms, 95p=2.60ms, "
        "99p=2.90ms, runs=60"
    )


def test_rows_tell_latency_speed_up_agreement_and_verdict() -> None:
    shown = table.variants_table(MANIFEST, "columns")
    cells = {variant.name: shown.texts(row) for variant, row in zip(MANIFEST.variants, shown.rows, strict=True)}

    assert cells["onnxruntime-int8"] == [
        "ONNX Runtime (int8)", "2.00", "8.00", "5.00x ±4%", "22.9 MB", "310 MB",
        "embedding ≥ 0.9800; order of similarities 0.9900 (0.9880 … 0.9920)", "≥ 0.9750", "auto",
    ]  # fmt: skip
    assert cells["torch-fp32"][-1] == "passes"
    assert cells["onnxruntime-int8-static"][-1] == "refused: cosine_min 0.93 of embedding is below 0.97"
    assert cells["tensorrt-fp16"][1:] == ["–"] * 7 + ["tensorrt is not installed: pip install tensorrt"]


def test_variant_that_was_forced_says_why_it_was_refused() -> None:
    forced = replace(MANIFEST.variants[2], forced=True)

    assert table.verdict(forced, "") == "forced: cosine_min 0.93 of embedding is below 0.97"
    assert table.verdict(forced, forced.name) == "auto (forced)"


def test_reference_that_was_not_requested_is_not_called_refused() -> None:
    reference = replace(MANIFEST.variants[0], passed=False, reasons=(NOT_ASKED_FOR,))

    assert table.verdict(reference, "") == "reference"
    shown = table.variants_table(replace(MANIFEST, variants=(reference, *MANIFEST.variants[1:])))
    assert [row.tone for row in shown.rows] == ["muted", "good", "bad", "bad"]


def test_markdown_is_a_table_of_all_variants() -> None:
    text = markdown(table.short_report(MANIFEST))

    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert "Refused: onnxruntime-int8-static: cosine_min 0.93 of embedding is below 0.97." in text


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_table_fits_the_terminal(width: int) -> None:
    text = shown(width)

    assert max(map(len, text.splitlines())) <= width
    for expected in ("ONNX Runtime", "(int8)", "5.00x", "8.00", "22.9 MB", "310 MB", "Some CPU", "auto", "refused"):
        assert expected in text


def test_answers_of_few_classes_are_counted_in_a_batch() -> None:
    notation = table.EncoderNotation()

    assert notation.in_batch({"neighbours": {"cosine_min": 0.5, "argmax": 0.99}}) == "0.9900 same"
    assert notation.in_batch({"neighbours": {"cosine_min": None, "argmax": None}}) == notation.in_batch({}) == ""


def test_warnings_stand_before_the_figures() -> None:
    doubtful = replace(MANIFEST, warnings=("only 3 <samples> are compared",))

    text = markdown(table.short_report(doubtful))
    assert text.index("**Warning:** only 3 <samples>") < text.index("| ---")


def test_conditions_tell_the_machine_and_how_quiet_it_was() -> None:
    assert table.conditions(MANIFEST) == (
        "Some CPU, 2 of 2 cores; load average 0.3 before and 2.0 during; other processes used 3% of the cores; "
        "60 to 60 runs per figure, 0 of 6 figures busy"
    )
    assert "measured on: Some CPU" in markdown(table.short_report(MANIFEST))
    assert table.conditions(replace(MANIFEST, machine={})) == "cpu, 2 threads"


def test_figures_of_a_busy_machine_are_marked_up_to_the_verdict() -> None:
    fast = MANIFEST.variants[1]
    busy = replace(fast, latency=tuple(replace(one, busy=True) for one in fast.latency))
    cells = table.variants_table(replace(MANIFEST, variants=(MANIFEST.variants[0], busy)), "columns").rows[1].cells

    assert (cells[3], cells[-1]) == ("5.00x ±4% busy", "auto (busy)")
    assert "runs=60, busy" in next(table.log_lines(replace(MANIFEST, variants=(busy,))))
