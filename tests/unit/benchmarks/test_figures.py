"""What the benchmark of text generation makes of moments."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.generation.answer import Record
from benchmarks.generation.client import Target
from benchmarks.generation.columns import Column
from benchmarks.generation.figures import (
    THROUGHPUT,
    first_tokens,
    gaps,
    latencies,
    median_ratio,
    percentile,
    throughput,
)
from benchmarks.generation.questions import Question
from benchmarks.generation.tables import absolute, ratios, shares
from benchmarks.generation.trace import Load

MS = 10**6


def record(due: int, *times: int, **fields: Any) -> Record:
    return Record(due * MS, times[-1] * MS, len(times), times=[at * MS for at in times], **fields)


def test_throughput_counts_from_the_first_request_to_the_last_answer() -> None:
    assert throughput([record(0, 100, 200), record(100, 300, 400, 500)]) == pytest.approx(10)


def test_waiting_counts_from_when_a_request_was_due() -> None:
    records = [record(50, 100, 250)]
    assert first_tokens(records) == [50]
    assert latencies(records) == [0.2]


def test_gaps_are_those_of_the_closed_loop() -> None:
    assert gaps([record(0, 10, 30, 35), record(0, 10, 500, arrival=True)]) == [20, 5]


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2.5), (1.0, 4), (0.9, 3.7)])
def test_a_percentile_lies_between_its_neighbours(share: float, value: float) -> None:
    assert percentile([4, 1, 3, 2], share) == pytest.approx(value)


def test_ratios_are_those_within_a_round() -> None:
    assert median_ratio([10, 20, 30], [10, 10, 10]) == (2, 1, 3)


def test_tables_leave_out_what_was_not_asked() -> None:
    columns = [
        Column("conch gguf", "", Target("", "conch", "m"), 0, ours=True),
        Column("triton", "", Target("", "triton", "m"), 0),
        Column("other", "", Target("", "llama", "m"), 0),
    ]
    question = Question("64 tokens", "throughput", lambda _: Load(), (THROUGHPUT,))
    for served, theirs, alone in ((90, 45, 100), (80, 20, 100), (100, 50, 100)):
        question.keep("conch gguf", {"tokens/s": served})
        question.keep("triton", {"tokens/s": theirs})
        question.keep("conch gguf, alone", {"tokens/s": alone})
    assert "| 64 tokens | tokens/s | 90 | 45 |  |" in absolute([question], columns)
    assert "| 64 tokens | tokens/s | more | conch gguf | **2.00** (2.00–4.00) |  |" in ratios([question], columns)
    assert "| 64 tokens | conch gguf | 90 | 100 | **0.90** (0.80–1.00) |" in shares(question, columns)
