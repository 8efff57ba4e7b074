"""What ``conch convert`` found out, as a table for a terminal of any width."""

from __future__ import annotations

from typing import Final

from rich.table import Table
from rich.text import Text

from conch.checkpoints.manifest import Manifest, Variant
from conch.convert.report import causal
from conch.convert.report.document import at, rows, writes

#: Narrower terminals get the latencies below the engine's name and not beside it.
WIDE: Final = 110


def table(manifest: Manifest, width: int) -> Table:
    """Engine and precision, latency by shape, speed-up over PyTorch, agreement, verdict."""
    wide = width >= WIDE
    measured = "tokens a second" if writes(manifest) else "median ms by batch x tokens"
    grid = causal.grid if writes(manifest) else _grid
    title = f"{manifest.source.model} ({manifest.task}), {measured}"
    made = Table(title=title, title_justify="left", title_style="bold", expand=True)
    made.add_column("engine (precision)", no_wrap=True)
    if wide:
        made.add_column("speed" if writes(manifest) else "batch x tokens", no_wrap=True)
    made.add_column("speed-up", justify="right", no_wrap=True)
    made.add_column("agreement", ratio=5, overflow="fold")
    made.add_column("verdict", ratio=4, overflow="fold")
    for variant, (engine, *_, factor, agreed, judged) in rows(manifest):
        latencies = [engine, grid(variant)] if wide else [f"{engine}\n{grid(variant)}".rstrip()]
        cells = [*latencies, factor, agreed.replace("; ", "\n"), judged]
        made.add_row(*map(Text, cells), style=_style(variant, manifest), end_section=True)
    return made


def _grid(variant: Variant) -> str:
    """Medians with a line for each batch size and a column for each length."""
    batches = sorted({one.batch for one in variant.latency})
    lengths = sorted({one.tokens for one in variant.latency})
    lines = ["  x" + "".join(f"{length:>8}" for length in lengths)] if batches else []
    for batch in batches:
        cells = [at(variant, (batch, length)) for length in lengths]
        lines.append(f"{batch:>3}" + "".join(f"{'–' if one is None else f'{one.median_ms:.2f}':>8}" for one in cells))
    return "\n".join(lines)


def _style(variant: Variant, manifest: Manifest) -> str:
    if variant.name == manifest.auto:
        return "green"
    return "" if variant.usable else "dim" if variant.engine == "torch" else "red"
