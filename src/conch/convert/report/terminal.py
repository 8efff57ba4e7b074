"""The report as a table for a terminal of any width."""

from __future__ import annotations

from typing import Final

from rich.table import Table
from rich.text import Text

from conch.checkpoints.manifest import Manifest, Variant
from conch.convert.report.columns import notation_of, rows

#: Narrower terminals get the speeds below the engine's name and not beside it.
MIN_WIDE: Final = 110


def table(manifest: Manifest, width: int) -> Table:
    """Engine and precision, speed by shape, speed-up over PyTorch, agreement, verdict, in ``width`` columns."""
    wide = width >= MIN_WIDE
    notation = notation_of(manifest)
    title = f"{manifest.source.model} ({manifest.task}), {notation.unit}"
    made = Table(title=title, title_justify="left", title_style="bold", expand=True)
    made.add_column("engine (precision)", no_wrap=True)
    if wide:
        made.add_column(notation.speeds_heading, no_wrap=True)
    made.add_column("speed-up", justify="right", no_wrap=True)
    made.add_column("agreement", ratio=5, overflow="fold")
    made.add_column("verdict", ratio=4, overflow="fold")
    for variant, (engine, *_, factor, agreement, in_batch, verdict) in rows(manifest):
        speeds = notation.speeds(variant)
        if notation.in_batch(variant.agreement):
            agreement += f"; in a batch {in_batch}"
        first = [engine, speeds] if wide else [f"{engine}\n{speeds}".rstrip()]
        cells = [*first, factor, agreement.replace("; ", "\n"), verdict]
        made.add_row(*map(Text, cells), style=_style(variant, manifest), end_section=True)
    return made


def _style(variant: Variant, manifest: Manifest) -> str:
    if variant.name == manifest.auto:
        return "green"
    return "" if variant.usable else "dim" if variant.engine == "torch" else "red"
