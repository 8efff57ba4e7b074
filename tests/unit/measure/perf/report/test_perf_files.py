"""Figures are written in perf_analyzer's columns, as JSON with a version, and as a line for each request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conch.core.errors import ConchError
from conch.measure.perf.figures import LatencyFigures, WindowFigures
from conch.measure.perf.measured import LevelDistributions, LevelRecords, Measured, quantiles, stages_of
from conch.measure.perf.plan import Levels, PerfPlan
from conch.measure.perf.report import files
from conch.measure.perf.report.files import OutputFiles, Outputs, RequestLog, command_line, lines
from conch.measure.perf.report.page import level_table
from conch.measure.perf.report.terminal import level_section
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.records import RECORD, Collected, Outcome, Unfinished
from conch.measure.perf.server.statistics import ServerFigures, Stage
from conch.measure.reports.terminal import show
from tests.unit.measure.perf.known_server import KnownServer, running

PLAN = PerfPlan("m", Address("127.0.0.1", 8000))
#: What perf_analyzer 2.41 writes above its figures.
CLOSED = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency"
)


def latency(seconds: float, percentiles: tuple[float, ...] = (50, 90, 95, 99)) -> LatencyFigures:
    return LatencyFigures(seconds, seconds / 10, dict.fromkeys(percentiles, seconds), 2 * seconds)


def level(level: float = 1, *, errors: dict[str, int] | None = None, plan: PerfPlan = PLAN) -> Measured:
    failures = {Outcome.REFUSED: sum(errors.values())} if errors else {}
    window = WindowFigures(
        5.0, 1000, 200.0, failures, latency(0.005, plan.percentiles), latency(0.0001), latency(0.0048),
        latency(0.00002), latency(0),
    )  # fmt: skip
    stages = {"queue": 0.0002, "compute_input": 0.0001, "compute_infer": 0.004, "compute_output": 0.0001}
    others = ServerFigures("step", "1", 5, 5, {"queue": Stage(5, 1.0)})
    own = ServerFigures("m", "1", 1000, 500, {name: Stage(1000, seconds) for name, seconds in stages.items()})
    return Measured(level, window, None, (window,) * 3, True, (others, own), errors or {}, 0.2, 0, 0.0)


@pytest.mark.parametrize(
    ("plan", "verbose", "headings"),
    [
        (PLAN, False, CLOSED),
        (PerfPlan("m", PLAN.address, rates=Levels(50, 50, 1)), False, CLOSED.replace("Concurrency", "Request Rate")),
        (PerfPlan("m", PLAN.address, percentile=95), False, CLOSED),
        (PerfPlan("m", PLAN.address, percentile=97), False, CLOSED.replace(",p99", ",p97 latency,p99")),
        (PLAN, True, f"{CLOSED},Avg latency,request/response,response wait"),
        (PerfPlan("m", PLAN.address, percentile=90), True, f"{CLOSED},request/response,response wait"),
    ],
)
def test_the_columns_are_those_of_perf_analyzer(plan: PerfPlan, verbose: bool, headings: str) -> None:
    first, row = files.csv_of(plan, [level(plan=plan)], verbose=verbose).splitlines()
    assert first == headings
    assert len(row.split(",")) == len(headings.split(","))


def test_a_row_is_in_microseconds_and_of_the_model_that_was_asked() -> None:
    row = files.csv_of(PLAN, [level(16)], verbose=True).splitlines()[1]
    assert row == "16,200,100,400,200,100,4000,100,20,5000,5000,5000,5000,5000,120,4800"


def test_a_server_that_counts_nothing_leaves_the_wait_whole() -> None:
    unknown = replace(level(), server=())
    assert stages_of(PLAN, unknown) == {"send": 0.0001, "wait": 0.0048, "receive": 0.00002}
    assert files.csv_of(PLAN, [unknown]).splitlines()[1].startswith("1,200,100,4800,0,0,0,0,20,")


def test_what_a_stream_brings_while_the_server_computes_counts_once() -> None:
    stream = replace(level(), figures=replace(level().figures, wait=latency(0.001), receive=latency(0.004)))
    stages = stages_of(PLAN, stream)
    assert "receive" not in stages and sum(stages.values()) == pytest.approx(0.0051)


def test_the_json_has_a_version() -> None:
    document = json.loads(files.json_of(PLAN, [level(errors={"boom": 3})]))
    assert document["format"] == 1
    assert document["levels"][0]["failures"] == {"refused": 3} and document["levels"][0]["errors"] == {"boom": 3}


def collected() -> Collected:
    rows = np.zeros(2, RECORD)
    rows[0] = (1000, 1010, 1020, 1500, 2000, Outcome.OK, 200, 7, 3, 3, 64, 1)
    rows[1] = (1100, 1110, 0, 0, 1900, Outcome.TIMED_OUT, 0, 8, 0, 0, 0, 2)
    return Collected(rows, np.array([[0, 1500], [0, 1700], [0, 2000]]), Unfinished(), {}, 0.1)


def test_a_request_is_a_line_with_its_moments_and_events() -> None:
    one = collected()
    first, second = map(json.loads, lines({"concurrency": 2}, one.records, one.events, 1000))
    assert first == {
        "concurrency": 2, "due": 0, "sent": 10, "written": 20, "first": 500, "end": 1000, "outcome": "ok", "code": 200,
        "payload": 7, "responses": 3, "tokens": 3, "received": 64, "slot": 1, "events": [500, 700, 1000],
    }  # fmt: skip
    assert (second["outcome"], second["written"], second["first"]) == ("timed_out", None, None)
    assert "events" not in second


def test_the_log_is_written_when_it_is_closed(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl")
    for _ in range(3):
        log.add({"concurrency": 2}, collected())
    log.close()
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 6


def test_a_full_disk_is_reported_at_the_end() -> None:
    log = RequestLog(Path("/dev/full"))
    log.add({"concurrency": 2}, collected())
    with pytest.raises(OSError, match="No space left"):
        log.close()


def test_one_full_disk_keeps_no_other_file_from_being_written(tmp_path: Path) -> None:
    outputs = Outputs(OutputFiles(csv=Path("/dev/full"), json=tmp_path / "a.json"), PLAN)
    with pytest.raises(ConchError, match="/dev/full cannot be written: No space left"):
        outputs.write("server", "conch perf", [level()])
    assert json.loads((tmp_path / "a.json").read_text())["levels"]


def test_quantiles_reach_into_the_tail() -> None:
    found = quantiles(np.arange(1, 10_001) * 1_000_000)
    assert found[0] == (0.0, 0.001) and found[-1][0] == pytest.approx(0.9999)
    assert {round(share, 2): value for share, value in found}[0.99] == pytest.approx(9.9, rel=0.01)
    assert quantiles(np.zeros(0)) == ()


def test_distributions_are_of_requests_that_ended_well_in_windows_that_count() -> None:
    rows = np.zeros(3, RECORD)
    rows["due"], rows["end"], rows["outcome"] = (0, 0, 0), (10, 20, 30), (Outcome.OK, Outcome.REFUSED, Outcome.OK)
    found = LevelDistributions.of(LevelRecords(rows, np.zeros((0, 2), np.int64), ((0, 25),)), text=False)
    assert found.latency == [(0.0, 1e-8)]


def test_what_authorises_is_not_in_the_command() -> None:
    given = ["/x/conch", "perf", "-m", "a b", "-H", "Authorization: Bearer s3cret", "-H", "X-API-Key:s3cret",
             "--request-parameter", "max_tokens:64"]  # fmt: skip
    assert command_line(given) == (
        "conch perf -m 'a b' -H 'Authorization: ...' -H X-API-Key:... --request-parameter max_tokens:64"
    )


@pytest.mark.parametrize("width", [80, 120, 200])
def test_lines_and_table_fit_into_the_terminal(width: int) -> None:
    from rich.console import Console

    console = Console(width=width)
    many = [level(number, errors={"[bold]no[/bold] memory " + 30 * "long ": 2}) for number in (1, 10_000)]
    with console.capture() as shown:
        show(console, level_section(PLAN, many[0]), level_table(PLAN, many))
    text = shown.get()
    assert all(len(line) <= width for line in text.splitlines())
    assert "[bold]no[/bold] memory" in text and "5.00 ms on average" in text
    assert text.splitlines()[-1].split()[:2] == ["10000", "200"]


def test_files_are_checked_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"--jsonl .* the folder .* does not exist"):
        OutputFiles(jsonl=tmp_path / "none" / "a.jsonl").check()
    from conch.cli import main

    with running(KnownServer()) as server:
        assert main(["perf", "-m", "known", "-u", f"127.0.0.1:{server.port}", "-f", str(tmp_path)]) == 1
        assert server.answered == 0


def test_a_comparison_has_no_csv(tmp_path: Path) -> None:
    OutputFiles(json=tmp_path / "a.json").check(compares=True)
    with pytest.raises(ConchError, match=r"-f .*: a comparison with --against is written by --json and --html"):
        OutputFiles(csv=tmp_path / "a.csv").check(compares=True)


def test_two_files_are_not_one(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"--jsonl .*: --json is written to that file"):
        OutputFiles(json=tmp_path / "a", jsonl=tmp_path / "b" / ".." / "a").check()
    OutputFiles(json=Path("/dev/null"), jsonl=Path("/dev/null")).check()
