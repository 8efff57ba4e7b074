"""Statistics of native backends: tokens, padding, and the sizes of executions.

Owned by ``ModelStatistics``, for models whose workers report them; durations are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from conch.telemetry.distributions import Histogram

#: Buckets for the sequences of an execution, and for its tokens with padding.
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Work:
    """Totals over the executions of a model version."""

    __slots__ = ("answer_ns", "arrange_ns", "engine_ns", "padded", "prepare_ns", "runs", "sequences",
                 "sequences_per_execution", "tokens", "tokens_per_execution", "waited_ns")  # fmt: skip

    def __init__(self) -> None:
        self.tokens = 0
        self.padded = 0
        self.sequences = 0
        self.runs = 0
        self.prepare_ns = 0
        self.waited_ns = 0
        self.arrange_ns = 0
        self.engine_ns = 0
        self.answer_ns = 0
        self.sequences_per_execution = Histogram(SEQUENCE_BUCKETS)
        self.tokens_per_execution = Histogram(TOKEN_BUCKETS)

    def add(self, work: Mapping[str, int]) -> None:
        """Add one execution, as the worker's ``done`` frame describes it."""
        self.tokens += work.get("tokens", 0)
        self.padded += work.get("padded", 0)
        self.runs += work.get("runs", 0)
        self.prepare_ns += work.get("prepare_ns", 0)
        self.waited_ns += work.get("waited_ns", 0)
        self.arrange_ns += work.get("arrange_ns", 0)
        self.engine_ns += work.get("engine_ns", 0)
        self.answer_ns += work.get("answer_ns", 0)
        sequences = work.get("sequences", 0)
        self.sequences += sequences
        self.sequences_per_execution.observe(sequences)
        self.tokens_per_execution.observe(work.get("padded", 0))
