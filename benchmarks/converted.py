"""Converts the checkpoint with ``conch convert``, and writes repositories that serve several variants."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.texts import checkpoint
from tests.servers import CONCH


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark of a converted checkpoint."""
    parser.add_argument("--converted", type=Path, metavar="FOLDER", help="with conch.json; converted anew without")
    parser.add_argument("--variants", nargs="*", metavar="NAME", help="of conch.json; the verdict's and int8 if none")


@contextlib.contextmanager
def folder(path: Path | None) -> Iterator[Path]:
    """Return the converted model: the given one, or a new one, which takes about a minute and is timed."""
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory() as home:
        start = time.monotonic()
        made = convert(Path(home))
        print(f"conch convert, int8, end to end: {time.monotonic() - start:.0f} s.\n", file=sys.stderr)
        yield made


def convert(home: Path, *options: str) -> Path:
    """Return the folder with ``conch.json`` and every variant, below ``home``; ``options`` go to ``conch convert``."""
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
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"conch convert: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return home / "minilm" / "1"


def chosen(folder: Path, names: Sequence[str] | None) -> Sequence[str]:
    """Return the variants to measure: the named ones, or the one that ``auto`` selects and all usable int8 variants."""
    if names:
        return names
    manifest = json.loads((folder / "conch.json").read_text("utf-8"))
    usable = [variant["name"] for variant in manifest["variants"] if variant["passed"] or variant.get("forced")]
    usable.sort(key=lambda name: name != manifest["auto"])
    return [name for name in usable if name == usable[0] or name.endswith("int8")]


def serve(
    repository: Path, folder: Path, names: Sequence[str], *, backend: str = "huggingface", max_batch: int = 0
) -> None:
    """Write one model for each variant, with its name; without ``max_batch``, conch chooses the batching."""
    for name in names:
        directory = repository / name
        (directory / "1").mkdir(parents=True)
        values = {"model": str(folder), "variant": name}
        lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()]
        if max_batch:
            lines += [f"max_batch_size: {max_batch}", "dynamic_batching { }"]
        (directory / "config.pbtxt").write_text("\n".join([f'backend: "{backend}"', *lines, ""]))
