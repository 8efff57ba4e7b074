"""The Grafana dashboard of conch servers, as the JSON model that Grafana imports.

``deploy/monitoring/dashboard.json`` is this dashboard (``make docs`` writes it), and ``conch deploy kubernetes`` puts
it into a ConfigMap. Panels are declared here; their positions follow from their order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

#: Panels fill rows of this many units; a graph is a third of it wide.
_WIDTH: Final = 24
#: The selectors of queries, which use the variables of the dashboard.
_SERVER: Final = 'job=~"$job",instance=~"$instance"'
_MODEL: Final = f'{_SERVER},model=~"$model"'


class Panel(NamedTuple):
    """A panel: its queries by legend, and its unit in Grafana's words (``reqps``, ``ms``, ``bytes`` …)."""

    title: str
    unit: str
    queries: Mapping[str, str]
    help: str = ""
    kind: str = "timeseries"
    stacked: bool = False
    maximum: float | None = None
    #: The value from which a number is red.
    red: float | None = None


def _rate(metric: str, labels: str = _MODEL) -> str:
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def _per_model(metric: str, labels: str = "model") -> str:
    return f"sum by ({labels}) ({_rate(metric)})"


def _mean(metric: str, count: str = "nv_inference_request_success") -> str:
    return f"{_per_model(metric)} / {_per_model(count)}"


def _share(part: str, rest: str) -> str:
    return f"{_per_model(part)} / ({_per_model(part)} + {_per_model(rest)})"


def _quantile(quantile: float, histogram: str) -> str:
    return f"histogram_quantile({quantile}, sum by (model, le) ({_rate(histogram + '_bucket')}))"


def _quantiles(histogram: str) -> Mapping[str, str]:
    return {f"{{{{model}}}} p{quantile * 100:.0f}": _quantile(quantile, histogram) for quantile in (0.5, 0.99)}


_HISTOGRAMS: Final = "Needs --metrics-config=histogram_latencies=true."
_FAILURES: Final = f"sum({_rate('nv_inference_request_failure')})"
_SUCCESSES: Final = f"sum({_rate('nv_inference_request_success')})"
_MEMORY: Final = f'conch_model_memory_bytes{{{_MODEL},kind=~"workers|shared_regions|gpu"}}'

#: The panels of each row. A closed row is opened by a click; the first has no title.
ROWS: Final[Mapping[str, tuple[Panel, ...]]] = {
    "": (
        Panel("Servers up", "short", {"": f"sum(up{{{_SERVER}}})"}, kind="stat"),
        Panel("Models not ready", "short", {"": f"count(conch_model_ready{{{_MODEL}}} == 0) or vector(0)"},
              "Model versions that cannot run requests now.", kind="stat", red=1),
        Panel("Requests", "reqps", {"": f"{_SUCCESSES} + {_FAILURES}"}, kind="stat"),
        Panel("Failed requests", "percentunit", {"": f"{_FAILURES} / ({_SUCCESSES} + {_FAILURES} > 0) or vector(0)"},
              kind="stat", red=0.01),
        Panel("Waiting requests", "short", {"": f"sum(nv_inference_pending_request_count{{{_MODEL}}})"}, kind="stat"),
        Panel("Worker restarts, 1 h", "short", {"": f"sum(increase(conch_worker_restarts_total{{{_MODEL}}}[1h]))"},
              kind="stat", red=1),
    ),
    "Requests": (
        Panel("Requests", "reqps", {"{{model}}": f"{_per_model('nv_inference_request_success')}"}),
        Panel("Failures by reason", "reqps",
              {"{{model}} {{reason}}": _per_model("nv_inference_request_failure", "model, reason")},
              "REJECTED: full queue or timeout. BACKEND: the model failed. OTHER: a step of an ensemble failed."),
        Panel("Waiting requests", "short",
              {"{{model}}": f"sum by (model) (nv_inference_pending_request_count{{{_MODEL}}})"}),
        Panel("Duration", "ms", _quantiles("conch_inference_request_histogram_ms"), _HISTOGRAMS),
        Panel("Time in the queue", "ms", _quantiles("conch_inference_queue_histogram_ms"), _HISTOGRAMS),
        Panel("Mean duration by part", "µs", {
            "{{model}} queue": _mean("nv_inference_queue_duration_us"),
            "{{model}} input": _mean("nv_inference_compute_input_duration_us"),
            "{{model}} compute": _mean("nv_inference_compute_infer_duration_us"),
            "{{model}} output": _mean("nv_inference_compute_output_duration_us"),
        }, stacked=True),
    ),
    "Batches": (
        Panel("Mean batch size", "short", {"{{model}}": _mean("nv_inference_count", "nv_inference_exec_count")}),
        Panel("Tokens", "short", {"{{model}}": _per_model("conch_tokens")}, "Tokens per second of encoders."),
        Panel("Padding", "percentunit", {"{{model}}": _share("conch_padding_tokens", "conch_tokens")}, maximum=1),
        Panel("Cache hits", "percentunit",
              {"{{model}}": _share("nv_cache_num_hits_per_model", "nv_cache_num_misses_per_model")},
              "Needs --cache-config.", maximum=1),
    ),
    "Text generation": (
        Panel("Time to first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
        Panel("Time between tokens", "s", _quantiles("vllm:inter_token_latency_seconds")),
        Panel("Tokens", "short", {
            "{{model}} prompt": _per_model("vllm:prompt_tokens_total"),
            "{{model}} generated": _per_model("vllm:generation_tokens_total"),
        }, "Tokens per second."),
        Panel("Sequences", "short", {
            "{{model}} running": f"sum by (model) (vllm:num_requests_running{{{_MODEL}}})",
            "{{model}} waiting": f"sum by (model) (vllm:num_requests_waiting{{{_MODEL}}})",
        }),
        Panel("KV cache", "percentunit", {"{{model}}": f"max by (model) (vllm:kv_cache_usage_perc{{{_MODEL}}})"},
              maximum=1),
        Panel("Prefix cache hits", "percentunit",
              {"{{model}}": _mean("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")}, maximum=1),
        Panel("Finished sequences", "short",
              {"{{model}} {{finished_reason}}": _per_model("vllm:request_success_total", "model, finished_reason")},
              "Sequences per second."),
        Panel("Preemptions", "short", {"{{model}}": _per_model("vllm:num_preemptions_total")},
              "Sequences per second that lost their KV cache to others."),
    ),
    "Workers and memory": (
        Panel("Memory of models", "bytes", {"{{model}}": f"sum by (model) ({_MEMORY})"}, stacked=True),
        Panel("Memory of worker templates", "bytes", {"{{instance}}": f"conch_template_memory_bytes{{{_SERVER}}}"}),
        Panel("Worker restarts", "short",
              {"{{model}} {{reason}}":
               f"sum by (model, reason) (increase(conch_worker_restarts_total{{{_MODEL}}}[$__rate_interval])) > 0"},
              "sigkill: possibly out of memory. killed: by the server, because the worker hung."),
        Panel("Ready", "short", {"{{model}} {{version}}": f"min by (model, version) (conch_model_ready{{{_MODEL}}})"},
              maximum=1),
        Panel("Load time", "s", {"{{model}}": f"max by (model) (nv_model_load_duration_secs{{{_MODEL}}})"}),
        Panel("Loads and evictions on demand", "short", {
            "{{model}} loads": f"sum by (model) (increase(conch_demand_loads{{{_MODEL}}}[$__rate_interval]))",
            "{{model}} evictions": f"sum by (model) (increase(conch_demand_evictions{{{_MODEL}}}[$__rate_interval]))",
        }, "Needs --model-control-mode=on-demand."),
    ),
    "Server": (
        Panel("CPU", "percentunit", {"{{instance}}": f"nv_cpu_utilization{{{_SERVER}}}"}, maximum=1),
        Panel("Memory of the machine", "percentunit", {
            "{{instance}}": f"nv_cpu_memory_used_bytes{{{_SERVER}}} / nv_cpu_memory_total_bytes{{{_SERVER}}}",
        }, maximum=1),
        Panel("GPU", "percentunit", {
            "{{gpu_uuid}} busy": f"nv_gpu_utilization{{{_SERVER}}}",
            "{{gpu_uuid}} memory": f"nv_gpu_memory_used_bytes{{{_SERVER}}} / nv_gpu_memory_total_bytes{{{_SERVER}}}",
        }, maximum=1),
        Panel("Connections", "short", {"{{protocol}}": f"sum by (protocol) (conch_connections{{{_SERVER}}})"}),
        Panel("Bytes in flight", "percentunit", {
            "{{instance}}": f"conch_bytes_in_flight{{{_SERVER}}} / conch_max_bytes_in_flight{{{_SERVER}}}",
        }, maximum=1),
        Panel("Connections and calls ended by limits", "short", {
            "{{protocol}} {{reason}}": f"sum by (protocol, reason) ({_rate('conch_closed_connections', _SERVER)})",
        }),
    ),
}  # fmt: skip
_CLOSED: Final = ("Batches", "Text generation", "Server")


def dashboard() -> str:
    """Return the dashboard as JSON text that ends with a newline."""
    document = {
        "title": "conch",
        "uid": "conch",
        "tags": ["conch", "triton"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def queries() -> Iterator[str]:
    """Yield the queries of all panels, with Grafana's variables."""
    for panels in ROWS.values():
        for panel in panels:
            yield from panel.queries.values()


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    labels = {"job": "", "instance": '{job=~"$job"}', "model": f"{{{_SERVER}}}"}
    for label, selector in labels.items():
        yield {
            "name": label,
            "type": "query",
            "datasource": _source(),
            "query": f"label_values(nv_inference_request_success{selector}, {label})",
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        }


def _panels() -> Iterator[dict[str, Any]]:
    """Yield the rows with their panels; the panels of an open row follow it, those of a closed one are in it."""
    numbers = iter(range(1, 1000))
    top = 0
    for title, panels in ROWS.items():
        width, height = (_WIDTH // len(panels), 4) if not title else (_WIDTH // 3, 8)
        row = {"id": next(numbers), "type": "row", "title": title, "gridPos": _position(0, top, _WIDTH, 1)}
        top += 1 if title else 0
        drawn = []
        for index, panel in enumerate(panels):
            down, right = divmod(index * width, _WIDTH)
            drawn.append(_panel(panel, next(numbers), _position(right, top + down * height, width, height)))
        closed = title in _CLOSED
        if title:
            yield {**row, "collapsed": closed, "panels": drawn if closed else []}
        if not closed:
            yield from drawn
            top += height * -(-len(panels) * width // _WIDTH)


def _panel(panel: Panel, number: int, position: Mapping[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "timeseries":
        stacking = "normal" if panel.stacked else "none"
        custom = {"fillOpacity": 30 if panel.stacked else 5, "showPoints": "never", "stacking": {"mode": stacking}}
        defaults["custom"] = custom
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        steps += [{"color": "red", "value": panel.red}] if panel.red is not None else []
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _source(),
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": list(_targets(panel.queries.items())),
    }


def _targets(queries: Iterable[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    for letter, (legend, query) in zip("ABCDEFGH", queries, strict=False):
        yield {"refId": letter, "expr": query, "legendFormat": legend, "datasource": _source()}


def _position(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}
