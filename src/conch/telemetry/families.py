"""All metrics of models, each declared once: name, type, help, and how to read it from the model's statistics.

The registry iterates over these tables on the event loop whenever the metrics page is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from conch.telemetry.exposition import Family, Metric, MetricSample, label_text, number
from conch.telemetry.statistics import FIRST_RESPONSE, LATENCIES, Histogram, ModelStatistics, Summary


class Registered(NamedTuple):
    """A model version on the metrics page; ``cached`` means that it uses the response cache.

    ``quantiles`` (0 to 1) are the quantiles in its summaries.
    """

    statistics: ModelStatistics
    labels: Mapping[str, str]
    cached: bool
    quantiles: tuple[float, ...]

    def text(self, **more: str) -> str:
        """Format the labels of the model, followed by ``more``."""
        return label_text({**self.labels, **more})


Read = Callable[[Registered], Iterable[MetricSample]]
Table = Mapping[Metric, Read]
T = TypeVar("T")


class _Source(Generic[T]):
    """A source of samples. Models for which ``get`` returns None are omitted.

    ``name_label`` is a further label with the name of the model.
    """

    def __init__(self, get: Callable[[Registered], T | None], name_label: str = "") -> None:
        self._get = get
        self._name_label = name_label

    def text(self, model: Registered, **more: str) -> str:
        """Format the labels of a sample."""
        named = {self._name_label: model.statistics.name} if self._name_label else {}
        return model.text(**named, **more)

    def value(self, read: Callable[[T], float]) -> Read:
        """Return a reader of one number per model."""

        def samples(model: Registered) -> Iterator[MetricSample]:
            source = self._get(model)
            if source is not None:
                yield MetricSample(self.text(model), read(source))

        return samples

    def microseconds(self, read: Callable[[T], int]) -> Read:
        """Return a reader of one duration per model, converted from nanoseconds to whole microseconds."""
        return self.value(lambda source: read(source) // 1000)

    def histogram(self, choose: Callable[[T], Histogram]) -> Read:
        """Return a reader of a count, a sum and cumulative buckets per model."""

        def samples(model: Registered) -> Iterator[MetricSample]:
            source = self._get(model)
            if source is not None:
                yield from choose(source).samples(partial(self.text, model))

        return samples

    def summary(self, choose: Callable[[T], Summary]) -> Read:
        """Return a reader of a count, a sum and quantiles per model."""

        def samples(model: Registered) -> Iterator[MetricSample]:
            source = self._get(model)
            if source is None:
                return
            summary = choose(source)
            yield MetricSample(self.text(model), summary.count, "_count")
            yield MetricSample(self.text(model), summary.sum, "_sum")
            for rank, value in zip(model.quantiles, summary.quantiles(model.quantiles), strict=True):
                yield MetricSample(self.text(model, quantile=number(rank)), value)

        return samples


_statistics: Final = _Source(lambda model: model.statistics)
_cache: Final = _Source(lambda model: model.statistics if model.cached else None)
_work: Final = _Source(lambda model: model.statistics.work)
#: vLLM's dashboards select models by their label.
_generation: Final = _Source(lambda model: model.statistics.generation, "model_name")
_first_response: Final = _Source(lambda model: model.statistics.first_response)
_latencies: Final = _Source(lambda model: model.statistics.latencies)
_summaries: Final = _Source(lambda model: model.statistics.summaries)
_cache_summaries: Final = _Source(lambda model: model.statistics.summaries if model.cached else None)
_uncached_summaries: Final = _Source(lambda model: None if model.cached else model.statistics.summaries)


def _by_reason(read: Callable[[ModelStatistics], Mapping[Any, int]]) -> Read:
    """Return a reader of a count for each reason."""

    def samples(model: Registered) -> Iterator[MetricSample]:
        for reason, count in read(model.statistics).items():
            yield MetricSample(label_text(dict(sorted({**model.labels, "reason": reason.value}.items()))), count)

    return samples


def _memory(model: Registered) -> Iterator[MetricSample]:
    for kind, size in model.statistics.memory.kinds().items():
        yield MetricSample(model.text(kind=kind), size)


def _waiting(model: Registered) -> Iterator[MetricSample]:
    if model.statistics.generation is not None:
        yield MetricSample(_generation.text(model), len(model.statistics.queue) + model.statistics.generation.waiting)


def _finished(model: Registered) -> Iterator[MetricSample]:
    if model.statistics.generation is not None:
        for reason, count in model.statistics.generation.reasons.items():
            yield MetricSample(_generation.text(model, finished_reason=reason), count)


def _counter(name: str, help: str, read: Read) -> tuple[Metric, Read]:
    return Metric(name, "counter", help), read


def _gauge(name: str, help: str, read: Read) -> tuple[Metric, Read]:
    return Metric(name, "gauge", help), read


def _histogram(name: str, help: str, read: Read) -> tuple[Metric, Read]:
    return Metric(name, "histogram", help), read


def _summary(name: str, help: str, read: Read) -> tuple[Metric, Read]:
    return Metric(name, "summary", help), read


_READY: Final = Metric("conch_model_ready", "gauge", "Whether requests to the model version can run now (1) or not (0)")
_KILLS: Final = Metric("conch_worker_kills", "counter", "Number of workers that the server killed, by model and reason")


_TEMPLATES: Final = Metric(
    "conch_template_memory_bytes",
    "gauge",
    "Memory of the processes that workers are forked from (proportional set size)",
)

#: Server-wide families, which are not read from the statistics of models.
WORKERS: Final = (_READY, _KILLS, _TEMPLATES)


def template_memory(size: int) -> Family:
    """Return the memory of worker templates (bytes), with the proportional share of pages shared with workers."""
    return _TEMPLATES, [MetricSample("", size)]


def readiness(models: Iterable[tuple[str, str, int, bool]]) -> Family:
    """Return the readiness of model versions, given as name, namespace, version and ready flag."""
    return _READY, [
        MetricSample(
            label_text({"model": name, **({"namespace": namespace} if namespace else {}), "version": str(version)}),
            int(ready),
        )
        for name, namespace, version, ready in sorted(models)
    ]


def kills(counts: Iterable[tuple[str, str, int]]) -> Family:
    """Return the number of killed workers, given as model, reason and count."""
    return _KILLS, [
        MetricSample(label_text({"model": model, "reason": reason}), count) for model, reason, count in sorted(counts)
    ]


# fmt: off
COUNTS: Final[Table] = dict((
    _counter("nv_inference_request_success", "Number of successful inference requests, all batch sizes",
        _statistics.value(lambda statistics: statistics.success_count)),
    _counter("nv_inference_request_failure", "Number of failed inference requests, all batch sizes",
        _by_reason(lambda statistics: statistics.failures)),
    _counter("nv_inference_count", "Number of inferences performed (does not include cached requests)",
        _statistics.value(lambda statistics: statistics.inference_count)),
    _counter("nv_inference_exec_count", "Number of model executions performed (does not include cached requests)",
        _statistics.value(lambda statistics: statistics.execution_count)),
))

#: Omitted with ``counter_latencies=false``.
DURATIONS: Final[Table] = dict((
    _counter("nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        _statistics.microseconds(lambda statistics: statistics.success_ns)),
    _counter("nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        _statistics.microseconds(lambda statistics: statistics.queue_ns)),
    _counter("nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        _statistics.microseconds(lambda statistics: statistics.compute_input_ns)),
    _counter("nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        _statistics.microseconds(lambda statistics: statistics.compute_infer_ns)),
    _counter("nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        _statistics.microseconds(lambda statistics: statistics.compute_output_ns)),
))

CACHE: Final[Table] = dict((
    _counter("nv_cache_num_hits_per_model", "Number of cache hits per model",
        _cache.value(lambda statistics: statistics.cache_hit_count)),
    _counter("nv_cache_hit_duration_per_model", "Total cache hit duration per model, in microseconds",
        _cache.microseconds(lambda statistics: statistics.cache_hit_ns)),
    _counter("nv_cache_num_misses_per_model", "Number of cache misses per model",
        _cache.value(lambda statistics: statistics.cache_miss_count)),
    _counter("nv_cache_miss_duration_per_model", "Total cache miss (insert+lookup) duration per model, in microseconds",
        _cache.microseconds(lambda statistics: statistics.cache_miss_ns)),
))

#: For models with workers that count tokens; Triton has no such metrics.
WORK: Final[Table] = dict((
    _counter("conch_tokens", "Number of tokens computed, without padding",
        _work.value(lambda work: work.tokens)),
    _counter("conch_padding_tokens", "Number of padding tokens computed to give the sequences of a run the same length",
        _work.value(lambda work: work.padded - work.tokens)),
    _counter("conch_sequences", "Number of sequences computed",
        _work.value(lambda work: work.sequences)),
    _counter("conch_engine_runs", "Number of runs of the engine",
        _work.value(lambda work: work.runs)),
    _counter("conch_tokenize_duration_us", "Cumulative time to decode and tokenize requests in microseconds",
        _work.microseconds(lambda work: work.prepare_ns)),
    _counter("conch_tokenize_wait_duration_us",
        "The part of the tokenization time that delayed executions, in microseconds",
        _work.microseconds(lambda work: work.waited_ns)),
    _counter("conch_arrange_duration_us", "Cumulative time to divide and pad sequences into batches in microseconds",
        _work.microseconds(lambda work: work.arrange_ns)),
    _counter("conch_engine_duration_us", "Cumulative time of runs of the engine in microseconds",
        _work.microseconds(lambda work: work.engine_ns)),
    _counter("conch_answer_duration_us",
        "Cumulative time to compute responses from the engine's outputs (pooling, scores) in microseconds",
        _work.microseconds(lambda work: work.answer_ns)),
    _histogram("conch_execution_sequences", "Sequences of an execution",
        _work.histogram(lambda work: work.sequences_per_execution)),
    _histogram("conch_execution_tokens", "Tokens of an execution, with padding",
        _work.histogram(lambda work: work.tokens_per_execution)),
))

#: For models that generate text, with vLLM's names.
GENERATION: Final[Table] = dict((
    _gauge("vllm:num_requests_running", "Number of sequences in the running batch",
        _generation.value(lambda generation: generation.running)),
    _gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed",
        _waiting),
    _gauge("vllm:kv_cache_usage_perc", "KV-cache usage, 1 means 100 percent",
        _generation.value(lambda generation: generation.cache_usage)),
    _counter("vllm:prefix_cache_queries_total", "Prefix cache queries, in tokens",
        _generation.value(lambda generation: generation.prefix_queries)),
    _counter("vllm:prefix_cache_hits_total", "Prefix cache hits, in tokens",
        _generation.value(lambda generation: generation.prefix_hits)),
    _counter("vllm:num_preemptions_total", "Number of preemptions",
        _generation.value(lambda generation: generation.preemptions)),
    _counter("vllm:prompt_tokens_total", "Number of prompt tokens processed",
        _generation.value(lambda generation: generation.prompt_tokens)),
    _counter("vllm:generation_tokens_total", "Number of tokens generated",
        _generation.value(lambda generation: generation.generated_tokens)),
    _counter("vllm:request_success_total", "Number of sequences ended, by reason",
        _finished),
    _histogram("vllm:time_to_first_token_seconds", "Time from the arrival of a request to its first token in seconds",
        _generation.histogram(lambda generation: generation.first_token)),
    _histogram("vllm:inter_token_latency_seconds", "Time between two tokens of a sequence in seconds",
        _generation.histogram(lambda generation: generation.inter_token)),
    _histogram("vllm:time_per_output_token_seconds",
        "Time between two tokens of a sequence in seconds, under its older name",
        _generation.histogram(lambda generation: generation.inter_token)),
    _histogram("vllm:e2e_request_latency_seconds", "Time from the arrival of a request to its end in seconds",
        _generation.histogram(lambda generation: generation.request)),
    _histogram("vllm:request_queue_time_seconds", "Time that a request waited before its worker took it in seconds",
        _generation.histogram(lambda generation: generation.queue)),
    _histogram("vllm:request_prefill_time_seconds", "Time from the start of processing to the first token in seconds",
        _generation.histogram(lambda generation: generation.prefill)),
    _histogram("vllm:request_decode_time_seconds", "Time from the first token to the last in seconds",
        _generation.histogram(lambda generation: generation.decode)),
    _histogram("vllm:request_prompt_tokens", "Tokens of a request's prompts",
        _generation.histogram(lambda generation: generation.prompt_length)),
    _histogram("vllm:request_generation_tokens", "Tokens generated for a request",
        _generation.histogram(lambda generation: generation.generated_length)),
    _histogram("vllm:request_params_max_tokens", "Maximum number of tokens that requests specify",
        _generation.histogram(lambda generation: generation.max_tokens)),
    _histogram("vllm:request_params_n", "Number of completions that requests specify",
        _generation.histogram(lambda generation: generation.samples)),
))

GAUGES: Final[Table] = dict((
    _gauge("nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        _statistics.value(lambda statistics: len(statistics.queue))),
    _gauge("nv_model_load_duration_secs", "Model load time in seconds",
        _statistics.value(lambda statistics: statistics.load_ns / 1e9)),
))

#: Measured by the memory ledger; Triton has no such metrics.
MEMORY: Final[Table] = dict((
    _gauge("conch_model_memory_bytes",
        "Memory of a model's workers, shared regions and GPUs; weights and kv_cache are parts of these",
        _memory),
))

#: Included with ``histogram_latencies=true``.
HISTOGRAMS: Final[Table] = dict((
    _histogram(FIRST_RESPONSE, "Duration from request to first response in milliseconds",
        _first_response.histogram(lambda histogram: histogram)),
    _histogram(LATENCIES[0], "Duration of successful requests in milliseconds (includes cached requests)",
        _latencies.histogram(lambda latencies: latencies.request)),
    _histogram(LATENCIES[1], "Queuing duration of successful requests in milliseconds (includes cached requests)",
        _latencies.histogram(lambda latencies: latencies.queue)),
    _histogram(LATENCIES[2],
        "Compute inference duration of successful requests in milliseconds (does not include cached requests)",
        _latencies.histogram(lambda latencies: latencies.compute)),
))

#: Triton does not restart workers.
RESTARTS: Final[Table] = dict((
    _counter("conch_worker_restarts_total", "Number of workers that ended and were restarted, by reason",
        _by_reason(lambda statistics: statistics.restarts)),
))

#: Included with ``summary_latencies=true``. Triton omits the request summary for models with a response cache.
SUMMARIES: Final[Table] = dict((
    _summary("nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
        _uncached_summaries.summary(lambda summaries: summaries.request)),
    _summary("nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
        _summaries.summary(lambda summaries: summaries.queue)),
    _summary("nv_inference_compute_input_summary_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        _summaries.summary(lambda summaries: summaries.compute_input)),
    _summary("nv_inference_compute_infer_summary_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        _summaries.summary(lambda summaries: summaries.compute_infer)),
    _summary("nv_inference_compute_output_summary_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        _summaries.summary(lambda summaries: summaries.compute_output)),
))

#: For models with a response cache.
CACHE_SUMMARIES: Final[Table] = dict((
    _summary("nv_cache_hit_summary_per_model", "Summary of cache hit counts/durations per model, in microseconds.",
        _cache_summaries.summary(lambda summaries: summaries.cache_hit)),
    _summary("nv_cache_miss_summary_per_model", "Summary of cache miss counts/durations per model, in microseconds.",
        _cache_summaries.summary(lambda summaries: summaries.cache_miss)),
))
# fmt: on
