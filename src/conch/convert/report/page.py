"""The report of a conversion as a page: the choice and its reasons, and everything needed to judge or repeat it.

Everything is taken from the manifest, so that the page can be regenerated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from conch.checkpoints.manifest import Contrasts, Manifest, Variant
from conch.convert.measure import by_shape, speed_up
from conch.convert.plan import default_name
from conch.convert.report.table import (
    conditions,
    facts,
    is_disturbed,
    is_refused,
    log_lines,
    notation_of,
    reference_of,
    shapes,
    title,
    variants_table,
)
from conch.convert.verdict import NOT_ASKED_FOR, REFERENCE
from conch.machine.extras import load
from conch.measure.reports.charts import Axis, Bar, Dot, Series, bar_chart, line_chart, percentile_chart
from conch.measure.reports.numbers import NONE, bytes_of, significant
from conch.measure.reports.report import (
    Block,
    Bullets,
    Chart,
    CodeBlock,
    Column,
    Note,
    Paragraph,
    Properties,
    Report,
    Row,
    Section,
    Table,
    Tile,
    Tiles,
    Tone,
)  # fmt: skip
from conch.measure.texts.shapes import Shape

#: Smaller differences are rounding, and are drawn at this value.
LEAST: Final = 1e-6
#: Padding, e.g. for names at the left, which may be wider in the reader's fonts than planned (pixels).
_PADDING: Final = {"left": 16, "right": 8, "top": 5, "bottom": 5}
#: Colors of the map, from slower than PyTorch to much faster.
_SLOW: Final = "#e69f00"
_EVEN: Final = "#f4f6f9"
_FAST: Final = "#0072b2"


def tradeoff_chart(manifest: Manifest) -> Chart | None:
    """Chart the measured variants by speed-up and by difference from the reference; None if there are none."""
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
        alt="; ".join(f"{line.name}: {line.dots[0].x:.2f}x, {line.dots[0].y:.2g}" for line in series),
        caption=f"Faster variants are to the right, and those closer to PyTorch's results are lower. Less "
        f"than {LEAST:f} is rounding, and is drawn at {LEAST:f}.",
    )


def speed_map(manifest: Manifest) -> Chart | None:
    """Chart the time of each variant at each shape, colored by the speed-up over PyTorch.

    The fastest variant that may serve is highlighted. None if nothing was measured.
    """
    reference = by_shape(reference_of(manifest).latency)
    notation = notation_of(manifest)
    rows: list[dict[str, Any]] = []
    for shape in shapes(manifest):
        best = _fastest(manifest, shape)
        for variant in manifest.variants:
            measured = by_shape(variant.latency).get(shape)
            if measured is None:
                continue
            factor = reference[shape].median_ms / measured.median_ms if shape in reference else 1.0
            rows.append({
                "variant": title(variant), "shape": _short(notation.heading(shape)), "text": notation.speed(measured),
                "factor": float(f"{factor:.4g}"), "best": variant.name == best,
            })  # fmt: skip
    if not rows:
        return None
    return Chart(
        f"Speed by shape ({notation.unit})",
        _map_spec(rows, [title(variant) for variant in manifest.variants if variant.latency],
                  [_short(notation.heading(shape)) for shape in shapes(manifest)]),
        "; ".join(f"{row['variant']} at {row['shape']}: {row['text']}" for row in rows),
        "Blue variants are faster than PyTorch at the same shape, orange ones are slower. A frame marks the fastest "
        "accepted variant.",
    )  # fmt: skip


def differences_chart(manifest: Manifest) -> Chart | None:
    """Chart the distribution of differences of single texts or tokens; None if nothing was compared."""
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
        alt="; ".join(f"{line.name}: at most {line.dots[-1].y:.2g}" for line in series),
        caption=f"Nine of ten differences are below the value at p90. Less than {LEAST:f} is drawn at {LEAST:f}.",
    )


def sizes_chart(manifest: Manifest) -> Chart | None:
    """Chart disk and memory of each variant; None if unknown."""
    bars = list(_sizes(manifest))
    if not bars:
        return None
    chart = bar_chart(
        "What each variant takes", bars, Axis("MB"),
        alt="; ".join(f"{bar.group}, {bar.part}: {significant(bar.value)} MB" for bar in bars),
        caption="Memory is the resident memory of a process that runs only the variant, including Python "
                "and its libraries.",
    )  # fmt: skip
    return replace(chart, spec={**chart.spec, "padding": _PADDING})


def _short(heading: str) -> str:
    """Remove the unit from a heading, because the title has it."""
    return heading.removesuffix(" ms").removesuffix(" tok/s")


def _sizes(manifest: Manifest) -> Iterator[Bar]:
    for variant in manifest.variants:
        for part, size in (("memory", variant.memory_bytes), ("disk", variant.disk_bytes)):
            if size:
                yield Bar(title(variant), part, size / 1e6)


def _speed_up(variant: Variant, manifest: Manifest) -> float:
    return speed_up(variant.latency, reference_of(manifest).latency)


def _fastest(manifest: Manifest, shape: Shape) -> str:
    """Return the usable variant with the shortest median at ``shape``; empty if there is none."""
    medians = {
        variant.name: by_shape(variant.latency)[shape].median_ms
        for variant in manifest.variants
        if variant.usable and shape in by_shape(variant.latency)
    }
    return min(medians, key=lambda name: medians[name], default="")


def _named(variant: Variant, manifest: Manifest) -> str:
    """Return the variant's title with its role: ``auto``, ``beside auto`` or ``refused``."""
    if variant.name == manifest.auto:
        return f"{title(variant)}: auto"
    if manifest.by_shape is not None and variant.name == manifest.by_shape.variant:
        return f"{title(variant)}: beside auto"
    refused = variant.reasons and not variant.usable and variant.reasons != (NOT_ASKED_FOR,)
    return f"{title(variant)}: refused" if refused else title(variant)


def _measure_of(manifest: Manifest) -> str:
    if any("perplexity" in variant.agreement for variant in manifest.variants):
        return "difference of perplexity"
    if any("transcripts" in variant.agreement for variant in manifest.variants):
        return "share of words that differ from PyTorch's transcripts"
    if any(_cosine(variant) is not None for variant in manifest.variants):
        return "1 − smallest cosine of an output"
    return "loss of the task's metric"


def _apart(variant: Variant) -> float | None:
    """Return a variant's difference from the reference in the measure of :func:`_measure_of`; None if unknown."""
    figures: Mapping[str, Mapping[str, Any]] = variant.agreement
    if variant.name == REFERENCE:
        return LEAST
    if "perplexity" in figures:
        return max(LEAST, abs(float(figures["perplexity"]["delta"])))
    if "transcripts" in figures:
        return max(LEAST, float(figures["transcripts"]["changed"]))
    cosine = _cosine(variant)
    if cosine is not None:
        return max(LEAST, 1 - cosine)
    return max(LEAST, -float(figures["task"]["delta"])) if "task" in figures else None


def _cosine(variant: Variant) -> float | None:
    """Return the smallest cosine of all outputs."""
    cosines = [
        figures["cosine_min"]
        for name, figures in variant.agreement.items()
        if name not in ("task", "neighbours") and figures.get("cosine_min") is not None
    ]
    return min(cosines, default=None)


def _map_spec(rows: Sequence[Mapping[str, Any]], variants: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """Return rectangles with a number in each, wide enough for the numbers."""
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


def report(manifest: Manifest, name: str = "") -> Report:
    """Return the report of the model ``name``, without sections for which the manifest has no data.

    The title is the id of a model from the Hub: the folder of any other checkpoint may be called anything.
    """
    source = manifest.source
    sections = [
        Section(
            "Choice of the variant", [*_charts(tradeoff_chart(manifest)), *_choice(manifest), variants_table(manifest)]
        ),
        Section("Speed by shape", [*_charts(speed_map(manifest)), *_by_shape(manifest)]),
        Section("Differences of outputs", [*_charts(differences_chart(manifest))]),
        Section("The ten texts with the largest differences", [*_worst(manifest)]),
        Section("Refused variants", [*_refused(manifest)]),
        Section("Memory and disk", [*_charts(sizes_chart(manifest))]),
        Section("The machine", [Properties(list(_machine(manifest)))]),
        Section("How to reproduce it", [*_reproduce(manifest)]),
    ]
    return Report(
        f"Conversion of {source.model if source.revision else name or default_name(source.model)}",
        _lead(manifest),
        [section for section in sections if section.blocks],
        [_tiles(manifest), *(Note("warning", f"{warning}.") for warning in manifest.warnings)],
        f"Written by conch {manifest.conch} from conch.json of {manifest.created}.",
    )


def _charts(chart: Chart | None) -> list[Block]:
    return [] if chart is None else [chart]


def _lead(manifest: Manifest) -> str:
    auto = manifest.variant(manifest.auto)
    beside = ""
    if manifest.by_shape is not None:
        other = title(manifest.variant(manifest.by_shape.variant))
        beside = f", together with {other} for the shapes where that is faster"
    why = (
        "it was refused, but serves because of --force"
        if auto.forced
        else "the fastest that agrees with the checkpoint"
    )
    if is_disturbed(manifest):
        why += "; other processes used the machine, so its speed is not reliable"
    return f"{title(auto)} serves {manifest.task}{beside}: {why}."


def _tiles(manifest: Manifest) -> Tiles:
    auto = manifest.variant(manifest.auto)
    reference = reference_of(manifest)
    faster = speed_up(auto.latency, reference.latency) if auto.latency and reference.latency else None
    shape = min(by_shape(auto.latency), default=None)
    disturbed = is_disturbed(manifest)
    grey: Tone = "muted" if disturbed else ""
    marked = "disturbed; " if disturbed else ""
    items = [Tile(f"{significant(faster)}x", "speed-up", f"{marked}over PyTorch in fp32", grey or "good")]
    if shape is not None:
        notation = notation_of(manifest)
        before = by_shape(reference.latency).get(shape)
        detail = f"PyTorch: {notation.speed(before)}" if before is not None else ""
        speed = notation.speed(by_shape(auto.latency)[shape])
        items.append(Tile(speed, notation.heading(shape), f"{marked}{detail}".removesuffix("; "), grey))
    agreement = notation_of(manifest).agreement(auto.agreement).split("; ")[-1]
    if agreement:
        name, _, value = agreement.partition(" (")[0].rpartition(" ")
        items.append(Tile(value, name.removesuffix(" ≥"), "1 is PyTorch's own"))
    for kind, size, original in (
        ("memory", auto.memory_bytes, reference.memory_bytes),
        ("disk", auto.disk_bytes, reference.disk_bytes),
    ):
        if size:
            items.append(Tile(bytes_of(size), kind, f"PyTorch: {bytes_of(original)}" if original else ""))
    refused = sum(1 for variant in manifest.variants if is_refused(variant))
    items.append(Tile(f"{len(manifest.variants) - refused} of {len(manifest.variants)}", "variants agree"))
    return Tiles(items)


def _choice(manifest: Manifest) -> Iterator[Block]:
    if manifest.choice:
        yield Bullets([f"{reason}." for reason in manifest.choice])


def _by_shape(manifest: Manifest) -> Iterator[Block]:
    companion = manifest.by_shape
    if companion is None:
        return
    other = title(manifest.variant(companion.variant))
    closeness = companion.agreement.get("cosine_min")
    share = companion.agreement.get("argmax")
    same = f"at least {closeness:.4f}" if closeness is not None else NONE
    yield Paragraph(
        f"The model keeps two variants in memory. Each run uses the one that is expected to be faster for its batch "
        f"size and length, which is {companion.overall:.2f} times as fast as one variant alone. Together they use "
        f"{bytes_of(companion.memory_bytes)} of memory. The variant for a text depends on its batch: the cosine "
        f"between the results of both is {same}"
        + (f", and the share of equal labels is {share:.4f}." if share is not None else ".")
    )
    yield Table(
        "Choice of the variant by shape",
        [Column("batch x tokens"), Column(f"{other}: times as fast", True), Column("runs")],
        [
            Row([
                f"{gain.batch}x{gain.tokens}", f"{gain.gain:.2f}",
                other
                if companion.faster_at(gain.batch, gain.tokens)
                else title(manifest.variant(manifest.auto)),
            ])
            for gain in companion.gains
        ],
    )  # fmt: skip


def _worst(manifest: Manifest) -> Iterator[Block]:
    """Yield a table for each variant below fp32 with differences, or for those in fp32 if no other has any."""
    known = [
        (variant, variant.contrasts)
        for variant in manifest.variants
        if variant.contrasts is not None and variant.contrasts.worst
    ]
    coarse = [(variant, contrasts) for variant, contrasts in known if variant.precision != "fp32"]
    for variant, contrasts in coarse or known:
        yield _worst_table(title(variant), contrasts)


def _worst_table(title: str, contrasts: Contrasts) -> Table:
    cosines = any(contrast.cosine is not None for contrast in contrasts.worst)
    writes = "token" in contrasts.measure
    same = "cosine" in contrasts.measure
    what = (
        "the continuations with the earliest differences"
        if writes
        else f"the texts with the largest {contrasts.measure}"
    )
    headings = [Column("prompt" if writes else "text"), Column("PyTorch"), Column(title)]
    headings += [Column("cosine", True)] if cosines else []
    headings += [] if same else [Column("share that differs" if writes else "difference", True)]
    rows = [
        Row([
            contrast.text, contrast.reference, contrast.variant,
            *([NONE if contrast.cosine is None else f"{contrast.cosine:.4f}"] if cosines else []),
            *([] if same else [significant(contrast.difference)]),
        ])
        for contrast in contrasts.worst
    ]  # fmt: skip
    return Table(f"{title}: {what}", headings, rows)


def _refused(manifest: Manifest) -> Iterator[Block]:
    refused = [variant for variant in manifest.variants if is_refused(variant)]
    if not refused:
        yield Paragraph("None: all requested variants agree with the checkpoint.")
        return
    rows = [
        Row([title(variant), "; ".join(variant.reasons), "with --force" if variant.forced else "no"], "bad")
        for variant in refused
    ]
    yield Table("Variants that do not serve", [Column("variant"), Column("why"), Column("accepted")], rows)


def _machine(manifest: Manifest) -> Iterator[tuple[str, str]]:
    machine = manifest.machine
    yield "conditions", conditions(manifest)
    for name, label, unit in (
        ("memory", "memory", 2**30), ("governor", "governor", 0), ("virtual", "kind", 0), ("quota", "quota (cores)", 0)
    ):  # fmt: skip
        value = machine.get(name)
        if value:
            yield label, f"{value / unit:.0f} GiB" if unit else str(value)


def _reproduce(manifest: Manifest) -> Iterator[Block]:
    command = manifest.settings.get("command")
    if command:
        yield CodeBlock(str(command), "The command:")
    known = [("checkpoint", manifest.source.model), *facts(manifest)]
    yield Properties([(name, value) for name, value in known if name != "measured on"])
    yield _hashes("The checkpoint's files", manifest.source.files)
    yield _hashes("The files that were written", manifest.files)
    lines = "\n".join(log_lines(manifest))
    if lines:
        yield CodeBlock(lines, "All figures:")
    yield Paragraph(notation_of(manifest).legend)


def _hashes(caption: str, files: Mapping[str, str]) -> Table:
    rows = [Row([name, digest]) for name, digest in files.items()]
    return Table(caption, [Column("file"), Column("hash")], rows)
