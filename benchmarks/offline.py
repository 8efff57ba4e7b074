"""Measures an engine without a server: the upper bound for serving it.

    python -m benchmarks.offline [--converted FOLDER] [--variants NAME ...] [--texts 1024] [--seconds 3]

Prints a line of JSON for each variant, with the keys of ``Offline``. The texts are known in advance and run in ideal
batches: equal lengths together, no padding, and the number of tokens at once that is fastest here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import converted
from benchmarks.texts import SENTENCE, mixed

#: The batch sizes to try (tokens).
BUDGETS: Final = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Offline:
    """Texts per second of the engine alone, and with tokenising and pooling, by workload (``uniform``, ``mixed``); and
    the µs of each step for one text of 16 tokens, with the steps repeated in a loop."""

    engine: dict[str, float]
    everything: dict[str, float]
    steps: dict[str, float]


class Alone:
    """A variant in this process, with the code that the worker runs."""

    def __init__(self, folder: Path, variant: str, seconds: float) -> None:
        from conch.backends.tasks.engines import open_engine
        from conch.backends.tasks.huggingface_backend import make_task
        from conch.checkpoints.folder import Checkpoint
        from conch.checkpoints.options import Options

        checkpoint = Checkpoint.open(folder, Options.from_values({"variant": variant}))
        self.seconds = seconds
        task: Any = make_task(checkpoint, lambda head, part=None: open_engine(part or checkpoint, head=head))
        self.task = task
        self.engine = task.pipelines[0].engine

    def prepared(self, text: str) -> Any:
        from conch.backends.base.arrays import Request
        from conch.core.tensors import WireTensor, pack_bytes

        tensor = WireTensor("text_input", "BYTES", (1, 1), pack_bytes([text.encode()]))
        return self.task.prepare(Request({"text_input": tensor}, frozenset(["embedding"])))

    def arrays(self, batch: Sequence[Any]) -> dict[str, Any]:
        return self.arrays_of([text.sequences[0] for text in batch])

    def arrays_of(self, sequences: Sequence[Any]) -> dict[str, Any]:
        """Return the network's inputs for sequences of one length."""
        import numpy as np

        ids = np.stack([sequence.ids for sequence in sequences])
        arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        return {name: arrays[name] for name in self.engine.inputs}

    def throughput(self, texts: Sequence[str]) -> tuple[float, float]:
        """Return texts per second for the engine alone and for all steps, each with its best budget."""
        from conch.backends.tasks.task import ExecutionWork

        ready = [self.prepared(text) for text in texts]
        engine, everything = [], []
        for budget in BUDGETS:
            batches = [self.arrays(batch) for batch in ideal(ready, budget)]

            def compute(batches: Sequence[Any] = batches) -> None:
                for arrays in batches:
                    self.engine.run(arrays)

            def run(budget: int = budget) -> None:
                for batch in ideal([self.prepared(text) for text in texts], budget):
                    self.task.execute(batch, ExecutionWork())

            engine.append(len(texts) / self.fastest(compute))
            everything.append(len(texts) / self.fastest(run))
        return max(engine), max(everything)

    def steps(self) -> dict[str, float]:
        """Return the µs of each step for one text of 16 tokens, after a warm-up."""
        from conch.backends.tasks.encoders.encoder_task import PaddedBatch

        sentence = self.prepared(SENTENCE)
        arrays = self.arrays([sentence])
        outputs = self.engine.run(arrays)
        run = PaddedBatch(sentence.sequences, [sentence], self.task.encoder.pad_id)
        return {
            "tokenise": self.typical(lambda: self.prepared(SENTENCE)),
            "engine": self.typical(lambda: self.engine.run(arrays)),
            "pool": self.typical(lambda: list(self.task.extract(outputs, run))),
        }

    def fastest(self, work: Callable[[], None]) -> float:
        """Return the seconds of the fastest of several passes, because other programs can only slow a pass down."""
        times: list[float] = []
        until = time.perf_counter() + self.seconds
        while not times or time.perf_counter() < until:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    def typical(self, work: Callable[[], Any]) -> float:
        """Return the median in µs."""
        times: list[float] = []
        until = time.perf_counter() + min(self.seconds, 1)
        while len(times) < 50 or time.perf_counter() < until:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6


def ideal(ready: Sequence[Any], budget: int) -> Iterator[list[Any]]:
    """Divide requests into batches of equal lengths and at most ``budget`` tokens."""
    by_length = defaultdict(list)
    for text in ready:
        by_length[text.length].append(text)
    for length, same in sorted(by_length.items()):
        rows = max(1, budget // length)
        yield from (same[start : start + rows] for start in range(0, len(same), rows))


def measure(folder: Path, variant: str, texts: int, seconds: float) -> Offline:
    """Measure in a separate process."""
    command = [sys.executable, "-m", "benchmarks.offline", "--converted", str(folder), "--variants", variant]
    command += ["--texts", str(texts), "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"offline {variant}: {done.stderr[-800:]}")
    return Offline(**json.loads(done.stdout.splitlines()[-1]))


def figures(folder: Path, variant: str, count: int, seconds: float) -> Offline:
    """Measure in this process."""
    alone = Alone(folder, variant, seconds)
    texts = {"uniform": [SENTENCE] * min(256, count), "mixed": mixed(count)}
    throughput = {name: alone.throughput(some) for name, some in texts.items()}
    return Offline(
        {name: engine for name, (engine, _) in throughput.items()},
        {name: everything for name, (_, everything) in throughput.items()},
        alone.steps(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    converted.add_arguments(parser)
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each measurement")
    options = parser.parse_args()

    with converted.folder(options.converted) as folder:
        for name in converted.chosen(folder, options.variants):
            print(json.dumps(asdict(figures(folder, name, options.texts, options.seconds))), flush=True)


if __name__ == "__main__":
    main()
