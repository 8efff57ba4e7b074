"""What options and clients may say of traces."""

from __future__ import annotations

import pytest

from conch.core.errors import Code, ConchError
from conch.telemetry.tracing.trace import Caller, caller_of
from conch.telemetry.tracing.tracing import Tracing
from conch.telemetry.tracing.values import TraceValues, values_of

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_levels_add_up_and_off_ends_them() -> None:
    given = [("", "level", "TENSORS"), ("", "level", "TIMESTAMPS"), ("triton", "file", "t")]
    assert values_of(given, {}).shown() == {
        "trace_level": ["TIMESTAMPS", "TENSORS"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "t",
        "trace_mode": "triton",
    }
    assert values_of([*given, ("", "level", "OFF")], {}).shown()["trace_level"] == ["OFF"]


def test_options_of_a_collector_override_its_variables() -> None:
    given = [
        ("", "mode", "opentelemetry"),
        ("opentelemetry", "url", "localhost:4318/v1/traces"),
        ("opentelemetry", "resource", "service.name=mine"),
        ("opentelemetry", "bsp_schedule_delay", "100"),
    ]
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "7", "OTEL_BSP_MAX_QUEUE_SIZE": "8"}
    assert values_of(given, environment).shown() == {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "trace_mode": "opentelemetry",
        "url": "localhost:4318/v1/traces",
        "bsp_schedule_delay": "100",
        "bsp_max_queue_size": "8",
        "bsp_max_export_batch_size": "512",
        "resource": "service.name=mine",
    }


@pytest.mark.parametrize(
    ("given", "environment", "source"),
    [
        ([("opentelemetry", "bsp_max_queue_size", "many")], {}, "--trace-config opentelemetry,bsp_max_queue_size"),
        ([("opentelemetry", "bsp_schedule_delay", "0")], {}, "--trace-config opentelemetry,bsp_schedule_delay"),
        ([], {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "-1"}, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"),
    ],
)
def test_size_of_span_batches_that_is_no_number_is_refused_by_its_name(
    given: list[tuple[str, str, str]], environment: dict[str, str], source: str
) -> None:
    with pytest.raises(ConchError, match=f"^{source} must be an integer above 0; got") as refused:
        values_of([("", "mode", "opentelemetry"), *given], environment)
    assert refused.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("values", "changes", "problem"),
    [
        (TraceValues(), {"level": ("TIMESTAMPS",)}, "trace file name is not given"),
        (TraceValues(file="t"), {"level": ("TIMESTAMPS",), "rate": 0}, "sample rate must be non-zero"),
    ],
)
def test_a_change_after_which_nothing_could_be_traced_is_refused(
    values: TraceValues, changes: dict[str, object], problem: str
) -> None:
    tracing = Tracing(values)
    with pytest.raises(ConchError, match=f"^Attempting to set invalid trace setting :{problem}$"):
        tracing.update("", changes)
    assert tracing.shown() == values.shown()
    tracing.close()


@pytest.mark.parametrize(
    ("header", "caller"),
    [
        (CALLER, Caller(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, "k=v")),
        (CALLER[:-2] + "00", Caller(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, "k=v")),
        (CALLER.replace("00-", "ff-", 1), None),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", None),
        ("xx", None),
    ],
)
def test_the_caller_is_read_from_its_header(header: str, caller: Caller | None) -> None:
    assert caller_of({"traceparent": header, "tracestate": "k=v"}) == caller
    assert caller_of({}) is None
