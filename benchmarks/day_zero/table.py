"""The page of the comparison: a line for each task, then the architectures that are not exact, with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from benchmarks.day_zero.checkpoints import Architecture
from benchmarks.day_zero.outcome import Outcome
from benchmarks.tables import markdown


@dataclass(frozen=True, slots=True)
class Row:
    """An architecture and its result."""

    architecture: Architecture
    outcome: Outcome


def page(rows: Sequence[Row]) -> str:
    """Return the page in Markdown."""
    tasks = list(dict.fromkeys(row.architecture.task for row in rows))
    compared = [row for row in rows if row.outcome.verdict != "none"]
    sections = [
        "# Day zero: every architecture of transformers\n",
        f"Made with transformers {version('transformers')} and PyTorch {version('torch').partition('+')[0]} by\n\n"
        "<!-- not run: takes a quarter of an hour; tests/e2e/test_benchmarks.py starts it -->\n"
        "    python -m benchmarks.day_zero --write docs/day_zero.md\n",
        "For each architecture, a tiny checkpoint with random weights is written and served from its folder on a CPU, "
        "with no\nconfiguration. It gets six requests, first one after the other and then all in one batch. **Exact** "
        "means that all\nresponses equal those of transformers for each request alone: the same greedy tokens, or "
        "scores within 2e-4. A **refused**\nmodel does not become ready, and the error states the reason; unless the "
        "checkpoint is at fault, conch's responses would have\ndiffered from those of transformers.\n",
        markdown([
            ["task", "architectures compared", "exact", "share", "refused", "other"],
            *(_summary(task, [row for row in compared if row.architecture.task == task]) for task in tasks),
            _summary("all", compared),
        ]),
    ]  # fmt: skip
    others = [row for row in compared if row.outcome.verdict != "exact"]
    if others:
        sections += ["## Not exact\n", markdown([["task", "architecture", "", "reason"], *map(_line, others)])]
    unmade = [row for row in rows if row.outcome.verdict == "none"]
    if unmade:
        head = ["task", "architecture", "", "reason"]
        sections += [
            "## Not compared\n",
            "No tiny checkpoint can be made for these architectures, or transformers itself fails to run it.\n",
            markdown([head, *map(_line, unmade)]),
        ]
    return "\n".join(sections).rstrip() + "\n"


def _summary(task: str, rows: Sequence[Row]) -> list[str]:
    exact = sum(row.outcome.verdict == "exact" for row in rows)
    refused = sum(row.outcome.verdict == "refused" for row in rows)
    share = f"{exact / len(rows):.1%}" if rows else ""
    return [task, str(len(rows)), str(exact), share, str(refused), str(len(rows) - exact - refused)]


def _line(row: Row) -> list[str]:
    verdict = "" if row.outcome.verdict == "none" else row.outcome.verdict
    return [row.architecture.task, f"`{row.architecture.name}`", verdict, row.outcome.reason.replace("|", "\\|")]
