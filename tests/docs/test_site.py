"""The documentation site has every page of the repository, in its navigation, and its links lead to pages."""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.site.pages import main, pages, place_of, sources

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]


def places(entry: Any) -> Iterator[str]:
    """The places that an entry of the navigation names."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from places(inner)


def test_every_page_has_one_place_in_the_navigation() -> None:
    named = list(places(PROJECT["nav"]))
    assert len(named) == len(set(named))
    assert {place for place in sources() if not place.startswith("decisions/")} == set(named)


def test_links_lead_to_places_of_the_site_or_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPOSITORY_URL", raising=False)
    texts = sources()
    for place, text in texts.items():
        for target in re.findall(
            r"(?<!!)\[[^\]]*\]\(([^)\s#]+)[^)\s]*\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        ):
            if not target.startswith("http"):
                assert posixpath.normpath(posixpath.join(posixpath.dirname(place), target)) in texts, (place, target)


def test_links_to_source_files_lead_to_the_repository_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPOSITORY_URL", "https://example.org/conch/")
    assert "(https://example.org/conch/tree/main/src/conch/cli/demo/repository)" in sources()["index.md"]


def test_the_reference_of_the_python_api_names_every_export() -> None:
    import triton_python_backend_utils

    import conch
    from conch import testing

    shown = set(re.findall(r"^::: \S+\.(\w+)$", sources()["python-api.md"], re.MULTILINE))
    exported = {*conch.__all__, *testing.__all__, *triton_python_backend_utils.__all__} - {"__version__"}
    assert exported | {"load_model"} == shown


def test_pages_are_laid_out_with_their_pictures_and_without_older_ones(tmp_path: Path) -> None:
    (tmp_path / "removed.md").write_text("gone")
    main(tmp_path)
    laid_out = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {place_of(page) for page in pages()} < laid_out
    assert {PROJECT["theme"]["favicon"], *PROJECT["extra_css"]} < laid_out
    assert "removed.md" not in laid_out
