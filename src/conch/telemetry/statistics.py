"""Statistics of one model version, for the statistics extension and the metrics page.

Each loaded version has a ``ModelStatistics``, which its model and its scheduler call on the event loop, at least once
per request. Front ends read ``snapshot()``; the metrics page reads the numbers and the distributions (histograms with
fixed buckets, summaries of recent values). Recording is integer arithmetic without locks. Durations are nanoseconds.

Counting rules (observed in Triton 2.51):
- a request that the backend completed, even with an error response, is a success;
- a request with a failed execution, or refused after it was accepted, is a failure with a reason;
- a request refused at validation is not counted;
- an execution is counted once per batch, failed or not, and sets ``last_inference``; a cache hit is not an execution.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from math import ceil, nan
from time import monotonic, monotonic_ns, time_ns
from typing import Any, Final

from conch.core.inference import InferRequest, InferResponse
from conch.telemetry.exposition import MetricSample, number
from conch.telemetry.memory import ModelMemory

#: The histogram that Triton has, for decoupled models.
FIRST_RESPONSE: Final = "nv_inference_first_response_histogram_ms"
#: The histograms of all models: whole requests, their time in the queue, and in the model.
LATENCIES: Final = (
    "conch_inference_request_histogram_ms",
    "conch_inference_queue_histogram_ms",
    "conch_inference_compute_infer_histogram_ms",
)

#: Quantiles of a summary cover at most this many seconds and this many observations. That is enough for the 0.999
#: quantile, while the seven summaries of a busy model render in about 3 ms.
SUMMARY_SECONDS = 60.0
SUMMARY_OBSERVATIONS = 4096


class Histogram:
    """Counts per bucket; ``bounds`` are the inclusive upper bounds, ascending, without infinity."""

    __slots__ = ("_counts", "bounds", "count", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add ``times`` observations of a value."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times

    def add(self, counts: Iterable[tuple[int, int]], sum: float) -> None:
        """Add observations counted elsewhere: pairs of bucket index and count, and the sum of the values."""
        for bucket, count in counts:
            self._counts[bucket] += count
            self.count += count
        self.sum += sum

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of observations in each bucket; the last bucket has no upper bound."""
        return tuple(self._counts)

    def cumulative(self) -> list[int]:
        """Return the number of observations up to each bound, followed by the total."""
        total = 0
        return [total := total + count for count in self._counts]

    def samples(self, labels: Callable[..., str]) -> Iterator[MetricSample]:
        """Yield the samples for the metrics page; ``labels`` formats the labels, with ``le`` for those of a bucket."""
        yield MetricSample(labels(), self.count, "_count")
        yield MetricSample(labels(), self.sum, "_sum")
        for bound, count in zip([*map(number, self.bounds), "+Inf"], self.cumulative(), strict=True):
            yield MetricSample(labels(le=bound), count, "_bucket")


class Summary:
    """Count and sum of all observations, and exact quantiles of recent ones. ``clock`` returns seconds."""

    __slots__ = ("_clock", "_recent", "count", "sum")

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, int]] = deque(maxlen=SUMMARY_OBSERVATIONS)
        self.count = 0
        self.sum = 0

    def observe(self, value: int) -> None:
        """Add an observation at the current time."""
        self._recent.append((self._clock(), value))
        self.count += 1
        self.sum += value

    def quantiles(self, ranks: Sequence[float]) -> list[float]:
        """Return the value at each rank (0 to 1, nearest rank); NaN without recent observations."""
        oldest = self._clock() - SUMMARY_SECONDS
        values = sorted(value for when, value in self._recent if when >= oldest)
        if not values:
            return [nan] * len(ranks)
        return [values[max(ceil(rank * len(values)), 1) - 1] for rank in ranks]


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
#: Microseconds, from 20 µs to about 15 minutes; neighbours differ by 15 %, so that quantiles have an error below 8 %.
FINE_LATENCY_BUCKETS: Final = tuple(20 * 1.15**step for step in range(127))


class Generation:
    """Totals over the life of a model version, and the current load of its workers.

    ``reasons`` counts finished sequences by reason: ``stop``, ``length``, ``abort`` or ``error``.
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
        """Add a worker's report of its last step; an empty report means that the worker has ended.

        Current values are ``running`` and ``waiting`` (sequences), ``used`` and ``capacity`` (tokens of KV cache, 0:
        unlimited), and ``bytes`` of that cache. The other values cover the time since the last report: ``prompt`` and
        ``generated`` (tokens), ``preempted`` (sequences), ``queries`` and ``hits`` (tokens of the prefix cache),
        ``first`` (seconds from the arrival of a request to its first token), ``gaps`` (pairs: seconds between two
        tokens, number of occurrences), ``ended`` (for each request: the finish reason of each sequence; seconds in
        total, in the queue, of prefill and of decode; tokens of the prompt, generated tokens and their maximum).
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
        for reasons, total, queue, prefill, decode, prompt, generated, maximum in load["ended"]:
            for reason in reasons:
                self.reasons[reason] += 1
            self.request.observe(total)
            self.queue.observe(queue)
            self.prefill.observe(prefill)
            self.decode.observe(decode)
            self.prompt_length.observe(prompt)
            self.generated_length.observe(generated)
            self.max_tokens.observe(maximum)
            self.samples.observe(len(reasons))

    @property
    def running(self) -> int:
        """The number of sequences in running batches."""
        return sum(self._values("running"))

    @property
    def waiting(self) -> int:
        """The number of sequences that workers have outside of a batch."""
        return sum(self._values("waiting"))

    @property
    def cache_usage(self) -> float:
        """The used share of the KV cache, 0 to 1; 0 if it is unlimited."""
        capacity = sum(self._values("capacity"))
        return sum(self._values("used")) / capacity if capacity else 0.0

    @property
    def cache_tokens(self) -> int:
        """The number of tokens in the KV cache."""
        return sum(self._values("used"))

    @property
    def cache_bytes(self) -> int:
        """The memory of the KV cache (bytes), if engines report it."""
        return sum(self._values("bytes"))

    def snapshot(self) -> dict[str, Any]:
        """Return the member ``generation`` of the model's entry in the statistics extension."""
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


#: Buckets of the sequences of an execution, and of its tokens with padding.
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
EXECUTION_TOKEN_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True, eq=False)
class Work:
    """Totals over the executions of a model version."""

    tokens: int = 0
    padded: int = 0
    sequences: int = 0
    runs: int = 0
    prepare_ns: int = 0
    waited_ns: int = 0
    arrange_ns: int = 0
    engine_ns: int = 0
    answer_ns: int = 0
    sequences_per_execution: Histogram = field(default_factory=lambda: Histogram(SEQUENCE_BUCKETS))
    tokens_per_execution: Histogram = field(default_factory=lambda: Histogram(EXECUTION_TOKEN_BUCKETS))

    def add(self, work: Mapping[str, int]) -> None:
        """Add one execution, as described by the worker's ``done`` frame."""
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


#: Maximum number of responses per request that are counted separately; later responses are added to the last of these.
#: Triton has no limit, so a client can make its memory and its statistics page grow without end.
MAX_RESPONSES: Final = 1000


class FailureReason(Enum):
    """Reasons why requests fail: the values of the metric label ``reason``."""

    REJECTED = "REJECTED"  # by the scheduler: queue full, timeout, stopping
    CANCELED = "CANCELED"  # cancelled by the client before it ran
    BACKEND = "BACKEND"  # the execution failed
    OTHER = "OTHER"  # everything else, such as a failed step of an ensemble


class RestartReason(Enum):
    """Reasons why workers are restarted: the values of the metric label ``reason``."""

    EXIT = "exit"  # it exited
    SIGNAL = "signal"  # a signal ended it, such as that of a segmentation fault
    SIGKILL = "sigkill"  # another process or the kernel killed it, possibly because memory ran out
    KILLED = "killed"  # the server killed it; conch_worker_kills has the cause


@dataclass(slots=True, eq=False)
class Duration:
    """The number of events and their total duration."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def snapshot(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True, eq=False)
class BatchStatistics:
    """Executions of one batch size."""

    count: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0


@dataclass(slots=True, eq=False)
class ResponseStatistics:
    """Statistics of the responses with one index; 0 is the first response of a request."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)

    def snapshot(self) -> dict[str, dict[str, int]]:
        return {name: getattr(self, name).snapshot() for name in self.__slots__}


@dataclass(slots=True, eq=False)
class Summaries:
    """Recent durations (µs); kept only with ``--metrics-config summary_latencies=true``."""

    request: Summary = field(default_factory=Summary)
    queue: Summary = field(default_factory=Summary)
    compute_input: Summary = field(default_factory=Summary)
    compute_infer: Summary = field(default_factory=Summary)
    compute_output: Summary = field(default_factory=Summary)
    cache_hit: Summary = field(default_factory=Summary)
    cache_miss: Summary = field(default_factory=Summary)


#: Milliseconds. From a small encoder's response to a long generation.
LATENCY_BUCKETS: Final = (
    1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10_000.0, 30_000.0, 60_000.0,
)  # fmt: skip


class LatencyHistograms:
    """Durations (ms) of successful requests; kept only with ``--metrics-config histogram_latencies=true``.

    ``buckets`` are the upper bounds by family; families without bounds have ``LATENCY_BUCKETS``.
    """

    __slots__ = ("compute", "queue", "request")

    def __init__(self, buckets: Mapping[str, Sequence[float]] = {}) -> None:
        self.request, self.queue, self.compute = (
            Histogram(buckets.get(family) or LATENCY_BUCKETS) for family in LATENCIES
        )


@dataclass(slots=True, eq=False)
class ModelStatistics:
    """The statistics of one model version; they start at zero with every load.

    ``summaries``, ``latencies``, ``first_response`` and ``fine_latency`` (µs, of successful requests) are set only if
    the server's configuration enables them; ``clock`` returns nanoseconds since the epoch. The dispatcher sets
    ``queue``, whose length is the number of pending requests; the loader sets ``load_ns``, and the memory ledger sets
    ``memory``.
    """

    name: str
    version: int
    _: KW_ONLY
    summaries: Summaries | None = None
    latencies: LatencyHistograms | None = None
    first_response: Histogram | None = None
    fine_latency: Histogram | None = None
    clock: Callable[[], int] = time_ns
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success_count: int = 0
    success_ns: int = 0
    fail_count: int = 0
    fail_ns: int = 0
    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    cache_hit_count: int = 0
    cache_hit_ns: int = 0
    cache_miss_count: int = 0
    cache_miss_ns: int = 0
    queue: Sized = ()
    load_ns: int = 0
    #: The memory of the version at the ledger's last measurement.
    memory: ModelMemory = field(default_factory=ModelMemory)
    #: Runtime facts of the model by name (``engine``, ``precision`` …).
    runtime_facts: Mapping[str, str] = field(default_factory=dict)
    failures: dict[FailureReason, int] = field(default_factory=lambda: dict.fromkeys(FailureReason, 0))
    #: Restarted workers.
    restarts: dict[RestartReason, int] = field(default_factory=lambda: dict.fromkeys(RestartReason, 0))
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    responses: dict[int, ResponseStatistics] = field(default_factory=dict)
    #: Set once a built-in backend has reported an execution.
    work: Work | None = None
    #: Set once a worker that generates text has reported its load.
    generation: Generation | None = None

    def record_success(
        self, batch_size: int, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int, total_ns: int
    ) -> None:
        """Record a successful request.

        ``batch_size`` is the request's own (0 without a batch dimension), but the compute times are of the whole batch.
        """
        self.success_count += 1
        self.success_ns += total_ns
        self.inference_count += batch_size or 1
        self.queue_ns += queue_ns
        self.compute_input_ns += input_ns
        self.compute_infer_ns += infer_ns
        self.compute_output_ns += output_ns
        if self.latencies is not None:
            self.latencies.request.observe(total_ns / 1_000_000)
            self.latencies.queue.observe(queue_ns / 1_000_000)
            self.latencies.compute.observe(infer_ns / 1_000_000)
        if self.fine_latency is not None:
            self.fine_latency.observe(total_ns / 1000)
        if self.summaries is not None:
            self.summaries.request.observe(total_ns // 1000)
            self.summaries.queue.observe(queue_ns // 1000)
            self.summaries.compute_input.observe(input_ns // 1000)
            self.summaries.compute_infer.observe(infer_ns // 1000)
            self.summaries.compute_output.observe(output_ns // 1000)

    def record_cache_hit(self, queue_ns: int, lookup_ns: int, total_ns: int) -> None:
        """Record a request served from the response cache: a success without computation."""
        self.success_count += 1
        self.success_ns += total_ns
        self.queue_ns += queue_ns
        self.cache_hit_count += 1
        self.cache_hit_ns += lookup_ns
        if self.latencies is not None:
            self.latencies.request.observe(total_ns / 1_000_000)
            self.latencies.queue.observe(queue_ns / 1_000_000)
        if self.fine_latency is not None:
            self.fine_latency.observe(total_ns / 1000)
        if self.summaries is not None:
            self.summaries.queue.observe(queue_ns // 1000)
            self.summaries.cache_hit.observe(lookup_ns // 1000)

    def record_cache_miss(self, lookup_and_insert_ns: int) -> None:
        """Record a cache miss; the request's success or failure is recorded separately."""
        self.cache_miss_count += 1
        self.cache_miss_ns += lookup_and_insert_ns
        if self.summaries is not None:
            self.summaries.cache_miss.observe(lookup_and_insert_ns // 1000)

    def record_failure(self, reason: FailureReason, total_ns: int) -> None:
        """Record a request that failed with an error of the server or of its whole execution."""
        self.fail_count += 1
        self.fail_ns += total_ns
        self.failures[reason] += 1

    def record_execution(self, batch_size: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Record the execution of a batch, successful or not; ``batch_size`` sums over its requests (0 counts as 1)."""
        self.execution_count += 1
        self.last_inference_ms = self.clock() // 1_000_000
        batch = self.batches.get(batch_size or 1)
        if batch is None:
            batch = self.batches[batch_size or 1] = BatchStatistics()
        batch.count += 1
        batch.compute_input += input_ns
        batch.compute_infer += infer_ns
        batch.compute_output += output_ns

    def record_work(self, work: Mapping[str, int]) -> None:
        """Add a built-in backend's report of one execution."""
        if self.work is None:
            self.work = Work()
        self.work.add(work)

    def record_generation(self, worker: int, load: Mapping[str, Any]) -> None:
        """Add a report of a worker that generates text; empty if the worker has ended."""
        if self.generation is None:
            if not load:
                return
            self.generation = Generation()
        self.generation.add(worker, load)

    def record_first_response(self, elapsed_ns: int) -> None:
        """Record the time from a request's arrival to its first response, for decoupled models."""
        if self.first_response is not None:
            self.first_response.observe(elapsed_ns / 1_000_000)

    def record_response(self, index: int, infer_ns: int, output_ns: int, *, failed: bool = False) -> None:
        """Record response number ``index`` of a request, with outputs or with an error."""
        response = self._response(index)
        response.compute_infer.add(infer_ns)
        response.compute_output.add(output_ns)
        (response.fail if failed else response.success).add(infer_ns + output_ns)

    def record_empty_response(self, index: int, infer_ns: int) -> None:
        """Record the end of a request with only the final flag, after ``index`` responses."""
        response = self._response(index)
        response.compute_infer.add(infer_ns)
        response.empty_response.add(infer_ns)

    def record_sent(self, request: InferRequest, response: InferResponse) -> None:
        """Record a response of a decoupled model, or the empty end of its responses, before it is delivered."""
        now, times, index = monotonic_ns(), request.times, request.responses
        if response.empty:
            self.record_empty_response(index, now - times.started)
        else:
            self.record_response(index, now - times.started, 0, failed=response.error is not None)
        if not index:
            self.record_first_response(now - times.arrived)

    def _response(self, index: int) -> ResponseStatistics:
        index = min(index, MAX_RESPONSES - 1)
        response = self.responses.get(index)
        if response is None:
            response = self.responses[index] = ResponseStatistics()
        return response

    def snapshot(self) -> dict[str, Any]:
        """Return the entry of ``model_stats`` in the format of the statistics extension."""
        computed = self.success_count - self.cache_hit_count
        return {
            "name": self.name,
            "version": str(self.version),
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": _duration(self.success_count, self.success_ns),
                "fail": _duration(self.fail_count, self.fail_ns),
                "queue": _duration(self.success_count, self.queue_ns),
                "compute_input": _duration(computed, self.compute_input_ns),
                "compute_infer": _duration(computed, self.compute_infer_ns),
                "compute_output": _duration(computed, self.compute_output_ns),
                "cache_hit": _duration(self.cache_hit_count, self.cache_hit_ns),
                "cache_miss": _duration(self.cache_miss_count, self.cache_miss_ns),
            },
            "response_stats": {str(index): self.responses[index].snapshot() for index in sorted(self.responses)},
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": _duration(batch.count, batch.compute_input),
                    "compute_infer": _duration(batch.count, batch.compute_infer),
                    "compute_output": _duration(batch.count, batch.compute_output),
                }
                for size, batch in sorted(self.batches.items())
            ],
            "memory_usage": self.memory.usage(),
            **({"runs_with": self.runtime_facts} if self.runtime_facts else {}),
            **({"generation": self.generation.snapshot()} if self.generation is not None else {}),
        }


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
