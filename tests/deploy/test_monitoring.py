"""The dashboard and the rules of ``deploy/monitoring`` use metrics and labels that a server has."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from conch.deploy.dashboard import dashboard, queries
from conch.telemetry import metrics
from conch.telemetry.exposition import Metric
from conch.telemetry.metrics import MetricsConfig, Registry
from tests.conformance.raw import post, tensor
from tests.deploy.registry import ROOT
from tests.models import write
from tests.servers import ConchServer

RULES = yaml.safe_load((ROOT / "deploy/monitoring/rules.yaml").read_text())
RECORDED = {rule["record"]: rule["expr"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
#: Labels that Prometheus adds to every series of a server.
TARGET = {"job", "instance", "namespace"}
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
TENSORS = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""
GENERATED = {
    "prompt": 1, "generated": 1, "preempted": 0, "queries": 0, "hits": 0, "first": [], "gaps": [], "ended": [],
    "running": 0, "waiting": 0, "used": 0, "capacity": 0, "bytes": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each series: of a real server with a Python model, and of what needs engines or GPUs."""
    folder: Path = tmp_path_factory.mktemp("monitoring")
    config = TENSORS + "response_cache { enable: true }"
    write(folder / "models", "plain", config, {"1/model.py": MODEL})
    flags = (
        "--metrics-config=histogram_latencies=true",
        "--cache-config=local,size=1000000",
        "--model-control-mode=on-demand",
        "--head-timeout-secs=1",
    )
    with ConchServer(folder / "models", *flags, log=folder / "log") as server:
        reply = post(server.http, "/v2/models/plain/infer", {"inputs": [tensor("X", "INT32", [1])]})
        assert reply.status == 200, reply.body
        host, _, port = server.http.partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as silent:
            silent.sendall(b"GET /")
            while silent.recv(1000):  # until the server closes the connection
                pass
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    registry = Registry(MetricsConfig(histogram_latencies=True), gpu=False)
    statistics = registry.statistics("m", 1)
    statistics.record_work({"tokens": 1})
    statistics.record_generation(1, GENERATED)
    registry.register(statistics)
    gpus = {
        value.name: {"gpu_uuid"}
        for value in vars(metrics).values()
        if isinstance(value, Metric) and "GPU" in value.help
    }
    return series(registry.render().decode()) | series(text) | gpus


def series(text: str) -> dict[str, set[str]]:
    """The names of series on a page with their labels; families without samples have none yet."""
    labels: dict[str, set[str]] = {name: set() for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            labels.setdefault(name.split(" ")[0], set()).update(re.findall(r'[{,](\w+)="', "{" + rest))
    return labels


def parts(expression: Any) -> Iterator[Any]:
    """The expression and all that it consists of."""
    yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (inner := getattr(expression, name, None)) is not None:
            yield from parts(inner)
    for argument in getattr(expression, "args", ()):
        yield from parts(argument)


def selectors(expression: Any) -> list[Any]:
    return [part for part in parts(expression) if isinstance(part, promql_parser.VectorSelector)]


def labels_of(name: str, page: dict[str, set[str]]) -> set[str]:
    if name in RECORDED:
        return result_labels(promql_parser.parse(RECORDED[name]), page)
    return TARGET if name == "up" else page[name] | TARGET


def result_labels(expression: Any, page: dict[str, set[str]]) -> set[str]:
    """The labels that the result of an expression can have."""
    for part in parts(expression):
        if isinstance(part, promql_parser.AggregateExpr):
            return set(part.modifier.labels)
        if isinstance(part, promql_parser.VectorSelector):
            return labels_of(part.name, page)
    raise AssertionError(expression)


def unknown(text: str, page: dict[str, set[str]]) -> list[str]:
    """What an expression uses and no server has."""
    expression = promql_parser.parse(text)
    names = {selector.name for selector in selectors(expression)}
    if lacking := names - page.keys() - RECORDED.keys() - {"up"}:
        return sorted(lacking)
    asked = {
        (selector.name, matcher.name) for selector in selectors(expression) for matcher in selector.matchers.matchers
    }
    for part in parts(expression):
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            asked |= {(inner.name, label) for inner in selectors(part) for label in part.modifier.labels}
    return sorted(f"{name}{{{label}}}" for name, label in asked if label not in labels_of(name, page))


def plain(query: str) -> str:
    """A query of the dashboard with values for Grafana's variables."""
    return re.sub(r"\$__rate_interval", "5m", re.sub(r"\$(job|instance|model)", ".*", query))


def test_the_dashboard_uses_series_that_exist(page: dict[str, set[str]]) -> None:
    asked = list(queries())
    assert len(asked) > 40
    assert {query: lacking for query in asked if (lacking := unknown(plain(query), page))} == {}


def test_rules_use_series_that_exist(page: dict[str, set[str]]) -> None:
    expressions = [*RECORDED.values(), *(alert["expr"] for alert in ALERTS.values())]
    assert {text: lacking for text in expressions if (lacking := unknown(text, page))} == {}


def test_a_series_or_label_that_no_server_has_is_found(page: dict[str, set[str]]) -> None:
    assert unknown("rate(nv_inference_requests[5m])", page) == ["nv_inference_requests"]
    assert unknown('sum by (modell) (conch_model_ready{versoin="1"})', page) == [
        "conch_model_ready{modell}", "conch_model_ready{versoin}",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ALERTS)
def test_annotations_name_labels_that_the_alert_has(name: str, page: dict[str, set[str]]) -> None:
    alert = ALERTS[name]
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(alert["annotations"].values())))
    assert alert["annotations"].keys() == {"summary", "description"}
    assert used <= result_labels(promql_parser.parse(alert["expr"]), page)


def test_the_written_dashboard_is_the_declared_one_and_its_panels_do_not_overlap() -> None:
    written = (ROOT / "deploy/monitoring/dashboard.json").read_text()
    assert written == dashboard(), "run make docs"
    model = json.loads(written)
    panels = [panel for row in model["panels"] for panel in (row, *row.get("panels", ()))]
    assert len({panel["id"] for panel in panels}) == len(panels)
    shown = [panel["gridPos"] for panel in model["panels"]]
    cells = [(place["x"] + x, place["y"] + y) for place in shown for x in range(place["w"]) for y in range(place["h"])]
    assert len(set(cells)) == len(cells)
    assert all(place["x"] + place["w"] <= 24 for place in shown)
    legends = {label for panel in panels for target in panel.get("targets", ()) for label in legend_labels(target)}
    assert legends <= {"model", "reason", "version", "instance", "protocol", "finished_reason", "gpu_uuid"}


def legend_labels(target: dict[str, str]) -> list[str]:
    return re.findall(r"{{(\w+)}}", target["legendFormat"])


def test_the_rules_that_promtool_tests_are_those_that_are_deployed() -> None:
    tests = yaml.safe_load((ROOT / "deploy/monitoring/rules_test.yaml").read_text())
    assert tests["rule_files"] == ["rules.yaml"]
    named = {case["alertname"] for test in tests["tests"] for case in test.get("alert_rule_test", ())}
    assert named <= ALERTS.keys()
