"""Which requests are traced, and when their traces are written."""

from __future__ import annotations

from conch.telemetry.tracing.values import TraceValues
from tests.unit.telemetry.tracing.requests import TracedServer, answer

ON = TraceValues(level=("TIMESTAMPS",), rate=1, file="t")


def sizes(groups: list[list[object]]) -> list[int]:
    return [len(group) for group in groups]


def test_each_request_of_a_rate_is_traced_until_the_count_is_used_up() -> None:
    server = TracedServer(TraceValues(level=("TIMESTAMPS",), rate=2, count=2, file="t"))
    left = []
    for _ in range(6):
        server.ask()
        left.append(server.tracing.shown()["trace_count"])

    assert left == ["2", "1", "1", "0", "0", "0"]
    assert not server.kept.numbered  # 2 traces of 4 requests: kept to the end, as by Triton
    server.tracing.close()
    assert sizes(server.kept.appended) == [2]


def test_traces_are_written_to_a_numbered_file_when_all_that_are_wanted_are_there() -> None:
    server = TracedServer(TraceValues(level=("TIMESTAMPS",), rate=1, count=2, file="t"))
    for _ in range(3):
        server.ask()

    assert sizes(server.kept.numbered) == [2]
    server.tracing.close()
    assert not server.kept.appended


def test_log_frequency_writes_numbered_files_and_the_rest_at_the_end() -> None:
    server = TracedServer(TraceValues(level=("TIMESTAMPS",), rate=1, log_frequency=2, file="t"))
    for _ in range(5):
        server.ask()

    assert sizes(server.kept.numbered) == [2, 2]
    server.tracing.close()
    assert sizes(server.kept.numbered) == [2, 2, 1]


def test_a_change_writes_what_was_kept_once_the_last_trace_has_ended() -> None:
    server = TracedServer(ON)
    server.ask()
    late = server.request()
    server.tracing.update("", {"level": ()})

    assert not server.tracing.on
    assert not server.kept.appended
    answer(late)
    assert sizes(server.kept.appended) == [2]


def test_a_model_has_a_rate_of_its_own_and_takes_the_rest_from_the_global_setting() -> None:
    server = TracedServer(TraceValues(level=("TIMESTAMPS",), rate=1000, file="t"))
    server.tracing.update("m", {"rate": 1})
    server.ask("m")
    server.ask("other")
    server.tracing.update("", {"log_frequency": 1})

    assert server.tracing.shown("m")["log_frequency"] == "1"
    assert server.tracing.shown("m")["trace_rate"] == "1"
    assert server.tracing.shown("other")["trace_rate"] == "1000"
    assert sizes(server.kept.appended) == [1]
    server.tracing.update("m", {"rate": None})
    assert server.tracing.shown("m")["trace_rate"] == "1000"


def test_a_model_can_be_traced_while_all_others_are_not() -> None:
    server = TracedServer(TraceValues(rate=1, file="t"))
    assert not server.tracing.on
    server.tracing.update("m", {"level": ("TIMESTAMPS",)})

    assert server.tracing.on
    assert server.request("m").trace is not None
    assert server.request("other").trace is None
