"""Formats the results as Markdown and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.generation.columns import Column
from benchmarks.generation.figures import Figure, median_ratio
from benchmarks.generation.questions import Question
from benchmarks.tables import markdown


def servers(columns: Sequence[Column]) -> str:
    """Return a description of each server."""
    return markdown([["column", "what it is"], *([column.name, column.about] for column in columns)])


def absolute(questions: Sequence[Question], columns: Sequence[Column]) -> str:
    """Return the medians of all servers."""
    rows = [["question", "figure", *(column.name for column in columns)]]
    for question in questions:
        for figure in question.figures:
            columns_values = [question.answers.get(column.name, {}).get(figure.name) for column in columns]
            cells = [f"{statistics.median(values):.{figure.digits}f}" if values else "" for values in columns_values]
            rows.append([question.title, figure.name, *cells])
    return "Medians of the rounds:\n\n" + markdown(rows)


def ratios(questions: Sequence[Question], columns: Sequence[Column]) -> str:
    """Return conch's figure divided by each peer's: the median of the rounds, and the smallest and largest."""
    ours = [column.name for column in columns if column.ours]
    peers = [column.name for column in columns if not column.ours]
    if not ours or not peers:
        return ""
    rows = [["question", "figure", "better", "of", *(f"/ {name}" for name in peers)]]
    for question in questions:
        for figure in question.figures:
            for name in ours:
                cells = [_ratio(question, figure, name, peer) for peer in peers]
                rows.append([question.title, figure.name, "more" if figure.more else "less", name, *cells])
    return "conch over the peer, within each round:\n\n" + markdown(rows)


def shares(question: Question, columns: Sequence[Column]) -> str:
    """Return the throughput of the server relative to the engine alone."""
    (figure,) = question.figures
    rows = [["question", "column", "served", "engine alone", "share"]]
    for column in columns:
        alone = question.answers.get(f"{column.name}, alone", {}).get(figure.name)
        served = question.answers.get(column.name, {}).get(figure.name)
        if alone and served:
            middle, low, high = median_ratio(served, alone)
            share = f"**{middle:.2f}** ({low:.2f}–{high:.2f})"
            medians = [f"{statistics.median(values):.0f}" for values in (served, alone)]
            rows.append([question.title, column.name, *medians, share])
    return "Tokens per second beside the engine alone, in one process:\n\n" + markdown(rows)


def document(questions: Sequence[Question], columns: Sequence[Column], spoilt: Sequence[str]) -> dict[str, Any]:
    """Return all results by round."""
    return {
        "columns": {column.name: column.about for column in columns},
        "spoilt": list(spoilt),
        "questions": [
            {"title": question.title, "part": question.part, "answers": question.answers} for question in questions
        ],
    }


def _ratio(question: Question, figure: Figure, ours: str, peer: str) -> str:
    mine, theirs = (question.answers.get(name, {}).get(figure.name) for name in (ours, peer))
    if not mine or not theirs:
        return ""
    middle, low, high = median_ratio(mine, theirs)
    return f"**{middle:.2f}** ({low:.2f}–{high:.2f})"
