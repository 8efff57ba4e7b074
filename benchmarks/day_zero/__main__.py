"""Compares conch with the installed transformers for every architecture, with tiny random checkpoints.

    python -m benchmarks.day_zero [TASK ...] [--architectures KIND ...] [--limit N] [--write docs/day_zero.md]
    python -m benchmarks.day_zero --only retrieval [--architectures MODEL ...] [--limit N] [--write PAGE]

A checkpoint is written for each architecture of a task, and run by the worker's code for a bare folder: six requests
one after the other, and all at once. ``exact`` means the results of transformers: scores within 2e-4, all greedy
tokens equal. The table is written to the page of --write, or printed. ``--only retrieval`` compares models that
sentence-transformers saved with it instead, over the routes of a server.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import astuple
from importlib import import_module
from pathlib import Path
from typing import Final

from benchmarks.day_zero.checkpoints import TASKS, Architecture, CannotMake, architectures, write
from benchmarks.day_zero.outcome import Outcome
from benchmarks.day_zero.table import Row, page
from conch.convert.libraries import silence_libraries
from conch.core.errors import one_line

#: ``module:function`` that compares the checkpoint in a folder, for tasks that generate text.
_WRITING: Final = {"causal": "causal:compare_causal", "seq2seq": "seq2seq:compare_seq2seq"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)} (default: all)")
    parser.add_argument(
        "--architectures",
        nargs="+",
        metavar="KIND",
        help="only these: values of model_type, or parts of the names of models for retrieval",
    )
    parser.add_argument("--only", choices=["retrieval"], help="compare models for retrieval instead of tasks")
    parser.add_argument("--limit", type=int, default=0, help="no more than so many of each task")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="keep what is found here; what is exact there stays"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table to this file")
    options = parser.parse_args()
    if unknown := set(options.tasks) - TASKS.keys():
        parser.error(f"no task '{unknown.pop()}': choose from {', '.join(TASKS)}")
    # One thread is the fastest for networks this small; torch reads it when it is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"
    text = _retrieval(options) if options.only else _architectures(options)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text)


def _retrieval(options: argparse.Namespace) -> str:
    """Return the tables of models for retrieval."""
    from benchmarks.day_zero.retrieval import compare_models
    from benchmarks.day_zero.retrieval_models import retrieval_models

    chosen = [
        model
        for model in retrieval_models()
        if not options.architectures or any(part in model.name for part in options.architectures)
    ]
    return compare_models(chosen[: options.limit or None])


def _architectures(options: argparse.Namespace) -> str:
    """Return the page of architectures."""
    known = read(options.results)
    rows = []
    for task in options.tasks or TASKS:
        chosen = [
            architecture
            for architecture in architectures(task)
            if not options.architectures or architecture.kind in options.architectures
        ]
        for architecture in chosen[: options.limit or None]:
            start = time.perf_counter()
            outcome = known.get(architecture) or Outcome("none")
            if outcome.verdict != "exact":
                known[architecture] = outcome = examined(architecture)
                keep(options.results, known)
            rows.append(Row(architecture, outcome))
            seconds = time.perf_counter() - start
            line = f"{task} {architecture.name} ({architecture.kind}): {outcome.verdict} {outcome.reason}"
            print(f"{line} [{seconds:.1f} s]", file=sys.stderr, flush=True)
    return page(rows)


def read(path: Path | None) -> dict[Architecture, Outcome]:
    """Read the results of an earlier run."""
    if path is None or not path.exists():
        return {}
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    return {Architecture(*names): Outcome(*outcome) for names, outcome in lines}


def keep(path: Path | None, known: Mapping[Architecture, Outcome]) -> None:
    """Write the results so far, a line for each architecture."""
    if path is not None:
        lines = [
            json.dumps([astuple(architecture), astuple(outcome)], ensure_ascii=False)
            for architecture, outcome in known.items()
        ]
        path.write_text("\n".join(lines) + "\n", "utf-8")


def examined(architecture: Architecture) -> Outcome:
    """Return the result of comparing an architecture."""
    compare = _comparison(architecture.task)
    with tempfile.TemporaryDirectory(prefix="day-zero-") as folder, silence_libraries():
        try:
            write(Path(folder), architecture)
        except CannotMake as error:
            return Outcome("none", str(error))
        try:
            outcome = compare(Path(folder))
            return Outcome(outcome.verdict, outcome.reason.replace(folder, "FOLDER"))
        except Exception as error:
            traceback.print_exc(file=sys.__stderr__)
            return Outcome("fails", f"{type(error).__name__}: {one_line(error)}")


def _comparison(task: str) -> Callable[[Path], Outcome]:
    if task in _WRITING:
        module, _, name = _WRITING[task].partition(":")
        comparison: Callable[[Path], Outcome] = getattr(import_module(f"benchmarks.day_zero.{module}"), name)
        return comparison
    from benchmarks.day_zero.encoders import compare_encoder

    return lambda folder: compare_encoder(folder, task)


if __name__ == "__main__":
    main()
