"""``pb_utils.MetricFamily`` in a real worker process: what it asks and tells the server, and when."""

from __future__ import annotations

from pathlib import Path

from tests.unit.backends.python.interpreters import every_python
from tests.unit.backends.python.worker import Header, LaunchWorker, Worker, first

MODEL = """
KINDS = pb_utils.MetricFamily
class TritonPythonModel:
    def execute(self, requests):
        exec(text(requests[0]), globals())
        return [answer(str(result))]
result = None
"""


def agree(worker: Worker, bounds: list[float] | None = None) -> Header:
    """Answer a call with nothing to complain about, but for the bounds of a shared histogram; the call."""
    call, _ = worker.receive()
    assert call["op"] == "metric_control", call
    value = {"value": {"value": 4.5}, "series": {"bounds": bounds or call.get("bounds")}}.get(call["do"], {})
    worker.send({"op": "answer", "call": call["call"], "outputs": [], "parameters": value, "final": True})
    return call


@every_python
def test_changes_come_added_up_before_the_answer_of_the_request_that_made_them(launch: LaunchWorker) -> None:
    worker = launch(MODEL)
    worker.submit("""
counters = KINDS("toys", "Counts toys", KINDS.COUNTER)
counter = counters.Metric({"model": "m"})
sizes = KINDS(name="sizes", description="Sizes", kind=KINDS.HISTOGRAM)
histogram = sizes.Metric(labels={}, buckets=[1, 2.5])
gauges = KINDS("queue", "Waiting", KINDS.GAUGE)
depth = gauges.Metric()
for value in (1, 9, 2, 2.5):
    counter.increment(value)
    histogram.observe(value)
depth.increment(3); depth.set(7); depth.increment(-1.5)
""")
    made = [agree(worker) for _ in range(6)]
    assert [(one["do"], one.get("name"), one.get("kind"), one.get("labels"), one.get("bounds")) for one in made] == [
        ("family", "toys", "COUNTER", None, None),
        ("series", None, None, {"model": "m"}, []),
        ("family", "sizes", "HISTOGRAM", None, None),
        ("series", None, None, {}, [1, 2.5]),
        ("family", "queue", "GAUGE", None, None),
        ("series", None, None, {}, []),
    ]
    assert [one["family"] for one in made[1::2]] == [one["number"] for one in made[::2]]
    counter, histogram, depth = (one["number"] for one in made[1::2])
    changes, _ = worker.receive()
    assert changes == {
        "op": "metrics",
        "series": [
            [counter, False, 14.5, []],
            [histogram, False, 14.5, [[0, 1], [2, 1], [1, 2]]],
            [depth, True, 5.5, []],
        ],
    }
    assert worker.read()["op"] == "done"
    assert worker.text("result = 'told'") == "told"  # nothing has changed: nothing goes before it


def test_observations_of_a_shared_histogram_are_counted_in_its_own_buckets(launch: LaunchWorker) -> None:
    worker = launch(MODEL)
    worker.submit("""
sizes = KINDS("sizes", "Sizes", KINDS.HISTOGRAM)
histogram = sizes.Metric(buckets=[1, 2, 3, 4])
histogram.observe(9)
histogram.observe(5)
""")
    agree(worker)
    series = agree(worker, bounds=[1, 5])
    changes, _ = worker.receive()
    assert changes == {"op": "metrics", "series": [[series["number"], False, 14.0, [[2, 1], [1, 1]]]]}


def test_value_is_asked_for_after_the_changes_so_far(launch: LaunchWorker) -> None:
    worker = launch(MODEL)
    worker.submit("""
family = KINDS("queue", "Waiting", KINDS.GAUGE)
depth = family.Metric()
depth.set(float("inf"))
result = depth.value()
""")
    family, series = agree(worker), agree(worker)
    assert worker.receive()[0] == {"op": "metrics", "series": [[series["number"], True, "inf", []]]}
    assert agree(worker)["do"] == "value"
    assert first(worker.read()["responses"][0]) == "4.5"
    worker.submit("del depth")
    assert worker.receive()[0] == {"op": "metrics_drop", "series": series["number"]}
    worker.read()
    worker.submit("depth = None; del family")
    assert worker.receive()[0] == {"op": "metrics_drop", "family": family["number"]}


def test_changes_of_a_thread_are_reported_though_no_request_comes(launch: LaunchWorker, tmp_path: Path) -> None:
    worker = launch(MODEL)
    go = tmp_path / "go"
    worker.submit(f"""
import os
family = KINDS("queue", "Waiting", KINDS.GAUGE)
depth = family.Metric()
def work():
    while not os.path.exists({str(go)!r}):
        time.sleep(0.001)
    depth.set(3)
threading.Thread(target=work, daemon=True).start()
""")
    agree(worker)
    series = agree(worker)
    worker.read()
    go.touch()
    assert worker.receive()[0] == {"op": "metrics", "series": [[series["number"], True, 3.0, []]]}


def test_refusal_of_the_server_is_raised(launch: LaunchWorker) -> None:
    worker = launch(MODEL)
    worker.submit("""
try:
    KINDS("two words", "", KINDS.GAUGE)
except pb_utils.TritonModelException as error:
    result = error
""")
    call, _ = worker.receive()
    answer = {"op": "answer", "call": call["call"], "outputs": [], "parameters": {}, "final": True}
    worker.send({**answer, "error": ["INTERNAL", "Invalid metric name"]})
    assert first(worker.read()["responses"][0]) == (
        "Error when creating MetricFamily: Failed to process the request for model 'm_0_0', message: "
        "Invalid metric name"
    )
    refusals = {
        'KINDS("x", "")': "TypeError",
        'KINDS("x", "", 1)': "TypeError",
    }
    for source, kind in refusals.items():
        assert worker.text(f"try: {source}\nexcept Exception as error: result = type(error).__name__") == kind


def test_metric_whose_family_is_gone_says_so(launch: LaunchWorker) -> None:
    worker = launch(MODEL)
    worker.submit("""
family = KINDS("queue", "Waiting", KINDS.GAUGE)
depth = family.Metric()
del family
try:
    depth.set(1)
except pb_utils.TritonModelException as error:
    result = error
""")
    agree(worker), agree(worker)
    assert worker.receive()[0]["op"] == "metrics_drop"
    assert first(worker.read()["responses"][0]).startswith(
        "Failed to set metric value: Invalid metric operation as the corresponding 'MetricFamily' has been deleted."
    )
