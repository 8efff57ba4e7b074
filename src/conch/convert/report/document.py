"""What ``conch convert`` found out, for people: log lines, Markdown and HTML.

Pure; everything is taken from the manifest, so that it can be shown again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from conch.checkpoints.manifest import Latency, Manifest, Variant
from conch.convert.measure import speed_up
from conch.convert.report import causal
from conch.convert.report.plot import plot
from conch.convert.verdict import NOT_ASKED_FOR

ENGINES: Final = {
    "torch": "PyTorch",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "tensorrt": "TensorRT",
}

_LEGEND: Final = (
    "Latency is the median of one run at batch x tokens. Speed-up is the geometric mean over the shapes, against "
    "PyTorch in fp32. Agreement is the smallest cosine of each output with PyTorch's, and the task's metric with "
    "its 95 % interval."
)
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #1c2330 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .3em .8em; border-bottom: 1px solid #d8dde6 }
th { text-align: left } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
tr.auto { background: #e8f4ea } tr.refused { color: #9a2b2b } small { color: #5b6575 } svg { max-width: 100% }
"""


def title(variant: Variant) -> str:
    """``ONNX Runtime (int8)``; what else the name says follows the precision."""
    rest = [part for part in variant.name.split("-")[1:] if part != variant.precision]
    return f"{ENGINES.get(variant.engine, variant.engine)} ({', '.join([variant.precision, *rest])})"


def reference(manifest: Manifest) -> Variant | None:
    """The variant that speed-ups refer to: PyTorch in fp32."""
    return next((one for one in manifest.variants if one.engine == "torch" and one.precision == "fp32"), None)


def log_lines(manifest: Manifest) -> Iterator[str]:
    """One line a variant and shape: mean, sd, min, max, median, 95p, 99p, in milliseconds."""
    for shape in shapes(manifest):
        for variant in manifest.variants:
            if (one := at(variant, shape)) is not None:
                yield (
                    f"[{title(variant)}] {shape[0]}x{shape[1]}: mean={one.mean_ms:.2f}ms, sd={one.sd_ms:.2f}ms, "
                    f"min={one.min_ms:.2f}ms, max={one.max_ms:.2f}ms, median={one.median_ms:.2f}ms, "
                    f"95p={one.p95_ms:.2f}ms, 99p={one.p99_ms:.2f}ms"
                )


def shapes(manifest: Manifest) -> list[tuple[int, int]]:
    """Every (batch, tokens) that was measured, in order."""
    return sorted({(one.batch, one.tokens) for variant in manifest.variants for one in variant.latency})


def at(variant: Variant, shape: tuple[int, int]) -> Latency | None:
    return next((one for one in variant.latency if (one.batch, one.tokens) == shape), None)


def headings(manifest: Manifest) -> list[str]:
    measured = [causal.heading(one) if writes(manifest) else f"{one[0]}x{one[1]} ms" for one in shapes(manifest)]
    return ["engine (precision)", *measured, "speed-up", "agreement", "verdict"]


def writes(manifest: Manifest) -> bool:
    """Whether it is of a language model, whose speed is in tokens a second."""
    return manifest.task == causal.TASK


def rows(manifest: Manifest) -> Iterator[tuple[Variant, list[str]]]:
    """The cells of each variant, measured or not, in the manifest's order; medians in milliseconds."""
    torch = reference(manifest)
    sizes = manifest.settings.get("megabytes", {})
    for variant in manifest.variants:
        figures = [at(variant, shape) for shape in shapes(manifest)]
        factor = speed_up(variant.latency, torch.latency) if torch and variant.latency else None
        yield (
            variant,
            [
                title(variant),
                *("–" if one is None else _speed(manifest, one) for one in figures),
                "–" if factor is None else f"{factor:.2f}x",
                causal.agreement(variant.agreement, sizes.get(variant.name))
                if writes(manifest)
                else agreement(variant.agreement),
                verdict(variant, manifest.auto),
            ],
        )


def _speed(manifest: Manifest, one: Latency) -> str:
    return causal.rate(one) if writes(manifest) else f"{one.median_ms:.2f}"


def agreement(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The smallest cosine of each output, and the task's metric: ``logits ≥ 0.9912; same label 0.993 (0.96 … 1)``."""
    parts = []
    for name, one in figures.items():
        if name == "task":
            bounds = f"{one['value'] - one['delta'] + one['low']:.4f} … {one['value'] - one['delta'] + one['high']:.4f}"
            parts.append(f"{one['name']} {one['value']:.4f} ({bounds})")
        elif one.get("cosine_min") is not None:
            parts.append(f"{name} ≥ {one['cosine_min']:.4f}")
    return "; ".join(parts) or "–"


def verdict(variant: Variant, auto: str) -> str:
    if variant.name == auto:
        return "auto (forced)" if variant.forced else "auto"
    if variant.passed:
        return "passes"
    if variant.reasons == (NOT_ASKED_FOR,):
        return "reference"
    reason = variant.reasons[0] if variant.reasons else ""
    return f"forced: {reason}" if variant.forced else f"refused: {reason}" if variant.agreement else reason


def markdown(manifest: Manifest) -> str:
    """The table with what it was measured on."""
    names = headings(manifest)
    rules = ["---" if place in (0, len(names) - 2, len(names) - 1) else "---:" for place in range(len(names))]
    lines = [names, rules, *(cells for _, cells in rows(manifest))]
    text = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
    facts = "\n".join(f"- {name}: {value}" for name, value in _facts(manifest))
    return f"# {manifest.source.model}\n\n{facts}\n\n{text}\n\n{_legend(manifest)}\n"


def html(manifest: Manifest) -> str:
    """One page that needs nothing else: a plot of the medians, the table, all figures."""
    names = headings(manifest)

    def row(tag: str, cells: Sequence[str], kind: str = "") -> str:
        numbers = range(1, len(names) - 2)
        parts = (
            f"<{tag}{' class=n' if place in numbers else ''}>{escape(cell)}</{tag}>" for place, cell in enumerate(cells)
        )
        return f"<tr{f' class={kind}' if kind else ''}>{''.join(parts)}</tr>"

    body = "\n".join(
        row("td", cells, "auto" if one.name == manifest.auto else "" if one.usable else "refused")
        for one, cells in rows(manifest)
    )
    facts = "".join(f"<li>{escape(name)}: {escape(value)}</li>" for name, value in _facts(manifest))
    name = escape(manifest.source.model)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
        f"</head><body>\n<h1>{name}</h1>\n<ul>{facts}</ul>\n{_plot(manifest)}\n<table>\n{row('th', names)}\n{body}\n"
        f"</table>\n<p><small>{escape(_legend(manifest))}</small></p>\n<h2>All figures</h2>\n<pre>"
        f"{escape(chr(10).join(log_lines(manifest)))}</pre>\n</body></html>\n"
    )


def _plot(manifest: Manifest) -> str:
    series = {title(one): {f"{s[0]}x{s[1]}": x.median_ms for s in shapes(manifest) if (x := at(one, s)) is not None}
              for one in manifest.variants if one.latency}  # fmt: skip
    return plot(series, "median latency (ms, logarithmic), by batch x tokens")


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    settings = manifest.settings
    yield "task", manifest.task
    if manifest.source.revision:
        yield "revision", manifest.source.revision
    yield "converted", f"{manifest.created} by conch {manifest.conch}"
    yield "measured on", f"{settings.get('device', 'cpu')}, {settings.get('threads', '?')} threads"
    tokens = f" of {settings['tokens']} tokens" if "tokens" in settings else ""
    yield "compared on", f"{settings.get('samples', '?')} samples{tokens}, {settings.get('data', 'built-in')}"
    if (problem := settings.get("structured_output", "yes")) != "yes":
        yield "structured output", f"not available on OpenVINO: {problem}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())


def _legend(manifest: Manifest) -> str:
    refused = [
        f"{one.name}: {'; '.join(one.reasons)}"
        for one in manifest.variants
        if one.reasons and not one.usable and one.reasons != (NOT_ASKED_FOR,)
    ]
    text = causal.LEGEND if writes(manifest) else _LEGEND
    return " ".join([text, *(f"Refused: {one}." for one in refused)])
