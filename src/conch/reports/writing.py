"""Writes reports to files: HTML or PDF by the name's ending, checked before the work whose result they show."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from conch.errors import invalid
from conch.extras import require
from conch.reports.page import Page

#: What writing a page needs, of the extra ``report``.
_NEEDS: Final = {".html": ("altair", "vl_convert"), ".pdf": ("altair", "vl_convert", "fpdf")}


def check_reports(paths: Mapping[str, Path | None]) -> None:
    """See that pages can be written to ``paths`` (by the flag that gave each; None is not asked for).

    Raises UNSUPPORTED where the extra is missing, INVALID_ARG for other endings than .html and .pdf and for files that
    cannot be written.
    """
    for flag, path in paths.items():
        if path is None:
            continue
        needs = _NEEDS.get(path.suffix.lower())
        if needs is None:
            raise invalid(f"{flag} {path}: the name must end in {' or '.join(_NEEDS)}")
        require(flag, *needs, extra="report")
    check_files(paths)


def check_files(paths: Mapping[str, Path | None]) -> None:
    """See that files can be written to ``paths``; raises INVALID_ARG, naming the flag.  Creates nothing."""
    for flag, path in paths.items():
        if path is None:
            continue
        folder = path.parent
        if path.is_dir():
            raise invalid(f"{flag} {path}: is a folder")
        if not folder.is_dir():
            raise invalid(f"{flag} {path}: the folder {folder} does not exist")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise invalid(f"{flag} {path}: cannot be written: permission denied")


def write_page(page: Page, path: Path) -> None:
    """Write the page in the format of the name's ending; the file is there whole or not at all."""
    if path.suffix.lower() == ".pdf":
        from conch.reports.pdf import pdf

        content = pdf(page)
    else:
        from conch.reports.html import html

        content = html(page).encode("utf-8", "xmlcharrefreplace")
    write_whole(path, content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader never finds half of it; devices and pipes are written to as they are."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
