"""The documents name everything that a user may write or read: parameters, tasks, metrics, options, extras."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from conch.backends.contracts.text.interface import INPUTS, OUTPUTS
from conch.backends.generation.parameters import NAMES
from conch.backends.tasks.table import TASKS
from conch.checkpoints.options import Options
from conch.cli.convert import convert_command
from conch.convert import verdict
from conch.convert.causal import agreement
from conch.telemetry.families import GENERATION, WORK

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("huggingface.md", "generation.md", "inflight_batcher.md", "openai.md", "convert.md", "backends.md")
#: Other names for what is documented under vLLM's.
OTHER_NAMES = {
    "max_new_tokens", "max_completion_tokens", "best_of", "num_beams", "use_beam_search", "guided_decoding",
    "spaces_between_special_tokens",
}  # fmt: skip
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


@pytest.mark.parametrize("tolerances", [verdict.TOLERANCES, agreement.TOLERANCES])
def test_tolerances_are_those_of_the_verdict(tolerances: dict[str, Any]) -> None:
    names = [one.name for one in fields(next(iter(tolerances.values())))]
    tables = rows(document("convert.md"))
    table = {cells[0]: cells[1:] for cells in tables if cells[0] in tolerances and len(cells) == 1 + len(names)}
    for precision, tolerance in tolerances.items():
        written = [float(cell.removesuffix(" %")) / (100 if "%" in cell else 1) for cell in table[precision]]
        assert written == pytest.approx([getattr(tolerance, name) for name in names]), precision


def test_what_generation_takes_and_gives_is_documented() -> None:
    text = document("generation.md")
    assert {spec.name for spec in (*INPUTS, *OUTPUTS)} - set(re.findall(r"`(\w+)`", text)) == set()
    assert NAMES - set(re.findall(r"`(\w+)`", text)) - OTHER_NAMES == set()
    metrics = {metric.name for metric in GENERATION} - set(re.findall(r"`(vllm:\w+)`", text))
    assert all(re.search("queue|prefill|decode|_tokens|_params_|per_output_token", name) for name in metrics), metrics


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
