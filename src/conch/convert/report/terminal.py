"""Formats the report as a table for a terminal of any width."""

from __future__ import annotations

from typing import Final

from rich.table import Table
from rich.text import Text

from conch.checkpoints.manifest import Manifest, Variant
from conch.convert.report.columns import conditions, notation_of, rows

#: On narrower terminals (characters), speeds are below the engine's name instead of beside it, and sizes are stacked.
MIN_WIDE: Final = 130


def table(manifest: Manifest, width: int) -> Table:
    """Return the table, ``width`` characters wide: engine, speeds, speed-up, sizes, agreement, verdict."""
    wide = width >= MIN_WIDE
    notation = notation_of(manifest)
    title = f"{manifest.source.model} ({manifest.task}), {notation.unit}"
    variants = Table(title=title, title_justify="left", title_style="bold", expand=True)
    variants.caption, variants.caption_justify = Text(f"Measured on {conditions(manifest)}."), "left"
    variants.add_column("engine (precision)", no_wrap=True)
    if wide:
        variants.add_column(notation.speeds_heading, no_wrap=True)
    variants.add_column("speed-up", justify="right", no_wrap=True)
    for heading in ("disk", "memory") if wide else ("disk\nmemory",):
        variants.add_column(heading, justify="right", no_wrap=True)
    variants.add_column("agreement", ratio=5, overflow="fold")
    if wide:
        variants.add_column("in a batch", no_wrap=True)
    variants.add_column("verdict", ratio=4, min_width=9, overflow="fold")
    for variant, (engine, *_, factor, disk, memory, agreement, in_batch, verdict) in rows(manifest):
        speeds = notation.speeds(variant)
        if not wide and notation.in_batch(variant.agreement):
            agreement += f"; in a batch {in_batch}"
        first = [engine, speeds] if wide else [f"{engine}\n{speeds}".rstrip()]
        sizes = [disk, memory] if wide else [f"{disk}\n{memory}"]
        busy = factor.endswith(" busy")
        cells: list[str | Text] = [
            *map(Text, first),
            Text(factor.replace(" ", "\n", 1), "dim" if busy else ""),
            *sizes,
            agreement.replace("; ", "\n"),
            *([in_batch] if wide else []),
            verdict,
        ]
        variants.add_row(
            *(cell if isinstance(cell, Text) else Text(cell) for cell in cells),
            style=_style(variant, manifest, busy=busy),
            end_section=True,
        )
    return variants


def _style(variant: Variant, manifest: Manifest, *, busy: bool) -> str:
    if variant.name == manifest.auto:
        return "" if busy else "green"
    return "" if variant.usable else "dim" if variant.engine == "torch" else "red"
