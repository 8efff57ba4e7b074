"""``conch convert``: converts a checkpoint to the fastest variant with the same results, ready to be served."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from conch.cli.options import ManyValues, command_of
from conch.convert.options import ConversionOptions, ConvertOptions
from conch.options.declaration import options_of

if TYPE_CHECKING:
    from rich.console import Console

    from conch.checkpoints.manifest import Manifest
    from conch.convert.run import ConvertedModel


def convert(options: ConvertOptions) -> int:
    """Export, optimise and quantise a model, compare and measure the variants, and write those that pass.

    The fastest variant that agrees with the checkpoint becomes "auto".
    """
    from conch.convert.publish import written_manifest
    from conch.measure.reports import terminal
    from conch.measure.reports.files import check_files, check_reports

    if options.report is not None:
        _require_alone(options)
    elif not options.model:
        raise click.UsageError("Missing option '-m' / '--model' (or --report, for a model that is converted already).")
    check_reports({"--html": options.html})
    check_files({"--markdown": options.markdown})
    if options.report is not None:
        manifest, lines = written_manifest(options.report), list[str]()
        folder = options.report.resolve()
        name = folder.parent.name if folder.name.isdecimal() else folder.name
    else:
        converted = _convert(options)
        manifest, lines = converted.manifest, list(_next_steps(converted))
        name = converted.folders[0].name
    _write(manifest, name, options.markdown, options.html)
    _print_manifest(terminal.console(), manifest, lines, options.verbose)
    return 0


def _require_alone(options: ConvertOptions) -> None:
    """Refuse the options of a conversion together with ``--report``."""
    declared = options_of(ConversionOptions).values()
    extra = [option.flag for option in declared if getattr(options, option.name) != option.default]
    if extra:
        raise click.UsageError(f"--report converts nothing, so it cannot be used with {', '.join(extra)}.")


def _convert(options: ConvertOptions) -> ConvertedModel:
    """Convert, and print each step."""
    from rich.markup import escape

    from conch.convert import run
    from conch.convert.plan import Plan
    from conch.measure.reports import terminal

    plan = Plan(*(getattr(options, field.name) for field in fields(Plan)))
    console = terminal.console(stderr=True)
    start = time.monotonic()

    def progress(step: str) -> None:
        console.print(f"[dim]{time.monotonic() - start:6.1f} s[/dim]  {escape(step)}", highlight=False, soft_wrap=True)

    converted = run.convert(plan, progress)
    progress("done")
    return converted


def _write(manifest: Manifest, name: str, markdown_file: Path | None, html: Path | None) -> None:
    """Write the report to the requested files."""
    from conch.convert.report.page import report
    from conch.convert.report.table import short_report
    from conch.measure.reports.files import write_report
    from conch.measure.reports.text import markdown

    if markdown_file is not None:
        markdown_file.write_text(markdown(short_report(manifest)), encoding="utf-8")
    if html is not None:
        write_report(report(manifest, name), html)


def _next_steps(converted: ConvertedModel) -> Iterator[str]:
    """Return the written files and the next steps."""
    for folder in converted.folders:
        yield f"wrote {folder}"
    yield f"conch serve --model-repository={converted.folders[0].parent}"


def _print_manifest(console: Console, manifest: Manifest, lines: Iterable[str], verbose: bool) -> None:
    """Print the table, the warnings, and ``lines``."""
    from conch.convert.report.table import log_lines, summary
    from conch.measure.reports.terminal import show

    def print_line(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    for line in log_lines(manifest) if verbose else ():
        print_line(line)
    show(console, *summary(manifest))
    for line in lines:
        print_line(line)


convert_command = command_of("convert", ConvertOptions, convert, ManyValues)
