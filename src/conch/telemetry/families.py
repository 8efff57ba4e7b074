"""Every metric of a model, declared once: name, type, help, and how it is read from the model's statistics.

The registry goes through the table at every scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from conch.telemetry.distributions import Histogram, Summary
from conch.telemetry.exposition import Metric, MetricSample, label_text, number
from conch.telemetry.generation import Generation
from conch.telemetry.statistics import ModelStatistics, Summaries
from conch.telemetry.work import Work


class Registered(NamedTuple):
    """A model version on the page; ``quantiles`` are those of its summaries."""

    statistics: ModelStatistics
    labels: Mapping[str, str]
    cached: bool
    quantiles: tuple[float, ...]

    def text(self, **more: str) -> str:
        """The labels by name, and after them those of a distribution."""
        return label_text({**self.labels, **more})


Read = Callable[[Registered], Iterable[MetricSample]]


def _count(value: Callable[[ModelStatistics], float]) -> Read:
    return lambda model: [MetricSample(model.text(), value(model.statistics))]


def _microseconds(value: Callable[[ModelStatistics], int]) -> Read:
    return lambda model: [MetricSample(model.text(), value(model.statistics) // 1000)]


def _if_cached(read: Read) -> Read:
    return lambda model: read(model) if model.cached else []


def _unless_cached(read: Read) -> Read:
    return lambda model: [] if model.cached else read(model)


def _failures(model: Registered) -> Iterator[MetricSample]:
    for reason, count in model.statistics.failures.items():
        yield MetricSample(label_text(dict(sorted({**model.labels, "reason": reason.value}.items()))), count)


def _first_response(model: Registered) -> Iterator[MetricSample]:
    histogram = model.statistics.first_response
    if histogram is not None:
        yield from _histogram(model, histogram)


def _histogram(model: Registered, histogram: Histogram) -> Iterator[MetricSample]:
    yield MetricSample(model.text(), histogram.count, "_count")
    yield MetricSample(model.text(), histogram.sum, "_sum")
    for bound, count in zip([*map(number, histogram.bounds), "+Inf"], histogram.cumulative(), strict=True):
        yield MetricSample(model.text(le=bound), count, "_bucket")


def _work(value: Callable[[Work], float]) -> Read:
    return lambda model: [MetricSample(model.text(), value(model.statistics.work))] if model.statistics.work else []


def _work_histogram(choose: Callable[[Work], Histogram]) -> Read:
    return lambda model: _histogram(model, choose(model.statistics.work)) if model.statistics.work else []


def _generated(value: Callable[[Generation], float]) -> Read:
    def read(model: Registered) -> Iterator[MetricSample]:
        if model.statistics.generation is not None:
            yield MetricSample(model.text(), value(model.statistics.generation))

    return read


def _generated_histogram(choose: Callable[[Generation], Histogram]) -> Read:
    def read(model: Registered) -> Iterator[MetricSample]:
        if model.statistics.generation is not None:
            yield from _histogram(model, choose(model.statistics.generation))

    return read


def _waiting(model: Registered) -> Iterator[MetricSample]:
    if model.statistics.generation is not None:
        yield MetricSample(model.text(), len(model.statistics.queue) + model.statistics.generation.waiting)


def _finished(model: Registered) -> Iterator[MetricSample]:
    if model.statistics.generation is not None:
        for reason, count in model.statistics.generation.reasons.items():
            yield MetricSample(model.text(finished_reason=reason), count)


def _summary(choose: Callable[[Summaries], Summary]) -> Read:
    def read(model: Registered) -> Iterator[MetricSample]:
        if model.statistics.summaries is None:
            return
        summary = choose(model.statistics.summaries)
        yield MetricSample(model.text(), summary.count, "_count")
        yield MetricSample(model.text(), summary.sum, "_sum")
        for rank, value in zip(model.quantiles, summary.quantiles(model.quantiles), strict=True):
            yield MetricSample(model.text(quantile=number(rank)), value)

    return read


# fmt: off
COUNTS: Final[Mapping[Metric, Read]] = {
    Metric("nv_inference_request_success", "counter",
           "Number of successful inference requests, all batch sizes"):
        _count(lambda model: model.success_count),
    Metric("nv_inference_request_failure", "counter",
           "Number of failed inference requests, all batch sizes"):
        _failures,
    Metric("nv_inference_count", "counter",
           "Number of inferences performed (does not include cached requests)"):
        _count(lambda model: model.inference_count),
    Metric("nv_inference_exec_count", "counter",
           "Number of model executions performed (does not include cached requests)"):
        _count(lambda model: model.execution_count),
}

#: Left out with ``counter_latencies=false``.
DURATIONS: Final[Mapping[Metric, Read]] = {
    Metric("nv_inference_request_duration_us", "counter",
           "Cumulative inference request duration in microseconds (includes cached requests)"):
        _microseconds(lambda model: model.success_ns),
    Metric("nv_inference_queue_duration_us", "counter",
           "Cumulative inference queuing duration in microseconds (includes cached requests)"):
        _microseconds(lambda model: model.queue_ns),
    Metric("nv_inference_compute_input_duration_us", "counter",
           "Cumulative compute input duration in microseconds (does not include cached requests)"):
        _microseconds(lambda model: model.compute_input_ns),
    Metric("nv_inference_compute_infer_duration_us", "counter",
           "Cumulative compute inference duration in microseconds (does not include cached requests)"):
        _microseconds(lambda model: model.compute_infer_ns),
    Metric("nv_inference_compute_output_duration_us", "counter",
           "Cumulative inference compute output duration in microseconds (does not include cached requests)"):
        _microseconds(lambda model: model.compute_output_ns),
}

CACHE: Final[Mapping[Metric, Read]] = {
    Metric("nv_cache_num_hits_per_model", "counter",
           "Number of cache hits per model"):
        _if_cached(_count(lambda model: model.cache_hit_count)),
    Metric("nv_cache_hit_duration_per_model", "counter",
           "Total cache hit duration per model, in microseconds"):
        _if_cached(_microseconds(lambda model: model.cache_hit_ns)),
    Metric("nv_cache_num_misses_per_model", "counter",
           "Number of cache misses per model"):
        _if_cached(_count(lambda model: model.cache_miss_count)),
    Metric("nv_cache_miss_duration_per_model", "counter",
           "Total cache miss (insert+lookup) duration per model, in microseconds"):
        _if_cached(_microseconds(lambda model: model.cache_miss_ns)),
}

#: Of models whose worker counts tokens; not Triton's.
WORK: Final[Mapping[Metric, Read]] = {
    Metric("conch_tokens", "counter",
           "Number of tokens computed, without padding"):
        _work(lambda work: work.tokens),
    Metric("conch_padding_tokens", "counter",
           "Number of tokens computed in vain, to pad sequences of a run to the same length"):
        _work(lambda work: work.padded - work.tokens),
    Metric("conch_sequences", "counter",
           "Number of sequences computed"):
        _work(lambda work: work.sequences),
    Metric("conch_engine_runs", "counter",
           "Number of runs of the engine"):
        _work(lambda work: work.runs),
    Metric("conch_tokenize_duration_us", "counter",
           "Cumulative time to decode and tokenize requests in microseconds"):
        _work(lambda work: work.prepare_ns // 1000),
    Metric("conch_execution_sequences", "histogram",
           "Sequences of an execution"):
        _work_histogram(lambda work: work.sequences_per_execution),
    Metric("conch_execution_tokens", "histogram",
           "Tokens of an execution, with padding"):
        _work_histogram(lambda work: work.tokens_per_execution),
}

#: Of models that write text, under vLLM's names.
GENERATION: Final[Mapping[Metric, Read]] = {
    Metric("vllm:num_requests_running", "gauge",
           "Number of sequences in the running batch"):
        _generated(lambda generation: generation.running),
    Metric("vllm:num_requests_waiting", "gauge",
           "Number of requests waiting to be processed"):
        _waiting,
    Metric("vllm:kv_cache_usage_perc", "gauge",
           "KV-cache usage, 1 means 100 percent"):
        _generated(lambda generation: generation.cache_usage),
    Metric("vllm:prefix_cache_queries_total", "counter",
           "Prefix cache queries, in tokens"):
        _generated(lambda generation: generation.prefix_queries),
    Metric("vllm:prefix_cache_hits_total", "counter",
           "Prefix cache hits, in tokens"):
        _generated(lambda generation: generation.prefix_hits),
    Metric("vllm:num_preemptions_total", "counter",
           "Number of preemptions"):
        _generated(lambda generation: generation.preemptions),
    Metric("vllm:prompt_tokens_total", "counter",
           "Number of prompt tokens processed"):
        _generated(lambda generation: generation.prompt_tokens),
    Metric("vllm:generation_tokens_total", "counter",
           "Number of tokens generated"):
        _generated(lambda generation: generation.generated_tokens),
    Metric("vllm:request_success_total", "counter",
           "Number of sequences ended, by reason"):
        _finished,
    Metric("vllm:time_to_first_token_seconds", "histogram",
           "Time from the arrival of a request to its first token in seconds"):
        _generated_histogram(lambda generation: generation.first_token),
    Metric("vllm:inter_token_latency_seconds", "histogram",
           "Time between two tokens of a sequence in seconds"):
        _generated_histogram(lambda generation: generation.inter_token),
    Metric("vllm:time_per_output_token_seconds", "histogram",
           "Time between two tokens of a sequence in seconds, under its older name"):
        _generated_histogram(lambda generation: generation.inter_token),
    Metric("vllm:e2e_request_latency_seconds", "histogram",
           "Time from the arrival of a request to its end in seconds"):
        _generated_histogram(lambda generation: generation.request),
    Metric("vllm:request_queue_time_seconds", "histogram",
           "Time that a request waited before its worker took it in seconds"):
        _generated_histogram(lambda generation: generation.queue),
    Metric("vllm:request_prefill_time_seconds", "histogram",
           "Time from then to the first token in seconds"):
        _generated_histogram(lambda generation: generation.prefill),
    Metric("vllm:request_decode_time_seconds", "histogram",
           "Time from the first token to the last in seconds"):
        _generated_histogram(lambda generation: generation.decode),
    Metric("vllm:request_prompt_tokens", "histogram",
           "Tokens of a request's prompts"):
        _generated_histogram(lambda generation: generation.prompt_length),
    Metric("vllm:request_generation_tokens", "histogram",
           "Tokens generated for a request"):
        _generated_histogram(lambda generation: generation.generated_length),
    Metric("vllm:request_params_max_tokens", "histogram",
           "The greatest number of tokens that a request asked for"):
        _generated_histogram(lambda generation: generation.max_tokens),
    Metric("vllm:request_params_n", "histogram",
           "Sequences that a request asked for"):
        _generated_histogram(lambda generation: generation.samples),
}

GAUGES: Final[Mapping[Metric, Read]] = {
    Metric("nv_inference_pending_request_count", "gauge",
           "Instantaneous number of pending requests awaiting execution per-model."):
        _count(lambda model: len(model.queue)),
    Metric("nv_model_load_duration_secs", "gauge",
           "Model load time in seconds"):
        _count(lambda model: model.load_ns / 1e9),
}

#: Listed with ``histogram_latencies=true``.
HISTOGRAMS: Final[Mapping[Metric, Read]] = {
    Metric("nv_inference_first_response_histogram_ms", "histogram",
           "Duration from request to first response in milliseconds"):
        _first_response,
}

#: Listed with ``summary_latencies=true``.  Triton leaves the request summary out for models with a response cache.
SUMMARIES: Final[Mapping[Metric, Read]] = {
    Metric("nv_inference_request_summary_us", "summary",
           "Summary of inference request duration in microseconds (includes cached requests)"):
        _unless_cached(_summary(lambda summaries: summaries.request)),
    Metric("nv_inference_queue_summary_us", "summary",
           "Summary of inference queuing duration in microseconds (includes cached requests)"):
        _summary(lambda summaries: summaries.queue),
    Metric("nv_inference_compute_input_summary_us", "summary",
           "Cumulative compute input duration in microseconds (does not include cached requests)"):
        _summary(lambda summaries: summaries.compute_input),
    Metric("nv_inference_compute_infer_summary_us", "summary",
           "Cumulative compute inference duration in microseconds (does not include cached requests)"):
        _summary(lambda summaries: summaries.compute_infer),
    Metric("nv_inference_compute_output_summary_us", "summary",
           "Cumulative inference compute output duration in microseconds (does not include cached requests)"):
        _summary(lambda summaries: summaries.compute_output),
    Metric("nv_cache_hit_summary_per_model", "summary",
           "Summary of cache hit counts/durations per model, in microseconds."):
        _if_cached(_summary(lambda summaries: summaries.cache_hit)),
    Metric("nv_cache_miss_summary_per_model", "summary",
           "Summary of cache miss counts/durations per model, in microseconds."):
        _if_cached(_summary(lambda summaries: summaries.cache_miss)),
}
# fmt: on
