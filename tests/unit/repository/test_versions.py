"""Version directories and version policies."""

from __future__ import annotations

import pytest

from conch.config.pbtxt import parse
from conch.repository.versions import Selection, missing_version_warning, read_versions, select_versions


def test_versions_are_sorted_as_numbers() -> None:
    assert read_versions(["10", "9", "0"]).found == (0, 9, 10)


def test_directories_with_another_meaning_are_skipped_silently() -> None:
    assert read_versions(["configs", "warmup", "initial_state", ".cache"]) == read_versions([])


@pytest.mark.parametrize("name", ["01", "00"])
def test_leading_zeros_are_ignored_with_a_warning(name: str) -> None:
    versions = read_versions([name])

    assert versions.found == ()
    assert versions.warnings == (
        f"ignore version directory '{name}' which contains leading zeros in its directory name",
    )


@pytest.mark.parametrize("name", ["abc", "1a", "-1", "+2", "1.0", "٣", "²", "9" * 25])
def test_what_is_no_number_is_ignored_with_a_warning(name: str) -> None:
    versions = read_versions([name])

    assert versions.found == ()
    assert versions.warnings == (f"ignore version directory '{name}' which fails to convert to integral number",)


@pytest.mark.parametrize(
    ("policy", "selection"),
    [
        ("", Selection((9,))),
        ("version_policy {}", Selection((9,))),
        ("version_policy { latest { num_versions: 2 } }", Selection((3, 9))),
        ("version_policy { latest { num_versions: 7 } }", Selection((1, 3, 9))),
        ("version_policy { latest {} }", Selection(())),
        ("version_policy { all {} }", Selection((1, 3, 9))),
        ("version_policy { specific { versions: [9, 4, 1, 2] } }", Selection((1, 9), (2, 4))),
        ("version_policy { specific {} }", Selection(())),
    ],
)
def test_policy_selects_versions(policy: str, selection: Selection) -> None:
    assert select_versions(parse(policy, "c"), (9, 1, 3)) == selection


def test_missing_version_is_warned_about_in_tritons_words() -> None:
    assert missing_version_warning("m", 9) == (
        "version 9 is specified for model 'm', but the version directory is not present"
    )
