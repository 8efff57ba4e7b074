"""Checks that the versions that a model serves are there, with their files."""

from __future__ import annotations

from collections.abc import Iterator

from conch.checks.finding import Finding
from conch.checks.model import CheckedModel
from conch.config.problem import Problem
from conch.repository.versions import missing_version_warning, select_versions


def check_versions(model: CheckedModel) -> Iterator[Finding]:
    """Versions that the policy selects and that are not there, and version directories without the model's file."""
    files = model.files
    selection = select_versions(model.config, files.versions)
    for version in selection.missing:
        text = missing_version_warning(files.name, version)
        yield model.warning(text, ("version_policy",), f"make {files.version_directory(version)}")
    if not selection.versions:
        yield model.finding(
            Problem(
                f"at least one version must be available under the version policy of model '{files.name}'",
                ("version_policy",),
                hint=f"make {files.version_directory(1)}" if not files.versions else "select a version that is there",
            )
        )
    for path in model.model_files():
        if not path.exists():
            yield Finding(
                path, 0, "error", "the model's file is missing", "put it there, or set default_model_filename"
            )
