"""The checkpoint as ``conch convert`` makes it, and repositories that serve its variants side by side."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.texts import checkpoint
from tests.servers import CONCH


def convert(home: Path) -> tuple[Path, float]:
    """The folder with ``conch.json`` and every variant, and the seconds that making it took."""
    command = [
        str(CONCH),
        "convert",
        "-m",
        str(checkpoint()),
        "--quantize",
        "int8",
        "-o",
        str(home),
        "--name",
        "minilm",
    ]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"conch convert: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return home / "minilm" / "1", time.monotonic() - begun


def variants(folder: Path) -> list[str]:
    """The names of the variants that may serve, the one that ``auto`` means first."""
    manifest = json.loads((folder / "conch.json").read_text("utf-8"))
    usable = [one["name"] for one in manifest["variants"] if one["passed"] or one.get("forced")]
    return sorted(usable, key=lambda name: name != manifest["auto"])


def serve(
    repository: Path, folder: Path, names: Sequence[str], *, backend: str = "huggingface", max_batch: int = 0
) -> None:
    """Write one model for each variant, of its name; without ``max_batch`` batching is what conch chooses."""
    for name in names:
        directory = repository / name
        (directory / "1").mkdir(parents=True)
        values = {"model": str(folder), "variant": name}
        lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()]
        if max_batch:
            lines += [f"max_batch_size: {max_batch}", "dynamic_batching { }"]
        (directory / "config.pbtxt").write_text("\n".join([f'backend: "{backend}"', *lines, ""]))
