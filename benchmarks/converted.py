"""The checkpoint as ``conch convert`` makes it, and repositories that serve its variants side by side."""

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
    """The options of every benchmark of a converted checkpoint."""
    parser.add_argument("--converted", type=Path, metavar="FOLDER", help="with conch.json; converted anew without")
    parser.add_argument("--variants", nargs="*", metavar="NAME", help="of conch.json; the verdict's and int8 if none")


@contextlib.contextmanager
def folder(given: Path | None) -> Iterator[Path]:
    """The converted model: the given one, or one that is made now, in about a minute, and timed."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as home:
        begun = time.monotonic()
        made = convert(Path(home))
        print(f"conch convert, int8, end to end: {time.monotonic() - begun:.0f} s.\n", file=sys.stderr)
        yield made


def convert(home: Path, *options: str) -> Path:
    """The folder with ``conch.json`` and every variant, below ``home``; ``options`` are passed to ``conch convert``."""
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
    """The variants to measure: those that are named, or the one that ``auto`` means and all of int8 that may serve."""
    if names:
        return names
    manifest = json.loads((folder / "conch.json").read_text("utf-8"))
    usable = [variant["name"] for variant in manifest["variants"] if variant["passed"] or variant.get("forced")]
    usable.sort(key=lambda name: name != manifest["auto"])
    return [name for name in usable if name == usable[0] or name.endswith("int8")]


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
