"""What the pages say is so: their commands, programs and files work as written, with the output that they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.page import Kind, steps
from tests.docs.walk import PageWalk

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("tutorials/*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
#: An analysis that needs a quiet machine for a minute (tests/e2e/analyze runs shorter ones), conversions, pages that
#: import PyTorch several times, and pages that serve a model for the same requests as other pages.
SLOW = {
    "analyze.md", "embedding-service.md", "fastapi-and-notebooks.md", "from-tei.md", "from-torchserve.md",
    "from-vllm.md", "gaudi.md", "hugging-face-models.md", "in-flight-batching.md", "optimise-and-measure.md",
    "perf.md", "speech.md",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_each_block_is_run_or_says_why_not(page: Path) -> None:
    unknown = [
        f"{page}:{step.line}: say what this is (```sh, ```text …: tests/docs/page.py), or <!-- not run: why -->"
        for step in steps(page)
        if step.kind is Kind.UNKNOWN and not step.reason
    ]
    assert not unknown, "\n".join(unknown)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page.name in SLOW else []) for page in PAGES], ids=NAMES
)
def test_a_page_works_as_written(page: Path, tmp_path: Path) -> None:
    with PageWalk(str(page.relative_to(ROOT)), tmp_path) as walk:
        for step in steps(page):
            if not step.reason:
                walk.take(step)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        file, _, place = target.partition("#")
        if file.startswith("http"):
            continue
        linked = (page.parent / file) if file else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not place or place in _places(linked), f"{page.name}: {target}"


def test_the_index_has_every_page() -> None:
    index = DOCS / "README.md"
    linked = {index.parent / target for target in re.findall(r"\]\(([\w/-]+\.md)", index.read_text("utf-8"))}
    assert {*PAGES} - linked == {index, ROOT / "README.md"}


def _places(page: Path) -> set[str]:
    headings = (line.lstrip("# ") for line in page.read_text("utf-8").splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
