"""When a measurement has settled: the last windows agree.

Pure.  As in perf_analyzer, three windows in a row whose throughput and latency are within a share of their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

#: How many windows have to agree.
WINDOWS: Final = 3


@dataclass(slots=True)
class Stability:
    """Takes windows until the last ``WINDOWS`` agree within ``share`` (0.1 is 10 %), or there were ``trials``."""

    share: float = 0.1
    trials: int = 10
    _throughputs: list[float] = field(default_factory=list)
    _latencies: list[float] = field(default_factory=list)

    def add(self, throughput: float, latency: float) -> None:
        """Note a window; a latency of 0 is one without answers."""
        self._throughputs.append(throughput)
        self._latencies.append(latency)

    @property
    def stable(self) -> bool:
        """Whether the last windows agree; windows without answers never do."""
        last = self._throughputs[-WINDOWS:], self._latencies[-WINDOWS:]
        return len(self._throughputs) >= WINDOWS and all(self._agree(values) for values in last)

    @property
    def over(self) -> bool:
        """Whether to measure no more."""
        return self.stable or len(self._throughputs) >= self.trials

    def _agree(self, values: Sequence[float]) -> bool:
        mean = sum(values) / len(values)
        return mean > 0 and all(abs(value - mean) <= self.share * mean for value in values)
