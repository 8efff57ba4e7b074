"""The tools for releases: what is refused, the notes, and the sizes of installations."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from conch import __version__
from release import build, install_sizes

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## 1.1.0 (unreleased)

- New.

## 1.0.0 (2026-12-01)

- First.
"""


def test_version_stands_in_one_place() -> None:
    assert build.read_version() == __version__
    assert build.changelog_section((ROOT / "CHANGELOG.md").read_text(), __version__).count("\n## ") == 0


def test_notes_are_the_section_of_the_version() -> None:
    assert build.changelog_section(CHANGELOG, "1.0.0") == "## 1.0.0 (2026-12-01)\n\n- First.\n"
    assert build.changelog_section(CHANGELOG, "1.1.0.dev3") == "## 1.1.0 (unreleased)\n\n- New.\n"
    with pytest.raises(SystemExit, match=r"no section '## 1\.2\.0"):
        build.changelog_section(CHANGELOG, "1.2.0")


@pytest.mark.parametrize(
    ("version", "tag", "problem"),
    [
        ("1.0.0", "v1.0.0", ""),
        ("1.0.0", "v1.0.1", "the tag is v1.0.1, but conch/__init__.py has the version 1.0.0"),
        ("1.1.0.dev0", "v1.1.0.dev0", "1.1.0.dev0 is no version to publish"),
        ("1.1.0", "v1.1.0", "the section of 1.1.0 in CHANGELOG.md has no date: '## 1.1.0 (YYYY-MM-DD)'"),
    ],
)
def test_release_needs_tag_version_and_changelog_that_agree(version: str, tag: str, problem: str) -> None:
    assert build.release_problem(version, tag, CHANGELOG) == problem


def test_wheel_has_nothing_but_the_packages() -> None:
    good = [
        "conch/__init__.py",
        "conch/testing/run.py",
        "triton_python_backend_utils/py.typed",
        "conch_server-1.dist-info/RECORD",
    ]
    assert build.content_problem(good) == ""
    bad = ["tests/unit/test_a.py", "benchmarks/a.py", "conch/tests/b.py", "conch/__pycache__/c.pyc"]
    assert all(name in build.content_problem([*good, *bad]) for name in bad)


def test_workflow_publishes_only_after_an_approval_and_has_no_token() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert "id-token" not in yaml.safe_load(text)["permissions"] and "secrets." not in text
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["environment"]["name"] == "pypi"
    uploads = [step for step in jobs["publish"]["steps"] if "pypi-publish" in step.get("uses", "")]
    assert [step["with"]["attestations"] for step in uploads] == [True]
    assert all("github.ref_type == 'tag'" in str(job["if"]) for name, job in jobs.items() if name != "build")


@pytest.mark.extras
def test_packages_of_an_extra_include_what_they_require_in_turn() -> None:
    core, report = install_sizes.closure("conch-server"), install_sizes.closure("conch-server", "report")
    assert {"conch-server", "numpy", "grpcio", "markdown-it-py"} <= core
    assert "altair" not in core and {"altair", "vl-convert-python", "jsonschema"} <= report
    with pytest.raises(install_sizes.MissingPackageError):
        install_sizes.closure("conch-server", "vllm")


def test_core_stays_small() -> None:
    """In megabytes; what is new and large belongs into an extra."""
    assert sum(map(install_sizes.size, install_sizes.closure("conch-server"))) < 200e6
    page = (ROOT / "docs/README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| (?:\d+|not measured) \|$", page, re.MULTILINE)
    assert set(rows) == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
