"""Statistics of models that generate text, token by token: latencies, lengths, KV cache.

Owned by ``ModelStatistics``, for models whose workers report them; the metrics page shows them under vLLM's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from conch.telemetry.distributions import Histogram

#: Seconds.
FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = (
    0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
REQUEST_BUCKETS: Final = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0,
)  # fmt: skip
#: Tokens.
LENGTH_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
COUNT_BUCKETS: Final = (1, 2, 5, 10, 20)


class Generation:
    """Totals over the life of a model version, and the current load of its workers.

    ``reasons`` counts sequences by how they ended: ``stop``, ``length``, ``abort`` or ``error``.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.reasons: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.inter_token = Histogram(TOKEN_BUCKETS)
        self.request = Histogram(REQUEST_BUCKETS)
        self.queue = Histogram(REQUEST_BUCKETS)
        self.prefill = Histogram(REQUEST_BUCKETS)
        self.decode = Histogram(REQUEST_BUCKETS)
        self.prompt_length = Histogram(LENGTH_BUCKETS)
        self.generated_length = Histogram(LENGTH_BUCKETS)
        self.max_tokens = Histogram(LENGTH_BUCKETS)
        self.samples = Histogram(COUNT_BUCKETS)
        self._now: dict[int, Mapping[str, Any]] = {}

    def add(self, worker: int, load: Mapping[str, Any]) -> None:
        """Add what a worker reports of its last step; an empty report means that the worker is gone.

        ``running`` and ``waiting`` (sequences), ``used`` and ``capacity`` (tokens of KV cache, 0: unlimited), and the
        ``bytes`` of that cache are current values.  The others have happened since the last report: ``prompt`` and
        ``generated`` (tokens), ``preempted`` (sequences), ``queries`` and ``hits`` (tokens of the prefix cache),
        ``first`` (seconds from the arrival of a request to its first token), ``gaps`` (pairs: seconds between two
        tokens, how often), ``ended`` (for each request: the reason of each sequence; seconds in all, in the queue, to
        the first token, after it; tokens of the prompt, generated, and at most).
        """
        if not load:
            self._now.pop(worker, None)
            return
        self._now[worker] = load
        self.prompt_tokens += load["prompt"]
        self.generated_tokens += load["generated"]
        self.preemptions += load["preempted"]
        self.prefix_queries += load["queries"]
        self.prefix_hits += load["hits"]
        for seconds in load["first"]:
            self.first_token.observe(seconds)
        for seconds, count in load["gaps"]:
            self.inter_token.observe(seconds, count)
        for reasons, total, queue, prefill, decode, prompt, generated, most in load["ended"]:
            for reason in reasons:
                self.reasons[reason] += 1
            self.request.observe(total)
            self.queue.observe(queue)
            self.prefill.observe(prefill)
            self.decode.observe(decode)
            self.prompt_length.observe(prompt)
            self.generated_length.observe(generated)
            self.max_tokens.observe(most)
            self.samples.observe(len(reasons))

    @property
    def running(self) -> int:
        """The number of sequences in a batch now."""
        return sum(self._values("running"))

    @property
    def waiting(self) -> int:
        """The number of sequences that a worker has, but not in a batch."""
        return sum(self._values("waiting"))

    @property
    def cache_usage(self) -> float:
        """The share of the KV cache that is used, 0 to 1; 0 if it has no limit."""
        capacity = sum(self._values("capacity"))
        return sum(self._values("used")) / capacity if capacity else 0.0

    @property
    def cache_tokens(self) -> int:
        """The number of tokens in the KV cache."""
        return sum(self._values("used"))

    @property
    def cache_bytes(self) -> int:
        """The memory that the KV cache takes, as far as engines know it."""
        return sum(self._values("bytes"))

    def snapshot(self) -> dict[str, Any]:
        """The member ``generation`` of the model's entry in the statistics extension."""
        return {
            "running": self.running,
            "waiting": self.waiting,
            "kv_cache_usage": self.cache_usage,
            "kv_cache_tokens": self.cache_tokens,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generated_tokens,
            "prefix_cache_queries": self.prefix_queries,
            "prefix_cache_hits": self.prefix_hits,
            "preemptions": self.preemptions,
            "finished": dict(self.reasons),
            "time_to_first_token": _nanoseconds(self.first_token),
            "inter_token_latency": _nanoseconds(self.inter_token),
        }

    def _values(self, key: str) -> Iterator[int]:
        return (load[key] for load in self._now.values())


def _nanoseconds(histogram: Histogram) -> dict[str, int]:
    return {"count": histogram.count, "ns": round(histogram.sum * 1e9)}
