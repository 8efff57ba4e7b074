"""The charts of a conversion's report: from the manifest to :mod:`conch.reports.charts`, and a map of speeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from conch.checkpoints.manifest import Manifest, Variant
from conch.convert.measure import by_shape, speed_up
from conch.convert.report.columns import notation_of, shapes, title
from conch.convert.variant import REFERENCE
from conch.convert.verdict import NOT_ASKED_FOR
from conch.extras import load
from conch.reports.charts import Axis, Bar, Dot, Series, bar_chart, line_chart, percentile_chart
from conch.reports.numbers import significant
from conch.reports.page import Chart
from conch.texts.shapes import Shape

#: Smaller differences are rounding, and drawn as this.
LEAST: Final = 1e-6
#: Room for names at the left, which fonts of a reader may make wider than they were planned (pixels).
_PADDING: Final = {"left": 16, "right": 8, "top": 5, "bottom": 5}
#: Colours of the map, from slower than PyTorch to much faster.
_SLOW: Final = "#e69f00"
_EVEN: Final = "#f4f6f9"
_FAST: Final = "#0072b2"


def tradeoff_chart(manifest: Manifest) -> Chart | None:
    """Each measured variant by speed-up and by how far it is from the reference; None where nothing was measured."""
    measure = _measure_of(manifest)
    series = [
        Series(_named(variant, manifest), [Dot(_speed_up(variant, manifest), y)])
        for variant in manifest.variants
        if variant.latency and (y := _apart(variant)) is not None
    ]
    if not series:
        return None
    return line_chart(
        "Speed against agreement",
        series,
        Axis("times as fast as PyTorch in fp32 (mean over shapes)"),
        Axis(measure, logarithmic=True),
        joined=False,
        alt="; ".join(f"{one.name}: {one.dots[0].x:.2f}x, {one.dots[0].y:.2g}" for one in series),
        caption=f"To the right is faster, and down is closer to PyTorch's answers. Less than {LEAST:f} is rounding, "
        "and drawn as that.",
    )


def speed_map(manifest: Manifest) -> Chart | None:
    """The time of each variant at each shape, coloured by how much faster than PyTorch that is; the fastest that may
    serve stands out.  None where nothing was measured."""
    reference = by_shape(_reference(manifest).latency)
    notation = notation_of(manifest)
    rows: list[dict[str, Any]] = []
    for shape in shapes(manifest):
        best = _fastest(manifest, shape)
        for variant in manifest.variants:
            found = by_shape(variant.latency).get(shape)
            if found is None:
                continue
            factor = reference[shape].median_ms / found.median_ms if shape in reference else 1.0
            rows.append({
                "variant": title(variant), "shape": _short(notation.heading(shape)), "text": notation.speed(found),
                "factor": float(f"{factor:.4g}"), "best": variant.name == best,
            })  # fmt: skip
    if not rows:
        return None
    return Chart(
        f"Speed by shape ({notation.unit})",
        _map_spec(rows, [title(one) for one in manifest.variants if one.latency],
                  [_short(notation.heading(shape)) for shape in shapes(manifest)]),
        "; ".join(f"{row['variant']} at {row['shape']}: {row['text']}" for row in rows),
        "The bluer, the more times as fast as PyTorch at the same shape; orange is slower. A frame marks the fastest "
        "that may serve.",
    )  # fmt: skip


def differences_chart(manifest: Manifest) -> Chart | None:
    """The distribution of the differences of single texts or tokens; None where nothing was compared."""
    known = [(variant, variant.contrasts) for variant in manifest.variants if variant.contrasts is not None]
    series = [
        Series(title(variant), [
            Dot(rank / len(contrasts.differences), max(LEAST, value))
            for rank, value in enumerate(contrasts.differences)
        ])
        for variant, contrasts in known
        if contrasts.differences
    ]  # fmt: skip
    if not series:
        return None
    measure = next(contrasts.measure for _, contrasts in known)
    return percentile_chart(
        f"Differences of single {'tokens' if 'token' in measure else 'texts'}",
        series,
        Axis(measure, logarithmic=True),
        alt="; ".join(f"{one.name}: at most {one.dots[-1].y:.2g}" for one in series),
        caption=f"At p90, nine of ten are at least as close as that. Less than {LEAST:f} is drawn as that.",
    )


def sizes_chart(manifest: Manifest) -> Chart | None:
    """Disk and memory of each variant; None where neither is known."""
    bars = list(_sizes(manifest))
    if not bars:
        return None
    made = bar_chart(
        "What each variant takes", bars, Axis("MB"),
        alt="; ".join(f"{bar.group}, {bar.part}: {significant(bar.value)} MB" for bar in bars),
        caption="Memory is what is resident of a process that runs the variant alone, with Python and its libraries.",
    )  # fmt: skip
    return replace(made, spec={**made.spec, "padding": _PADDING})


def _short(heading: str) -> str:
    """A heading without the unit, which the title has."""
    return heading.removesuffix(" ms").removesuffix(" tok/s")


def _sizes(manifest: Manifest) -> Iterator[Bar]:
    for variant in manifest.variants:
        for part, size in (("memory", variant.memory_bytes), ("disk", variant.disk_bytes)):
            if size:
                yield Bar(title(variant), part, size / 1e6)


def _reference(manifest: Manifest) -> Variant:
    return next(variant for variant in manifest.variants if variant.name == REFERENCE)


def _speed_up(variant: Variant, manifest: Manifest) -> float:
    return speed_up(variant.latency, _reference(manifest).latency)


def _fastest(manifest: Manifest, shape: Shape) -> str:
    """The usable variant with the shortest median at ``shape``; empty where there is none."""
    medians = {
        variant.name: by_shape(variant.latency)[shape].median_ms
        for variant in manifest.variants
        if variant.usable and shape in by_shape(variant.latency)
    }
    return min(medians, key=lambda name: medians[name], default="")


def _named(variant: Variant, manifest: Manifest) -> str:
    """The variant's title, with what became of it."""
    if variant.name == manifest.auto:
        return f"{title(variant)}: auto"
    if manifest.by_shape is not None and variant.name == manifest.by_shape.variant:
        return f"{title(variant)}: beside auto"
    refused = variant.reasons and not variant.usable and variant.reasons != (NOT_ASKED_FOR,)
    return f"{title(variant)}: refused" if refused else title(variant)


def _measure_of(manifest: Manifest) -> str:
    if any("perplexity" in variant.agreement for variant in manifest.variants):
        return "difference of perplexity"
    if any(_cosine(variant) is not None for variant in manifest.variants):
        return "1 − smallest cosine of an answer"
    return "what is missing of the task's metric"


def _apart(variant: Variant) -> float | None:
    """How far a variant is from the reference, by what :func:`_measure_of` names; None where that is not known."""
    figures: Mapping[str, Mapping[str, Any]] = variant.agreement
    if variant.name == REFERENCE:
        return LEAST
    if "perplexity" in figures:
        return max(LEAST, abs(float(figures["perplexity"]["delta"])))
    cosine = _cosine(variant)
    if cosine is not None:
        return max(LEAST, 1 - cosine)
    return max(LEAST, -float(figures["task"]["delta"])) if "task" in figures else None


def _cosine(variant: Variant) -> float | None:
    """The smallest cosine of what the task answers with, or where only its parts have one of these."""
    found = {
        name: one["cosine_min"]
        for name, one in variant.agreement.items()
        if name not in ("task", "neighbours") and one.get("cosine_min") is not None
    }
    answers = [value for name, value in found.items() if name != "last_hidden_state"] or list(found.values())
    return min(answers, default=None)


def _map_spec(rows: Sequence[Mapping[str, Any]], variants: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """Rectangles with a number in each, wide enough for the numbers."""
    altair = load("A chart", "altair")
    factors = [row["factor"] for row in rows]
    slowest, furthest = min(0.9, *factors), max(1.1, *factors)
    base = altair.Chart(altair.Data(values=list(rows))).encode(
        x=altair.X("shape:N", title=None, sort=list(columns), axis=altair.Axis(orient="top", labelAngle=0)),
        y=altair.Y("variant:N", title=None, sort=list(variants)),
    )
    colour = altair.Color(
        "factor:Q",
        scale=altair.Scale(type="log", domain=[slowest, 1, furthest], range=[_SLOW, _EVEN, _FAST], interpolate="lab"),
        legend=None,
    )
    tips = [altair.Tooltip("variant:N"), altair.Tooltip("shape:N", title="at"), altair.Tooltip("text:N", title="time"),
            altair.Tooltip("factor:Q", title="speed-up", format=".2f")]  # fmt: skip
    tiles = base.mark_rect(stroke="white", strokeWidth=1).encode(color=colour, tooltip=tips)
    ink = altair.condition(f"datum.factor > {furthest**0.55:.4g}", altair.value("white"), altair.value("#1c2330"))
    numbers = base.mark_text(fontSize=12).encode(text="text:N", color=ink)
    frames = base.transform_filter("datum.best").mark_rect(
        fill=None, fillOpacity=0, stroke="#d55e00", strokeWidth=2.5, cornerRadius=2
    )
    chart = altair.layer(tiles, numbers, frames).properties(width=820, height=max(80, 34 * len(variants)))
    spec: dict[str, Any] = chart.to_dict()
    del spec["config"]
    return spec | {"padding": _PADDING}
