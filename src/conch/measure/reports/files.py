"""Writes reports to HTML files, and checks their paths before the work that they report begins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from conch.core.errors import invalid
from conch.machine.extras import require
from conch.measure.reports.report import Report

#: The error of options that name a PDF file.
NO_PDF: Final = "conch does not write PDF: write the report as HTML and print that page from a browser"


def check_reports(paths: Mapping[str, Path | None]) -> None:
    """Check that reports can be written to ``paths``, by option; None is an option that is not given.

    Raises UNSUPPORTED if the extra ``report`` is missing, and INVALID_ARG for a name that does not end in .html or a
    file that cannot be written.
    """
    for flag, path in paths.items():
        if path is None:
            continue
        ending = path.suffix.lower()
        if ending != ".html":
            raise invalid(f"{flag} {path}: {NO_PDF if ending == '.pdf' else 'the name must end in .html'}")
        require_charts(flag)
    check_files(paths)


def require_charts(feature: str) -> None:
    """Raise UNSUPPORTED, naming ``feature``, unless the packages that draw charts are installed."""
    require(feature, "altair", "vl_convert", extra="report")


def check_files(paths: Mapping[str, Path | None]) -> None:
    """Check that files can be written to ``paths``, without creating them; raises INVALID_ARG, naming the option."""
    for flag, path in paths.items():
        if path is None:
            continue
        folder = path.parent
        if path.is_dir():
            raise invalid(f"{flag} {path}: is a folder")
        if not folder.is_dir():
            raise invalid(f"{flag} {path}: the folder {folder} does not exist")
        # A file is replaced by one that is written beside it.
        if not os.access(path if path.exists() and not path.is_file() else path.resolve().parent, os.W_OK):
            raise invalid(f"{flag} {path}: cannot be written: permission denied")


def write_report(report: Report, path: Path) -> None:
    """Write a report as an HTML file, completely or not at all."""
    from conch.measure.reports.html import html

    write_whole(path, html(report).encode("utf-8", "xmlcharrefreplace"))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically; devices and pipes are written directly."""
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
