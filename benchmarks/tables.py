"""The results of the comparison of text models, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.columns import Column
from benchmarks.offline import Offline
from benchmarks.questions import FULL, Question
from conch.measure.reports.report import Table
from conch.measure.reports.text import markdown_table


def absolute(questions: Sequence[Question], columns: Sequence[Column]) -> str:
    """Return the medians of all servers."""
    rows = [["question", "figure", *(column.name for column in columns)]]
    for question in questions:
        figures = [question.figures.get(column.name) for column in columns]
        rows.append(
            [
                question.title,
                question.unit,
                *(f"{statistics.median(figure):.0f}" if figure else "" for figure in figures),
            ]
        )
    return markdown(rows)


def ratios(questions: Sequence[Question], columns: Sequence[Column]) -> str:
    """Return conch's figure divided by each peer's: the median of the rounds, and the smallest and largest."""
    ours = [column for column in columns if column.ours]
    others = [column for column in columns if not column.ours and not column.padded]
    has_padded = any(column.padded for column in columns)
    if not others and not has_padded:
        return ""
    rows = [["question", "figure", "conch", *(f"/ {column.name}" for column in others)]]
    if has_padded:
        rows[0].append("/ padding, same engine")
    for question in questions:
        for column in ours:
            variant = column.target.model
            peers = [other.name for other in others] + ([f"padding {variant}"] if has_padded else [])
            cells = [_ratio(question, column.name, peer) for peer in peers]
            rows.append([question.title, question.figure, variant, *cells])
    return "conch's figure over the peer's; for latency less is better, for throughput more:\n\n" + markdown(rows)


def share_of_offline(questions: Sequence[Question], columns: Sequence[Column], measured: Mapping[str, Offline]) -> str:
    """Return the share of the engine's own throughput that the server reaches at full load."""
    rows = [["workload", "conch", f"served, concurrency {FULL}", "engine alone", "share",
             "with tokenising and pooling", "share"]]  # fmt: skip
    for question in questions:
        if question.concurrency != FULL or question.by_perf_analyzer:
            continue
        for column in columns:
            if column.ours:
                offline = measured[column.target.model]
                name = "mixed" if question.workload == "mixed" else "uniform"
                served = statistics.median(question.figures[column.name])
                engine, everything = offline.engine[name], offline.everything[name]
                rows.append([
                    question.workload, column.target.model, f"{served:.0f}",
                    f"{engine:.0f}", f"**{served / engine:.2f}**",
                    f"{everything:.0f}", f"**{served / everything:.2f}**",
                ])  # fmt: skip
    return "Texts per second beside the engine offline, in ideal batches:\n\n" + markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first of ``rows`` is its header."""
    return markdown_table(Table.of(rows[0], rows[1:]))


def _ratio(question: Question, ours: str, peer: str) -> str:
    theirs = question.figures.get(peer)
    if not theirs:
        return ""
    quotients = [own / other for own, other in zip(question.figures[ours], theirs, strict=True)]
    return f"**{statistics.median(quotients):.2f}** ({min(quotients):.2f}–{max(quotients):.2f})"
