"""Formats the report as log lines and Markdown, from the manifest only."""

from __future__ import annotations

from collections.abc import Iterator

from conch.checkpoints.manifest import Manifest
from conch.convert.measure import by_shape
from conch.convert.report.columns import conditions, headings, notation_of, rows, shapes, title
from conch.convert.verdict import NOT_ASKED_FOR


def log_lines(manifest: Manifest) -> Iterator[str]:
    """Yield one line per variant and shape: mean, sd, min, max, median, 95p, 99p, in milliseconds."""
    for shape in shapes(manifest):
        for variant in manifest.variants:
            if (run := by_shape(variant.latency).get(shape)) is not None:
                yield (
                    f"[{title(variant)}] {shape}: mean={run.mean_ms:.2f}ms, sd={run.sd_ms:.2f}ms, "
                    f"min={run.min_ms:.2f}ms, max={run.max_ms:.2f}ms, median={run.median_ms:.2f}ms, "
                    f"95p={run.p95_ms:.2f}ms, 99p={run.p99_ms:.2f}ms, runs={run.runs}{', busy' if run.busy else ''}"
                )


def markdown(manifest: Manifest) -> str:
    """Return the table, the measurement conditions and the warnings."""
    names = headings(manifest)
    rules = ["---", *["---:"] * (len(names) - 4), "---", "---:", "---"]
    lines = [names, rules, *(cells for _, cells in rows(manifest))]
    choice = "".join(f"- {reason}\n" for reason in manifest.choice)
    text = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
    known = "\n".join(f"- {name}: {value}" for name, value in facts(manifest))
    warnings = "".join(f"**Warning:** {warning}.\n\n" for warning in manifest.warnings)
    return f"# {manifest.source.model}\n\n{known}\n\n{warnings}{choice}\n{text}\n\n{_legend(manifest)}\n"


def facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield names and values of the facts about the conversion: source, versions, and measurement conditions."""
    settings = manifest.settings
    yield "task", manifest.task
    if manifest.source.revision:
        yield "revision", manifest.source.revision
    yield "converted", f"{manifest.created} by conch {manifest.conch}"
    yield "measured on", conditions(manifest)
    tokens = f" of {settings['tokens']} tokens" if "tokens" in settings else ""
    yield "compared on", f"{settings.get('samples', '?')} samples{tokens}, {settings.get('data', 'built-in')}"
    if (problem := settings.get("structured_output", "yes")) != "yes":
        yield "structured output", f"not available on OpenVINO: {problem}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())


def _legend(manifest: Manifest) -> str:
    refused = [
        f"Refused: {variant.name}: {'; '.join(variant.reasons)}."
        for variant in manifest.variants
        if variant.reasons and not variant.usable and variant.reasons != (NOT_ASKED_FOR,)
    ]
    return " ".join([notation_of(manifest).legend, *refused])
