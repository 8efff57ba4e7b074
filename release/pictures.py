"""``make pictures``: the pictures of the documentation; needs Chromium, Node and the packages of ``console/``.

Pictures of reports are made from the samples of the tests, those of the console from the models of ``conch demo`` under
some load: of a quiet machine, if possible.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from PIL import Image

from conch.checkpoints.manifest import Manifest, Source
from conch.cli.demo.command import DemoClient, build
from conch.convert.report.page import report as convert_report
from conch.measure.analyze.report.page import report as analyze_report
from conch.measure.perf.figures import LatencyFigures
from conch.measure.perf.measured import LevelDistributions, Measured
from conch.measure.perf.report.page import report as perf_report
from conch.measure.reports.html import html
from tests.servers import ConchServer
from tests.unit.convert.report.test_document import MANIFEST
from tests.unit.measure.analyze.report.analyses import analysis
from tests.unit.measure.perf.report.test_perf_files import PLAN, level

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs/images"
SCENARIOS: Final = ROOT / "tests/console/browser.mjs"
#: The time of the load that the console shows, and the timeout of its pictures (s).
TRAFFIC_SECONDS: Final = 180
SENTENCE: Final = "Where can I return a book that I borrowed last month from the library near the station"
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
    draw(html(convert_report(_conversion())), "convert.png", 935)
    draw_console()


def _conversion() -> Manifest:
    reference, fastest, *others = MANIFEST.variants
    same = {"embedding": {**reference.agreement["embedding"], "cosine_min": 1.0}}
    reference = replace(reference, agreement=same, disk_bytes=90_900_000, memory_bytes=549_000_000)
    return replace(MANIFEST, source=Source("sample", "data"), variants=(reference, fastest, *others))


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
    compress(IMAGES / name)


def draw_console() -> None:
    """Write the pictures of the console, which the scenario ``pictures`` of its tests takes."""
    with tempfile.TemporaryDirectory() as folder, ConchServer(build(Path(folder))) as server:
        with ThreadPoolExecutor(1) as pool, DemoClient(f"http://{server.http}") as client:
            stop = threading.Event()
            traffic = pool.submit(send_traffic, client, stop)
            stop.wait(TRAFFIC_SECONDS)
            subprocess.run(
                ["node", SCENARIOS, "pictures", f"http://{server.http}", IMAGES], check=True, timeout=TRAFFIC_SECONDS
            )
            stop.set()
            traffic.result()
    for picture in IMAGES.glob("console*.png"):
        compress(picture)


def send_traffic(client: DemoClient, stop: threading.Event) -> None:
    """Send requests to all models, with a varying rate, until ``stop`` is set."""
    words = SENTENCE.split()
    for number in itertools.count():
        text = " ".join(words[: 3 + number * 7 % len(words)])
        client.infer("minilm", {"text_input": [[text]]})
        if number % 3 == 0:
            client.infer("minilm_ensemble", {"text_input": [[text]]})
        if number % 40 == 0:
            list(client.chat("smollm2", text, 16))
        if stop.wait(0.05 + 0.1 * (1 + math.sin(number / 60))):
            return


def compress(path: Path) -> None:
    """Reduce an image to a palette of 64 colors."""
    with Image.open(path) as picture:
        picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(path, optimize=True)


if __name__ == "__main__":
    main()
