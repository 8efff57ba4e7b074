"""Finds what a conversion wrote, so that its report can be made again."""

from __future__ import annotations

from pathlib import Path

from conch.checkpoints.manifest import FILENAME, Manifest
from conch.errors import invalid


def written_manifest(folder: Path) -> Manifest:
    """The manifest of a converted model, whose files need not be there any more: that in ``folder``, or in the version
    in it with the highest number.

    Raises INVALID_ARG where there is none, and for one that cannot be read.
    """
    versions = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    for place in (folder, *sorted(versions, key=lambda one: -int(one.name))):
        manifest = Manifest.read(place)
        if manifest is not None:
            return manifest
    raise invalid(f"{folder} is no converted model: neither it nor a version in it has a {FILENAME}")
