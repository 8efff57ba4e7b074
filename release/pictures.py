"""``make pictures``: the README's pictures of reports, from the samples of the tests; needs Chromium."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from PIL import Image

from conch.measure.analyze.report.page import report as analyze_report
from conch.measure.perf.figures import LatencyFigures
from conch.measure.perf.measured import LevelDistributions, Measured
from conch.measure.perf.report.page import report as perf_report
from conch.measure.reports.html import html
from tests.unit.measure.analyze.report.analyses import analysis
from tests.unit.measure.perf.report.test_perf_files import PLAN, level

IMAGES: Final = Path(__file__).parents[1] / "docs/images"
#: Requests per second and the median latency (s) by number of clients; the last level is disturbed.
LEVELS: Final = {1: (160.0, 0.0062), 2: (290.0, 0.0068), 4: (470.0, 0.0084), 8: (610.0, 0.0129), 16: (500.0, 0.0310)}


def main() -> None:
    levels = [_level(*item) for item in LEVELS.items()]
    levels[-1] = replace(levels[-1], disturbed=True)
    spreads = [LevelDistributions([(0.0, 0.8 * m), (0.5, m), (0.9, 1.4 * m), (0.99, 2 * m)], (), ())
               for _, m in LEVELS.values()]  # fmt: skip
    plan = replace(PLAN, model="sample")
    draw(
        html(perf_report(plan, "Sample data, not measured", "conch perf -m sample", levels, spreads)), "perf.png", 1240
    )
    draw(html(analyze_report(analysis())), "analyze.png", 1120)


def _level(clients: int, figures: tuple[float, float]) -> Measured:
    throughput, median = figures
    made = level(clients)
    shares = {
        percentile: factor * median for percentile, factor in zip(PLAN.percentiles, (1, 1.4, 1.6, 2), strict=True)
    }
    latency = LatencyFigures(1.1 * median, 0.2 * median, shares, 3 * median)
    return replace(
        made,
        figures=replace(made.figures, throughput=throughput, requests=round(15 * throughput), latency=latency),
        windows=(),
        server=(),
    )


def draw(page: str, name: str, height: int) -> None:
    """Write the upper part of a page as an image."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "page.html").write_text(page)
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--hide-scrollbars",
        ]
        size = [f"--window-size=1120,{height}", "--virtual-time-budget=3000", f"--screenshot={IMAGES / name}"]
        subprocess.run(
            ["chromium", *options, *size, f"file://{folder}/page.html"], check=True, stderr=subprocess.DEVNULL
        )
    with Image.open(IMAGES / name) as picture:
        picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(IMAGES / name, optimize=True)


if __name__ == "__main__":
    main()
