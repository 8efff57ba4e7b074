"""Finds the manifest of a converted model, to regenerate its report."""

from __future__ import annotations

from pathlib import Path

from conch.checkpoints.manifest import FILENAME, Manifest
from conch.core.errors import invalid


def written_manifest(folder: Path) -> Manifest:
    """Return the manifest in ``folder``, or in its version with the highest number; other files may be missing.

    Raises INVALID_ARG if there is none, or if it cannot be read.
    """
    versions = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    for place in (folder, *sorted(versions, key=lambda version: -int(version.name))):
        manifest = Manifest.read(place)
        if manifest is not None:
            return manifest
    raise invalid(f"{folder} is no converted model: neither it nor a version in it has a {FILENAME}")
