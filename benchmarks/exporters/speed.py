"""Measures the time of exports, and the speed of the graphs, in turns."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.exporters import architectures
from benchmarks.exporters.compare import HEADS
from benchmarks.exporters.run import THREADS, Outcome, apart, export, inputs, runner
from conch.convert.libraries import silence_libraries

#: The shapes (batch x tokens) for encoders, and the prompt length for language models.
SHAPES, PREFILL = ((1, 16), (8, 128)), 128


def speed(options: argparse.Namespace, exporters: Sequence[str]) -> None:
    from transformers import AutoConfig

    task = "text-generation" if options.causal else "feature-extraction"
    with tempfile.TemporaryDirectory() as work:
        folder = Path(options.model)
        if options.model == "llama-135m":
            folder = Path(work) / "in"
            with silence_libraries():
                architectures.write(folder, "llama", HEADS[task], architectures.LLAMA_135M, 0.02)
        graphs: dict[str, Path] = {}
        for turn in range(options.exports):
            for exporter in exporters:
                outcome = apart(timed_export, exporter, folder, task, Path(work) / f"{exporter}-{turn}", seconds=900)
                if "graphs" not in outcome:
                    print(f"{exporter}: {outcome['refused']}")
                    continue
                print(f"{exporter}: exported in {outcome['seconds']:.1f} s", flush=True)
                graphs |= {f"{exporter} {graph.name}": graph for graph in outcome["graphs"]}
        for name, graph in graphs.items():
            print(f"{name}: {megabytes(graph):.1f} MB")
        config = AutoConfig.from_pretrained(folder)
        for question, medians in (timed_causal if options.causal else timed_encoder)(config, graphs, options.rounds):
            best = min(medians.values())
            figures = ", ".join(f"{name} {value:.2f} ms ({value / best:.2f}x)" for name, value in medians.items())
            print(f"{question}: {figures}; load {os.getloadavg()[0]:.1f}", flush=True)


def timed_export(exporter: str, folder: Path, task: str, target: Path) -> Outcome:
    target.mkdir(parents=True)
    with silence_libraries():
        before = time.perf_counter()
        graphs = export(exporter, folder, task, target)
    return {"seconds": time.perf_counter() - before, "graphs": graphs}


def megabytes(graph: Path) -> float:
    weights = graph.with_suffix(".bin") if graph.suffix == ".xml" else graph.with_name(graph.name + ".data")
    return sum(file.stat().st_size for file in (graph, weights) if file.exists()) / 1e6


def timed_encoder(config: Any, graphs: dict[str, Path], rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Return the milliseconds of each graph by shape, with the graphs in turns."""
    runners = {name: runner(graph) for name, graph in graphs.items()}
    for shape in SHAPES:
        arrays = inputs(config, *shape)
        yield (
            "x".join(map(str, shape)),
            in_turns({name: seconds_of(run, arrays) for name, run in runners.items()}, rounds),
        )


def timed_causal(config: Any, graphs: dict[str, Path], rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Return milliseconds of each graph, alone and in the serving pipeline, to a first token and per decoding step."""
    from conch.convert.causal.agreement import ServedGraph
    from conch.convert.causal.export import StatefulGraph

    ids = np.random.default_rng(7).integers(4, config.vocab_size, (1, PREFILL))
    plain = {name: StatefulGraph(graph, THREADS) for name, graph in graphs.items()}

    def prefill(graph: StatefulGraph) -> float:
        graph.reset()
        return seconds_of(graph.run, ids, times=1)()

    def decode(graph: ServedGraph) -> float:
        return statistics.median(graph.decode([prompt], 8))

    yield "graph, prefill", in_turns({name: partial(prefill, graph) for name, graph in plain.items()}, rounds)
    steps = {name: seconds_of(graph.run, ids[:, :1], times=4) for name, graph in plain.items()}
    yield "graph, decode", in_turns(steps, rounds)
    del plain, steps
    settings, prompt = config.to_dict(), ids[0].tolist()
    served = {
        name: ServedGraph(graph, "fp32", settings, cache_tokens=1024, threads=THREADS) for name, graph in graphs.items()
    }
    yield "served, prefill", in_turns({name: partial(graph.prefill, prompt) for name, graph in served.items()}, rounds)
    yield "served, decode", in_turns({name: partial(decode, graph) for name, graph in served.items()}, rounds)


def seconds_of(run: Callable[..., Any], *arguments: Any, times: int = 3) -> Callable[[], float]:
    def measure() -> float:
        before = time.perf_counter()
        for _ in range(times):
            run(*arguments)
        return (time.perf_counter() - before) / times

    return measure


def in_turns(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of each in milliseconds, after one warm-up round."""
    durations: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds + 1):
        for name, measure in measures.items():
            durations[name].append(measure())
    return {name: 1000 * statistics.median(values[1:]) for name, values in durations.items()}
