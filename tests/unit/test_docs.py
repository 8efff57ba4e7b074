"""The documents name everything that a user may write or read: parameters, tasks, metrics, options, extras."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import click
import pytest

from conch.backends.huggingface.options import Options
from conch.backends.huggingface.tasks import TASKS
from conch.cli.convert import convert_command
from conch.convert.verdict import TOLERANCES
from conch.telemetry.families import WORK

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("huggingface.md", "convert.md", "backends.md")
#: Fields of ``Options`` that are no parameters.
INTERNAL = {"extra", "given"}


def document(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of every row of its tables, without marks."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("*", "") for cell in line.strip("|").split("|")] for line in lines]


def named(text: str) -> set[str]:
    """All that stands between backquotes in the first column of its tables."""
    return {name for cells in rows(text) for name in re.findall(r"`([^`]+)`", cells[0])}


def test_parameters_are_documented() -> None:
    parameters = {one.name for one in fields(Options)} - INTERNAL
    assert parameters - named(document("huggingface.md")) == set()


def test_tasks_are_documented() -> None:
    assert TASKS.keys() - named(document("huggingface.md")) == set()


def test_metrics_are_documented() -> None:
    assert {metric.name for metric in WORK} - named(document("huggingface.md")) == set()


def test_options_of_convert_are_documented() -> None:
    options = {flag for one in convert_command.params if isinstance(one, click.Option) for flag in one.opts}
    assert options - {"--help"} - named(document("convert.md")) == set()


def test_tolerances_are_those_of_the_verdict() -> None:
    table = {cells[0]: cells[1:] for cells in rows(document("convert.md")) if cells[0] in TOLERANCES}
    for precision, tolerance in TOLERANCES.items():
        bounds = [getattr(tolerance, one.name) for one in fields(tolerance)]
        assert [float(cell) for cell in table[precision]] == bounds, precision


def test_extras_are_documented() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    offered = "".join(map(document, DOCUMENTS))
    written = {name for extra in re.findall(r"conch\[([\w,]+)\]", offered) for name in extra.split(",")}
    assert extras - written == {"demo", "dev"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document(name)):
        file, _, place = target.partition("#")
        text = document(file or name)
        headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
                    for line in text.splitlines() if line.startswith("#")}  # fmt: skip
        assert not place or place in headings, target
