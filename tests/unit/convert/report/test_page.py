"""The report of a conversion as a page, made of the manifest alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from conch.checkpoints.manifest import Companion, Contrast, Contrasts, Gain, Manifest
from conch.convert.report.page import report
from conch.measure.reports.html import html
from conch.measure.reports.report import Chart, Report, Section, Table, Tiles
from tests.unit.convert.report.test_document import MANIFEST

WORST = Contrasts(
    "1 − cosine of the two embeddings",
    (0.001, 0.02),
    (Contrast("<b>What</b> a price!", "nearest (0.301): Never!", "nearest (0.289): Always!", 0.02, 0.98),),
)
WHOLE = replace(
    MANIFEST,
    variants=(MANIFEST.variants[0], replace(MANIFEST.variants[1], contrasts=WORST), *MANIFEST.variants[2:]),
    choice=("'onnxruntime-int8' is 5.00x as fast as torch-fp32 over all shapes",),
    settings={**MANIFEST.settings, "command": "conch convert -m 'a <b>'"},
    files={"a.onnx": "sha256:12ab"},
)


def section(page: Report, title: str) -> Section:
    return next(one for one in page.sections if one.title == title)


def tables(page: Report, title: str) -> list[Table]:
    return [block for block in section(page, title).blocks if isinstance(block, Table)]


def chart(page: Report, title: str) -> Chart:
    return next(block for block in section(page, title).blocks if isinstance(block, Chart))


def rows(found: Any) -> Iterator[dict[str, Any]]:
    """All rows of data in a specification."""
    if isinstance(found, dict):
        values = found.get("data", {}).get("values") if isinstance(found.get("data"), dict) else None
        yield from values or ()
        for one in found.values():
            yield from rows(one)
    elif isinstance(found, list):
        for one in found:
            yield from rows(one)


def test_page_shows_every_variant_by_speed_and_agreement() -> None:
    shown = chart(report(WHOLE), "Choice of the variant")

    by_series = {row["series"]: row for row in rows(shown.spec)}
    assert by_series["ONNX Runtime (int8): auto"]["x"] == pytest.approx(5)
    assert by_series["ONNX Runtime (int8): auto"]["y"] == pytest.approx(0.02)
    assert by_series["ONNX Runtime (int8, static): refused"]["x"] == pytest.approx(200**0.5, rel=1e-4)
    # What could not be built has no place.
    assert len(by_series) == 3


def test_map_frames_the_fastest_that_may_serve() -> None:
    cells = {(row["variant"], row["shape"]): row for row in rows(chart(report(WHOLE), "Speed by shape").spec)}

    assert cells["ONNX Runtime (int8)", "1x16"]["factor"] == 5
    assert cells["ONNX Runtime (int8)", "1x16"]["best"]
    # It is faster, but was refused.
    assert not cells["ONNX Runtime (int8, static)", "1x16"]["best"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_speed_up_that_others_disturbed_is_grey(place: int) -> None:
    """Whether the variant that serves was disturbed, or what it is compared with."""
    variants = list(WHOLE.variants)
    disturbed = variants[place]
    variants[place] = replace(disturbed, latency=tuple(replace(one, busy=True) for one in disturbed.latency))
    shown = report(replace(WHOLE, variants=tuple(variants)))
    quiet = report(WHOLE)

    tiles = {tile.label: tile for block in shown.opening if isinstance(block, Tiles) for tile in block.items}
    assert (tiles["speed-up"].tone, tiles["speed-up"].detail) == ("muted", "disturbed; over PyTorch in fp32")
    assert tiles["1x16 ms"].tone == "muted" and tiles["disk"].tone == ""
    assert "other processes used the machine" in shown.lead
    assert "other processes" not in quiet.lead
    toned = [row.tone for table in tables(shown, "Choice of the variant") for row in table.rows]
    assert "good" not in toned
    assert {tile.tone for block in quiet.opening if isinstance(block, Tiles) for tile in block.items} == {"good", ""}


def test_worst_texts_stand_side_by_side() -> None:
    (table,) = tables(report(WHOLE), "The ten texts with the largest differences")

    assert [column.heading for column in table.columns][:3] == ["text", "PyTorch", "ONNX Runtime (int8)"]
    assert [*table.rows[0].cells] == [
        "<b>What</b> a price!", "nearest (0.301): Never!", "nearest (0.289): Always!", "0.9800",
    ]  # fmt: skip


def test_a_size_that_was_not_measured_is_left_out() -> None:
    tiles = next(block for block in report(MANIFEST).opening if isinstance(block, Tiles))
    assert [tile.detail for tile in tiles.items if tile.label in ("memory", "disk")] == ["", ""]


def test_what_was_refused_says_why() -> None:
    (table,) = tables(report(WHOLE), "Refused variants")

    assert [row.cells[1] for row in table.rows] == [
        "cosine_min 0.93 of embedding is below 0.97", "tensorrt is not installed: pip install tensorrt",
    ]  # fmt: skip


def test_two_variants_say_which_runs_where() -> None:
    companion = Companion("torch-fp32", (Gain(1, 16, 0.2), Gain(8, 16, 1.4)), 1.18, 900_000_000, {"cosine_min": 0.999})
    (table,) = tables(report(replace(WHOLE, by_shape=companion)), "Speed by shape")

    assert [[*row.cells] for row in table.rows] == [
        ["1x16", "0.20", "ONNX Runtime (int8)"],
        ["8x16", "1.40", "PyTorch (fp32)"],
    ]


def test_page_is_made_again_from_the_written_manifest() -> None:
    read = Manifest.from_json(json.loads(json.dumps(WHOLE.to_json())))

    assert report(read) == report(WHOLE)


def test_texts_of_users_are_escaped_and_nothing_is_loaded() -> None:
    page = html(report(WHOLE))

    assert "&lt;b&gt;What&lt;/b&gt; a price!" in page and "<b>What</b>" not in page
    assert "conch convert -m &#x27;a &lt;b&gt;&#x27;" in page
    # The library that draws charts has such words in it.
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<link|<img|@import|src=", markup)


def test_manifest_of_an_older_conch_has_a_page_without_what_it_lacks() -> None:
    titles = [one.title for one in report(MANIFEST).sections]

    assert "The ten texts with the largest differences" not in titles
    assert "Differences of outputs" not in titles
    assert "Speed by shape" in titles


def test_conversion_in_which_nothing_was_measured_has_a_page() -> None:
    bare = replace(WHOLE, variants=tuple(replace(variant, latency=()) for variant in WHOLE.variants))

    assert "Speed by shape" not in [one.title for one in report(bare).sections]


def test_variant_that_serves_by_force_is_not_said_to_agree() -> None:
    first, auto, *others = WHOLE.variants
    forced = replace(auto, passed=False, forced=True, reasons=("cosine_min 0.93 of embedding is below 0.97",))

    assert report(WHOLE).lead.endswith(": the fastest that agrees with the checkpoint.")
    lead = report(replace(WHOLE, variants=(first, forced, *others))).lead
    assert lead == "ONNX Runtime (int8) serves feature-extraction: it was refused, but serves because of --force."
