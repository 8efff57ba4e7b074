"""The rows and totals of the console, from versions in each of their states."""

from __future__ import annotations

from math import isnan
from types import SimpleNamespace
from typing import Any

from conch.config.pbtxt import parse
from conch.machine.memory import FreeMemory
from conch.repository.names import Naming
from conch.server.models.states import UNLOADED, ModelState, ModelTable, State, VersionState
from conch.server.overview import TOTALS, Overview
from conch.telemetry.statistics import FINE_LATENCY_BUCKETS, FailureReason, Histogram, ModelStatistics


class FakeModel:
    """A version that serves."""

    unavailable_reason = ""

    def __init__(self, serial: int, config: str = 'backend: "python"') -> None:
        self.serial = serial
        self.ready, self.in_flight = True, 0
        self.config = parse(config, "m")
        self.executor = SimpleNamespace()
        self.statistics = ModelStatistics("m", 1, fine_latency=Histogram(FINE_LATENCY_BUCKETS))

    def serve(self, milliseconds: float, times: int = 1) -> None:
        for _ in range(times):
            self.statistics.record_success(1, 0, 0, 0, 0, int(milliseconds * 1e6))


def serving(model: Any) -> VersionState:
    return VersionState(State.READY, "", model)


def observe(overview: Overview, now: float, *directories: str) -> dict[str, dict[str, Any]]:
    """Return the rows by key, after a tick at ``now``."""
    rows = list(overview.rows(now, directories))
    overview.finish(1000 + now, rows, FreeMemory(100, 40, False))
    return {row["key"]: row for row in rows}


def test_each_state_has_a_row_and_no_path_of_the_server() -> None:
    table = ModelTable()
    unread = "cannot read /srv/team/models/broken/1/model.py"
    table.models["broken"] = ModelState("broken", version_reason=unread)
    failed = VersionState(State.UNAVAILABLE, "no such file: /srv/team/models/m/2/model.onnx")
    table.models["m"] = ModelState("m", {3: VersionState(State.LOADING), 1: serving(FakeModel(1)), 2: failed})
    table.models["gone"] = ModelState("gone", {1: VersionState(State.UNAVAILABLE, UNLOADED)})
    rows = observe(Overview(table), 0, "m", "never")
    assert list(rows) == ["broken/", "m/1", "m/2", "m/3", "gone/1", "never/"]
    assert [row["state"] for row in rows.values()] == [
        "UNAVAILABLE",
        "READY",
        "UNAVAILABLE",
        "LOADING",
        "UNAVAILABLE",
        "",
    ]
    assert "/srv" not in str(rows) and "model.onnx" in rows["m/2"]["reason"]
    assert [key for key, row in rows.items() if "rate" in row] == ["m/1"]
    assert rows["m/1"]["responsive"] and rows["m/1"]["backend"] == "python" and rows["m/1"]["p99"] is None


def test_totals_are_those_of_clients_and_name_the_slowest_version() -> None:
    table = ModelTable()
    fast, slow = FakeModel(1), FakeModel(2)
    table.models["fast"], table.models["slow"] = (
        ModelState("fast", {1: serving(fast)}),
        ModelState("slow", {1: serving(slow)}),
    )
    overview = Overview(table)
    observe(overview, 0)
    fast.serve(1, times=20)
    slow.serve(500, times=10)
    slow.statistics.record_failure(FailureReason.BACKEND, 1)
    slow.in_flight = 3
    observe(overview, 10)
    totals = overview.totals
    assert (totals["rate"], totals["failures"], totals["in_flight"]) == (3.1, 0.1, 3)
    assert totals["slowest"] == "slow/1" and 450 < totals["p99"] < 550
    assert (totals["machine_total"], totals["machine_available"]) == (100, 40)


def test_history_has_a_sample_of_each_version_and_of_the_totals() -> None:
    table = ModelTable()
    model = FakeModel(1)
    table.models["m"] = ModelState("m", {1: serving(model)})
    overview = Overview(table)
    observe(overview, 0)
    model.serve(10, times=5)
    observe(overview, 10)
    observe(overview, 12)  # too early for another sample
    series = overview.history.series(overview.key("m", 1))
    assert series["time"] == [1000, 1010] and series["rate"] == [0, 0.5]
    assert isnan(series["p50"][0]) and 9 < series["p50"][1] < 11
    assert overview.history.series(TOTALS)["rate"] == [0, 0.5]


def test_version_that_is_loaded_again_counts_from_zero() -> None:
    table = ModelTable()
    model = FakeModel(1)
    table.models["m"] = ModelState("m", {1: serving(model)})
    overview = Overview(table)
    observe(overview, 0)
    model.serve(1, times=10)
    assert observe(overview, 1)["m/1"]["rate"] == 10
    table.models["m"].versions[1] = serving(FakeModel(2))
    row = observe(overview, 2)["m/1"]
    assert (row["serial"], row["rate"], row["succeeded"]) == (2, 0, 0)


def test_models_with_the_same_name_have_rows_of_their_own_without_the_paths_of_repositories() -> None:
    table = ModelTable(Naming(["/srv/a", "/srv/b"]))
    models = {f"/srv/{place}::m": FakeModel(serial) for serial, place in enumerate("ab")}
    for key, model in models.items():
        table.models[key] = ModelState(key, {1: serving(model)})
    overview = Overview(table)
    rows = observe(overview, 0, *models, "/srv/b::other")
    assert [(row["key"], row["name"], row["repository"]) for row in rows.values()] == [
        ("1::m/1", "m", 1),
        ("2::m/1", "m", 2),
        ("2::other/", "other", 2),
    ]
    assert "/srv" not in str(rows)
    assert overview.history.series(overview.key("/srv/b::m", 1))["rate"] == [0]
