"""The rows of the comparison of text models, and their results by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.columns import Column
from benchmarks.load import measure
from benchmarks.texts import SENTENCE, mixed
from benchmarks.windows import ask_perf_analyzer

CONCURRENCIES = (1, 16, 64)
#: The concurrency at which servers are saturated.
FULL = CONCURRENCIES[-1]


@dataclass
class Question:
    """One row. ``figure`` is ``latency`` (median, µs) or ``throughput`` (texts/s); ``figures`` are by column."""

    workload: str
    concurrency: int
    figure: str
    texts: Sequence[str]
    by_perf_analyzer: bool = False
    figures: dict[str, list[float]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        generator = "perf_analyzer" if self.by_perf_analyzer else "own client"
        return f"{self.workload}, {generator}, concurrency {self.concurrency}"

    @property
    def unit(self) -> str:
        return "µs, median" if self.figure == "latency" else "texts/s"

    def fits(self, column: Column) -> bool:
        """Return whether to measure a server.

        perf_analyzer supports the inference protocol only. With equal lengths, there is no padding to compare.
        """
        if column.padded:
            return self.workload == "mixed"
        return column.inference_protocol or not self.by_perf_analyzer

    def ask(self, column: Column, seconds: float) -> float:
        """Measure, and record the figure."""
        if self.by_perf_analyzer:
            latency, throughput = self._by_perf_analyzer(column, seconds)
        else:
            load = measure(column.target, self.texts, self.concurrency, seconds=seconds)
            latency, throughput = load.median, load.throughput
        figure = latency if self.figure == "latency" else throughput
        self.figures.setdefault(column.name, []).append(figure)
        return figure

    def _by_perf_analyzer(self, column: Column, seconds: float) -> tuple[float, float]:
        target = column.target
        throughput, latency = ask_perf_analyzer(
            "-m", target.model, "-u", target.address, "--concurrency-range", str(self.concurrency),
            "--string-data", self.texts[0], "--shape", f"{target.input}:1", "--percentile", "50", seconds=seconds,
        )  # fmt: skip
        return latency, throughput


def uniform_questions(*, only_full: bool = False) -> list[Question]:
    """Return the rows for a single text of 16 tokens."""
    concurrencies = (FULL,) if only_full else CONCURRENCIES
    return [
        Question("16 tokens", concurrency, "throughput" if concurrency > 1 else "latency", [SENTENCE], by_perf_analyzer)
        for by_perf_analyzer in ((False,) if only_full else (True, False))
        for concurrency in concurrencies
    ]


def mixed_questions(count: int, *, only_full: bool = False) -> list[Question]:
    """Return the rows for texts of 5 to 256 tokens, long-tailed; all servers get the same texts in the same order."""
    texts = mixed(count)
    return [
        Question("mixed", concurrency, "throughput", texts)
        for concurrency in CONCURRENCIES[1:]
        if concurrency == FULL or not only_full
    ]
