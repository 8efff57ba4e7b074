"""The report of a conversion as a page: what was chosen and why, with all that others need to judge or repeat it.

Pure; everything is taken from the manifest, so that it can be made again from that alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from conch.checkpoints.contrasts import Contrasts
from conch.checkpoints.manifest import Manifest, Variant
from conch.convert.measure import by_shape, speed_up
from conch.convert.plan import default_name
from conch.convert.report import columns
from conch.convert.report.charts import differences_chart, sizes_chart, speed_map, tradeoff_chart
from conch.convert.report.document import facts, log_lines
from conch.convert.variant import REFERENCE
from conch.convert.verdict import NOT_ASKED_FOR
from conch.reports.numbers import NONE, bytes_of, significant
from conch.reports.page import (
    Block,
    Bullets,
    Chart,
    CodeBlock,
    Column,
    Note,
    Page,
    Paragraph,
    Properties,
    Row,
    Section,
    Table,
    Tile,
    Tiles,
    Tone,
)  # fmt: skip


def page_of(manifest: Manifest) -> Page:
    """The page; sections for which the manifest has nothing are left out."""
    sections = [
        Section("Which variant, and why", [*_charts(tradeoff_chart(manifest)), *_choice(manifest), _table(manifest)]),
        Section("Where each is fastest", [*_charts(speed_map(manifest)), *_by_shape(manifest)]),
        Section("How far answers differ", [*_charts(differences_chart(manifest))]),
        Section("The worst ten texts, side by side", [*_worst(manifest)]),
        Section("What was refused, and why", [*_refused(manifest)]),
        Section("Memory and disk", [*_charts(sizes_chart(manifest))]),
        Section("The machine", [Properties(list(_machine(manifest)))]),
        Section("How to reproduce it", [*_reproduce(manifest)]),
    ]
    return Page(
        f"Conversion of {manifest.source.model if manifest.source.revision else default_name(manifest.source.model)}",
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
        other = columns.title(manifest.variant(manifest.by_shape.variant))
        beside = f", with {other} beside it for the shapes where that is faster"
    why = "it was refused, and serves by --force" if auto.forced else "the fastest that agrees with the checkpoint"
    if _disturbed(manifest):
        why += "; other processes used the machine, so its speed is not reliable"
    return f"{columns.title(auto)} serves {manifest.task}{beside}: {why}."


def _tiles(manifest: Manifest) -> Tiles:
    auto = manifest.variant(manifest.auto)
    reference = _latency(manifest, REFERENCE)
    faster = speed_up(auto.latency, reference.latency) if auto.latency and reference.latency else None
    shape = min(by_shape(auto.latency), default=None)
    disturbed = _disturbed(manifest)
    grey: Tone = "muted" if disturbed else ""
    marked = "disturbed; " if disturbed else ""
    items = [Tile(f"{significant(faster)}x", "speed-up", f"{marked}over PyTorch in fp32", grey or "good")]
    if shape is not None:
        notation = columns.notation_of(manifest)
        before = by_shape(reference.latency).get(shape)
        detail = f"PyTorch: {notation.speed(before)}" if before is not None else ""
        speed = notation.speed(by_shape(auto.latency)[shape])
        items.append(Tile(speed, notation.heading(shape), f"{marked}{detail}".removesuffix("; "), grey))
    agreement = columns.notation_of(manifest).agreement(auto.agreement).split("; ")[-1]
    if agreement:
        name, _, value = agreement.partition(" (")[0].rpartition(" ")
        items.append(Tile(value, name.removesuffix(" ≥"), "1 is PyTorch's own"))
    if auto.memory_bytes:
        items.append(Tile(bytes_of(auto.memory_bytes), "memory", f"PyTorch: {bytes_of(reference.memory_bytes)}"))
    if auto.disk_bytes:
        items.append(Tile(bytes_of(auto.disk_bytes), "disk", f"PyTorch: {bytes_of(reference.disk_bytes)}"))
    refused = sum(1 for variant in manifest.variants if _is_refused(variant))
    items.append(Tile(f"{len(manifest.variants) - refused} of {len(manifest.variants)}", "variants agree"))
    return Tiles(items)


def _disturbed(manifest: Manifest) -> bool:
    """Whether the speed of what serves rests on figures of a machine that other processes used."""
    return columns.is_busy(manifest.variant(manifest.auto), _latency(manifest, REFERENCE).latency)


def _latency(manifest: Manifest, name: str) -> Variant:
    return next(variant for variant in manifest.variants if variant.name == name)


def _choice(manifest: Manifest) -> Iterator[Block]:
    if manifest.choice:
        yield Bullets([f"{reason}." for reason in manifest.choice])


def _table(manifest: Manifest) -> Table:
    """All variants, without their speeds at each shape, for which there is a map."""
    names = columns.headings(manifest)
    count = len(columns.shapes(manifest))
    places = [0, *range(count + 1, len(names))]
    made = [Column(names[place], 0 < place <= count + 3) for place in places]
    rows = [
        Row([cells[place] for place in places], _tone(variant, manifest)) for variant, cells in columns.rows(manifest)
    ]
    return Table("All variants", made, rows)


def _tone(variant: Variant, manifest: Manifest) -> Tone:
    if variant.name == manifest.auto:
        return "" if _disturbed(manifest) else "good"
    return "bad" if _is_refused(variant) else "" if variant.usable else "muted"


def _by_shape(manifest: Manifest) -> Iterator[Block]:
    found = manifest.by_shape
    if found is None:
        return
    other = columns.title(manifest.variant(found.variant))
    closeness = found.agreement.get("cosine_min")
    share = found.agreement.get("argmax")
    same = f"at least {closeness:.4f}" if closeness is not None else NONE
    yield Paragraph(
        f"Two variants are held, and each run goes to the one that is expected to be faster for its batch size and "
        f"length: {found.overall:.2f} times as fast as one alone. Together they take {bytes_of(found.memory_bytes)} of "
        f"memory. A text may so be answered by either, depending on its batch: the cosine of two such answers is {same}"
        + (f", and the share of equal labels {share:.4f}." if share is not None else ".")
    )
    yield Table(
        "Which of the two runs",
        [Column("batch x tokens"), Column(f"{other}: times as fast", True), Column("runs")],
        [
            Row([
                f"{one.batch}x{one.tokens}", f"{one.gain:.2f}",
                other if found.faster_at(one.batch, one.tokens) else columns.title(manifest.variant(manifest.auto)),
            ])
            for one in found.gains
        ],
    )  # fmt: skip


def _worst(manifest: Manifest) -> Iterator[Block]:
    """A table for each variant below fp32 whose answers differ, and for those in fp32 where no other's do."""
    known = [(one, one.contrasts) for one in manifest.variants if one.contrasts is not None and one.contrasts.worst]
    coarse = [(variant, contrasts) for variant, contrasts in known if variant.precision != "fp32"]
    for variant, contrasts in coarse or known:
        yield _worst_table(columns.title(variant), contrasts)


def _worst_table(title: str, contrasts: Contrasts) -> Table:
    cosines = any(one.cosine is not None for one in contrasts.worst)
    writes = "token" in contrasts.measure
    same = "cosine" in contrasts.measure
    what = (
        "the continuations that go another way soonest" if writes else f"the texts with the largest {contrasts.measure}"
    )
    headings = [Column("prompt" if writes else "text"), Column("PyTorch says"), Column(f"{title} says")]
    headings += [Column("cosine", True)] if cosines else []
    headings += [] if same else [Column("share that differs" if writes else "difference", True)]
    rows = [
        Row([
            one.text, one.reference, one.variant,
            *([NONE if one.cosine is None else f"{one.cosine:.4f}"] if cosines else []),
            *([] if same else [significant(one.difference)]),
        ])
        for one in contrasts.worst
    ]  # fmt: skip
    return Table(f"{title}: {what}", headings, rows)


def _is_refused(variant: Variant) -> bool:
    return bool(variant.reasons) and not variant.passed and variant.reasons != (NOT_ASKED_FOR,)


def _refused(manifest: Manifest) -> Iterator[Block]:
    refused = [variant for variant in manifest.variants if _is_refused(variant)]
    if not refused:
        yield Paragraph("Nothing: every variant that was asked for agrees with the checkpoint.")
        return
    rows = [
        Row([columns.title(variant), "; ".join(variant.reasons), "yes, by --force" if variant.forced else "no"], "bad")
        for variant in refused
    ]
    yield Table("Variants that do not serve", [Column("variant"), Column("why"), Column("may serve")], rows)


def _machine(manifest: Manifest) -> Iterator[tuple[str, str]]:
    machine = manifest.machine
    yield "conditions", columns.conditions(manifest)
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
    yield Paragraph(columns.notation_of(manifest).legend)


def _hashes(caption: str, files: Mapping[str, str]) -> Table:
    rows = [Row([name, digest]) for name, digest in files.items()]
    return Table(caption, [Column("file"), Column("hash")], rows)
