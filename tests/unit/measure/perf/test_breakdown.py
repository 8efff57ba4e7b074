"""Where the time of a request goes: the steps add up to what the client waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from conch.measure.perf.breakdown import StageTotals, TimeSpent, breakdown, totals_of
from conch.measure.perf.figures import LatencyFigures, WindowFigures
from conch.measure.perf.measured import Measured
from conch.measure.perf.server.statistics import ServerFigures, Stage

NONE = StageTotals({}, 0.0)


def took(seconds: float) -> LatencyFigures:
    return LatencyFigures(seconds, 0.0, {}, seconds)


def measured(*server: ServerFigures, latency: float = 0.010) -> Measured:
    figures = WindowFigures(
        1.0, 100, 100.0, {}, took(latency), took(0.0005), took(latency - 0.0007), took(0.0002), took(0.0)
    )
    return Measured(1, figures, None, (figures,), True, server, {}, 0.1, 0, 0.0)


def model(name: str, executions: int = 100, **stages: float) -> ServerFigures:
    return ServerFigures(name, "1", 100, executions, {one: Stage(100, seconds) for one, seconds in stages.items()})


BERT = model("bert", success=0.008, queue=0.001, compute_input=0.0001, compute_infer=0.006, compute_output=0.0002)


def by_what(rows: Sequence[TimeSpent]) -> Mapping[str, float]:
    return {row.what.partition(":")[0]: row.seconds for row in rows}


def test_steps_add_up_to_the_clients_latency() -> None:
    stages = StageTotals({"conch_engine_duration_us": 0.3, "conch_arrange_duration_us": 0.06}, 0.6)

    rows = breakdown(measured(BERT), "bert", "http", stages)

    assert sum(row.seconds for row in rows) == pytest.approx(0.010)
    found = by_what(rows)
    assert found["kernel and network both ways, http in the server"] == pytest.approx(0.0013)
    assert found["to the worker and back"] == pytest.approx(0.0007)
    # Half of what the executions took, and so half of this request's.
    assert found["the network"] == pytest.approx(0.003)
    assert found["divide, pad and create the arrays"] == pytest.approx(0.0006)
    assert found["other computation"] == pytest.approx(0.0024)


def test_model_whose_worker_counts_nothing_computes_in_one_piece() -> None:
    rows = breakdown(measured(BERT), "bert", "grpc", NONE)

    assert sum(row.seconds for row in rows) == pytest.approx(0.010)
    assert by_what(rows)["compute"] == pytest.approx(0.006)


def test_steps_of_an_ensemble_are_named() -> None:
    whole = model("both", 0, success=0.008, queue=0.0005)
    first, second = model("tokenizer", success=0.002), model("bert", success=0.005)

    rows = breakdown(measured(whole, first, second), "both", "http", NONE)

    assert sum(row.seconds for row in rows) == pytest.approx(0.010)
    found = by_what(rows)
    assert (found["tokenizer"], found["bert"]) == (pytest.approx(0.002), pytest.approx(0.005))


def test_server_that_counts_nothing_is_one_stretch() -> None:
    rows = breakdown(measured(), "bert", "openai", NONE)

    assert [row.where for row in rows] == ["client", "server", "client"]
    assert sum(row.seconds for row in rows) == pytest.approx(0.010)


def test_without_an_answer_there_is_nothing() -> None:
    figures = WindowFigures(1.0, 0, 0.0, {}, None, None, None, None, None)

    assert breakdown(Measured(1, figures, None, (), False, (), {}, 0, 0, 0), "bert", "http", NONE) == []


def test_counters_are_read_from_the_page_of_metrics() -> None:
    page = (
        "# HELP conch_engine_duration_us Time\n"
        'conch_engine_duration_us{model="bert",version="1"} 250000\n'
        'conch_engine_duration_us{model="bert",version="2"} 250000\n'
        'conch_engine_duration_us{model="other",version="1"} 9\n'
        "process_cpu_seconds_total 3\n"
    )
    statistics: list[Mapping[str, Any]] = [
        {"name": "bert", "batch_stats": [{"compute_infer": {"count": "2", "ns": "600000000"}}]},
        {"name": "other", "batch_stats": [{"compute_infer": {"ns": "5"}}]},
    ]

    found = totals_of(page, statistics, "bert")

    assert found == StageTotals({"conch_engine_duration_us": 0.5}, 0.6)
    assert found.since(StageTotals({"conch_engine_duration_us": 0.2}, 0.4)).by_metric == {
        "conch_engine_duration_us": pytest.approx(0.3)
    }
    # A reloaded model counts from zero.
    assert found.since(StageTotals({"conch_engine_duration_us": 9.0}, 9.0)) == found


def test_a_stream_is_received_while_the_server_computes() -> None:
    one = measured(BERT)
    stream = replace(one, figures=replace(one.figures, wait=took(0.002), receive=took(0.0075)))

    rows = breakdown(stream, "bert", "http", NONE)

    assert sum(row.seconds for row in rows) == pytest.approx(0.010)
    assert all(row.seconds >= 0 for row in rows) and "receive" not in by_what(rows)
