"""An analysis says in words what is best and why, ranks in model analyzer's columns, and writes its files."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from math import inf

import pytest
from rich.console import Console

from conch.measure.analyze.judging.ranking import DefaultComparison
from conch.measure.analyze.report import files
from conch.measure.analyze.report.analysis import Analysis, ConfigTraits, RankedCandidate
from conch.measure.analyze.report.page import (
    doubts,
    headline,
    lead,
    load_table,
    missing,
    ranking_table,
    reasons,
    report,
    summary,
)
from conch.measure.perf.figures import Interval
from conch.measure.reports.report import Tiles
from conch.measure.reports.terminal import show
from tests.unit.measure.analyze.points import point
from tests.unit.measure.analyze.report.analyses import analysis, candidate, nothing


def printed(shown: Analysis, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    show(console, *summary(shown))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_best_is_named_with_its_figures_and_the_defaults() -> None:
    text = headline(analysis())
    assert text.startswith(
        "falcon7b_config_5 is the best of 10 configurations: 165 infer/s with a p99 latency of 1.16 s"
    )
    assert "at concurrency 128, 6.6 times the throughput of the default (25.0 infer/s with" in text


def test_the_page_leads_with_an_answer_in_common_words() -> None:
    assert lead(analysis()) == (
        "Use falcon7b_config_5: falcon7b then answers 165 requests per second instead of 25.0, and 99 of 100 answers"
        " take at most 1.16 s."
    )
    assert lead(replace(analysis(), advice="keep", reason="it is simpler")) == (
        "Keep the configuration of falcon7b: of 10 that were measured, none is better."
    )
    assert lead(replace(analysis(), advice="unproven", reason="one round is too few")) == (
        "Do not change the configuration of falcon7b yet: no other one is proven to be better."
    )
    assert lead(nothing()) == headline(nothing())


def test_all_places_name_the_ratio_of_the_final_rounds() -> None:
    best, default = analysis().best, analysis().default
    assert best is not None and best.point is not None and default is not None and default.point is not None
    final = DefaultComparison(6.4, Interval(6.2, 6.6), best.point, default.point)
    compared = replace(analysis(), comparison=final, only_throughput=True)
    page = report(compared)
    [tiles] = [block.items for block in page.opening if isinstance(block, Tiles)]
    assert tiles[0].value == "6.4 ×"
    assert "6.4 times the throughput of the default" in headline(compared)
    assert "has 6.40 times the throughput of the default" in " ".join(reasons(compared))


def test_the_reasons_name_what_changed_and_what_followed() -> None:
    text = " ".join(reasons(analysis()))
    assert "3 instances work at the same time instead of 1" in text
    assert "requests that wait are computed together, up to 64 at a time (dynamic batching)" in text
    assert "holds requests for up to 100 µs" in text
    assert "At concurrency 128 a request waits in the queue for" in text and "instead of 5.08 s" in text
    assert "It takes 47.5 GB of GPU memory, 2.9 times the default's 16.2 GB." in text


def test_what_failed_and_what_is_in_doubt_is_said() -> None:
    found = analysis()
    assert "falcon7b_config_9: CUDA out of memory <4096>." in list(missing(found))
    assert "falcon7b_config_4: 27 of 8,406 requests failed." in list(missing(found))
    assert any("1 of 90 measurements was disturbed" in text for text in doubts(found))


def test_a_candidate_is_said_to_be_worse_only_if_its_own_result_was_cut_short() -> None:
    best, worse = candidate("m_config_1", 2, 8), candidate("m_config_2", 1, 8)
    assert best.point is not None and worse.point is not None
    overloaded = replace(best.point, load=1024.0, stopped=True)
    best = replace(best, result=replace(best.result, points=[*best.result.points, overloaded]))
    worse = replace(worse, point=replace(worse.point, stopped=True))
    text = " ".join(missing(replace(analysis(), candidates=[best, worse])))
    assert "clearly worse: m_config_2." in text


def test_the_default_may_be_the_best() -> None:
    default = candidate("falcon7b_config_default", 1, 8)
    found = replace(analysis(), candidates=[default])
    assert headline(found).startswith("The configuration of the repository is the best of 1: ")
    assert list(reasons(found)) == []


def test_when_nothing_keeps_the_constraints_the_closest_is_named() -> None:
    slow = candidate("m_config_1", 1, 1, limit=0.001, broken=["p99 latency is 61 ms and must be at most 1 ms"])
    text = headline(replace(analysis(), candidates=[slow], goal="highest throughput with p99 latency at most 1 ms"))
    assert "No configuration of falcon7b reaches the goal (highest throughput with p99 latency at most 1 ms)." in text
    assert "The closest is m_config_1: p99 latency is 61 ms and must be at most 1 ms." in text


def test_a_run_without_a_valid_point_says_so_and_why() -> None:
    lines = "\n".join(printed(nothing(), 200))
    assert "No configuration of m could be measured: none of 2 completed a request." in lines
    assert "m_config_default: the server did not start: port 8000 is taken." in lines
    assert "m_config_1: no request succeeded." in lines
    assert json.loads(files.json(nothing()))["best"] is None


def test_the_json_has_no_score_that_json_lacks() -> None:
    given = analysis()
    endless = [replace(row, score=inf) for row in given.candidates]
    text = files.json(replace(given, candidates=endless))
    assert "Infinity" not in text
    assert all(row["score"] is None for row in json.loads(text)["configurations"])


def test_the_ranking_has_the_columns_of_model_analyzer() -> None:
    found = analysis()
    table = ranking_table(found, found.measured)
    assert [column.heading for column in table.columns] == [
        "Model Config Name", "Max Batch Size", "Dynamic Batching", "Queue Delay (µs)", "Total Instance Count",
        "Concurrency", "p99 Latency (ms)", "Throughput (infer/sec)", "Max GPU Memory Usage (MB)",
        "Average GPU Utilization (%)",
    ]  # fmt: skip
    best, *_, slow = table.rows
    assert list(best.cells) == [
        "falcon7b_config_5",
        "64",
        "Enabled",
        "100",
        "3:GPU",
        "128",
        "1,164",
        "165",
        "47,480",
        "100.0",
    ]
    assert (best.tone, slow.tone) == ("good", "muted")


def test_a_machine_without_gpus_has_columns_of_its_processors() -> None:
    headings = [column.heading for column in ranking_table(analysis(gpu=False), []).columns]
    assert headings[-2:] == ["Max CPU Memory Usage (MB)", "Average CPU Usage (cores)"]


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_table_fits_into_the_terminal(width: int) -> None:
    lines = printed(analysis(), width)
    start = next(number for number, line in enumerate(lines) if "1,164" in line)
    assert "47,480" in lines[start] and "3:GPU" in lines[start]
    assert all(len(line) <= width for line in lines)


def test_the_files_have_model_analyzers_names_and_columns() -> None:
    tables = files.tables(analysis())
    assert list(tables) == ["metrics-model-inference.csv", "metrics-model-gpu.csv"]
    lines = {name: text.splitlines() for name, text in tables.items()}
    assert lines["metrics-model-inference.csv"][0] == (
        "Model,Batch,Concurrency,Model Config Path,Instance Group,Max Batch Size,Satisfies Constraints,"
        "Throughput (infer/sec),p99 Latency (ms)"
    )
    assert lines["metrics-model-gpu.csv"][0] == (
        "Model,GPU UUID,Batch,Concurrency,Model Config Path,Instance Group,Satisfies Constraints,"
        "GPU Memory Usage (MB),GPU Utilization (%),GPU Power Usage (W)"
    )
    rows = list(csv.DictReader(io.StringIO(tables["metrics-model-inference.csv"])))
    satisfied = {row["Concurrency"]: row["Satisfies Constraints"] for row in rows[:9]}
    assert satisfied["128"] == "Yes" and satisfied["256"] == "No"
    assert set(files.tables(analysis(gpu=False))) == {"metrics-model-inference.csv"}


def test_models_that_are_measured_together_have_their_own_batch_sizes() -> None:
    alone = analysis()
    (first, *_) = alone.candidates
    (measured, *_) = first.result.points
    both = replace(measured, models=dict.fromkeys(("a", "b"), measured.models["falcon7b"]))
    result = replace(first.result, points=(both,))
    together = replace(
        alone, models=("a", "b"), batch_sizes={"a": 8, "b": 2}, candidates=[replace(first, result=result, point=both)]
    )
    tables = {name: list(csv.DictReader(io.StringIO(text))) for name, text in files.tables(together).items()}
    rows = tables["metrics-model-inference.csv"]
    assert [(row["Model"], row["Batch"]) for row in rows] == [("a", "8"), ("b", "2")]
    assert [row["Batch"] for row in tables["metrics-model-gpu.csv"]] == ["8 / 2"]


def test_a_rate_has_a_column_of_its_own() -> None:
    assert ",Request Rate," in files.tables(analysis(load_kind="request_rate"))["metrics-model-inference.csv"]


def test_traits_are_read_as_model_analyzer_writes_them() -> None:
    config = {
        "max_batch_size": 16,
        "instance_group": [{"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]}, {"kind": "KIND_CPU", "count": 1}],
        "dynamic_batching": {"preferred_batch_size": [4, 8], "max_queue_delay_microseconds": "500"},
    }
    traits = ConfigTraits.of(config)
    assert (traits.instance_text, traits.total, traits.preferred, traits.delay) == ("4:GPU + 1:CPU", 5, (4, 8), 500)
    assert ConfigTraits.of({}, gpus=True).instance_text == "1:GPU"
    assert not ConfigTraits.of({}).batching


def compared(low: float, high: float, *, disturbed: bool = False) -> DefaultComparison:
    ratio = (low * high) ** 0.5
    return DefaultComparison(ratio, Interval(low, high), point(100 * ratio), point(100), disturbed=disturbed)


def test_what_was_measured_in_turns_is_said_with_its_range() -> None:
    told = replace(analysis(), comparison=compared(2.7, 3.14), only_throughput=True)
    best = told.best
    assert best is not None
    assert next(reasons(told)) == (
        f"In the final rounds {best.name} has 2.91 times the throughput of the default"
        " (2.70 to 3.14 with 95 % confidence)."
    )
    assert "291 infer/s" in headline(told) and "2.9 times the throughput of the default (100 infer/s" in headline(told)


def test_a_winner_that_is_not_better_in_the_end_is_no_recommendation() -> None:
    kept = replace(analysis(), advice="keep", reason="the default was better", comparison=compared(0.7, 0.9))
    assert headline(kept).startswith("Keep the configuration of the repository (100 infer/s")
    assert headline(kept).endswith("at concurrency 8): the default was better.")
    assert "To use it" not in "\n".join(printed(kept, 120))
    assert {row.cells[0] for row in ranking_table(kept, kept.measured).rows if row.tone == "good"} == {
        "falcon7b_config_default"
    }


def test_figures_of_disturbed_rounds_are_withheld() -> None:
    disturbed = compared(2.7, 3.14, disturbed=True)
    doubtful = replace(analysis(), advice="unproven", reason="other processes used the machine", comparison=disturbed)
    assert (
        headline(doubtful) == "falcon7b_config_5 looks best of 10 configurations, but other processes used the machine."
    )
    assert not any("times" in reason for reason in reasons(doubtful) if "final rounds" in reason)
    assert any("Other processes used the machine" in doubt for doubt in doubts(doubtful))
    assert not any(isinstance(block, Tiles) for block in report(doubtful).opening)


def test_disturbed_points_are_marked_and_never_coloured() -> None:
    def disturb(one: RankedCandidate) -> RankedCandidate:
        points = [replace(each, disturbed=True) for each in one.result.points]
        point = replace(one.point, disturbed=True) if one.point is not None else None
        return replace(one, result=replace(one.result, points=points), point=point)

    found = replace(
        analysis(), candidates=[disturb(one) for one in analysis().candidates], advice="keep", comparison=None
    )
    assert {row.tone for row in ranking_table(found, found.measured).rows} == {"muted"}
    assert all("*" in "".join(row.cells) for row in ranking_table(found, found.measured).rows)
    assert not {"good"} & {row.tone for measurement in found.measured for row in load_table(found, measurement).rows}
    assert "infer/s" not in headline(found)
    slow = disturb(candidate("m_config_1", 1, 1, limit=0.001, broken=["p99 latency is 61 ms"]))
    assert headline(replace(found, candidates=[slow])).endswith("while other processes used the machine.")
    assert not any(
        "instead of" in reason and "request" in reason and "queue for" in reason for reason in reasons(found)
    )
