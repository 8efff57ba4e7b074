"""Reads the metrics page of conch or Triton: the totals of each model version, and the figures of the machine.

Pure. Families that a server lacks are zero or None: Triton has no memory per model, readiness or restarts, and no
histograms of all requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isnan
from statistics import fmean
from typing import Final

from conch.measure.metrics_page import labels_of, samples
from conch.measure.perf.server.statistics import SERVER_STAGES

#: The name and the version of a model.
ModelKey = tuple[str, str]
Buckets = dict[float, float]

_MILLISECONDS: Final = {
    "conch_inference_request_histogram_ms_bucket": "request",
    "conch_inference_queue_histogram_ms_bucket": "queue",
}
_SECONDS: Final = {
    "vllm:time_to_first_token_seconds_bucket": "first_token",
    "vllm:inter_token_latency_seconds_bucket": "inter_token",
    "vllm:e2e_request_latency_seconds_bucket": "generation",
}
#: Parts of the memory that is counted.
_WITHIN: Final = ("weights", "kv_cache")


@dataclass(slots=True)
class ModelCounts:
    """The totals of a model version since its load, and its current gauges.

    ``totals`` are counters by name, ``buckets`` cumulative counts by histogram and upper bound (ms), ``quantiles``
    those of Triton's summary (ms), ``failures`` and ``restarts`` counters by reason, ``memory`` bytes by kind.
    """

    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    buckets: dict[str, Buckets] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    quantiles: dict[float, float] = field(default_factory=dict)
    failures: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    restarts: dict[str, float] | None = None
    memory: dict[str, float] | None = None
    waiting: float = 0.0
    #: None if the server does not report it.
    ready: bool | None = None
    #: Gauges of text generation by name; empty for other models.
    generation: dict[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> float | None:
        """The memory of the model; None if the server does not report it."""
        if self.memory is None:
            return None
        return sum(size for kind, size in self.memory.items() if kind not in _WITHIN)


@dataclass(slots=True)
class ServerCounts:
    """A metrics page: the counts of all model versions, and the gauges of the machine by name, means over its GPUs.

    ``conch`` is whether the server is conch, which reports itself as Triton to clients.
    """

    conch: bool = False
    models: dict[ModelKey, ModelCounts] = field(default_factory=lambda: defaultdict(ModelCounts))
    gauges: dict[str, float] = field(default_factory=dict)


_TOTALS: Final = {
    "nv_inference_request_success": "success",
    "nv_inference_count": "inferences",
    "nv_inference_exec_count": "executions",
    "nv_inference_request_duration_us": "request",
    **{f"nv_inference_{part}_duration_us": part for part in SERVER_STAGES},
    "conch_tokens": "tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "nv_cache_num_hits_per_model": "cache_hits",
    "nv_cache_num_misses_per_model": "cache_misses",
}
_GENERATION: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache",
}


def read_counts(page: str) -> ServerCounts:
    """Read a page in Prometheus' text format; lines of unknown families are ignored."""
    counts = ServerCounts("# TYPE conch_model_ready" in page)
    gauges: dict[str, list[float]] = defaultdict(list)
    for name, text, value in samples(page):
        labels = labels_of(text)
        if "model" in labels:
            # Triton's and conch's versions; the worker kills of conch have none.
            if "version" in labels:
                _add(counts.models[labels["model"], labels["version"]], name, labels, value)
        elif name.startswith(("nv_cpu_", "nv_gpu_")):
            gauges[name].append(value)
    counts.gauges = {name: fmean(values) for name, values in gauges.items()}
    return counts


def _add(model: ModelCounts, name: str, labels: Mapping[str, str], value: float) -> None:
    if (total := _TOTALS.get(name)) is not None:
        model.totals[total] += value
    elif name == "nv_inference_request_failure":
        model.failures[labels.get("reason", "")] += value
    elif name == "nv_inference_pending_request_count":
        model.waiting = value
    elif (histogram := _MILLISECONDS.get(name)) is not None:
        model.buckets[histogram][_bound(labels["le"])] += value
    elif (histogram := _SECONDS.get(name)) is not None:
        model.buckets[histogram][_bound(labels["le"]) * 1000] += value
    elif name == "nv_inference_request_summary_us" and not isnan(value):
        model.quantiles[float(labels["quantile"])] = value / 1000
    elif name == "conch_model_ready":
        model.ready = bool(value)
    elif name == "conch_model_memory_bytes":
        model.memory = {**(model.memory or {}), labels["kind"]: value}
    elif name == "conch_worker_restarts_total":
        model.restarts = {**(model.restarts or {}), labels["reason"]: value}
    elif (gauge := _GENERATION.get(name)) is not None:
        model.generation[gauge] = value


def _bound(text: str) -> float:
    return inf if text == "+Inf" else float(text)
