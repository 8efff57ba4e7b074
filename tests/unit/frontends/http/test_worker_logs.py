"""The log lines about each model: which ones are kept, and how many."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from conch.frontends.http.console.routes import LONGEST_LINE, MOST_LINES, MOST_MODELS, WorkerLogs
from conch.machine.logs import LOGGER


@pytest.fixture
def logs() -> Iterator[WorkerLogs]:
    kept = WorkerLogs()
    kept.open()
    yield kept
    kept.end()


def say(text: str, model: str = "", level: int = logging.WARNING) -> None:
    record = LOGGER.makeRecord("conch", level, "core.py", 1, text, (), None)
    if model:
        record.model, record.filename = model, f"{model}_0/output"
    LOGGER.handle(record)


def test_lines_of_workers_and_of_the_server_about_a_model_are_kept(logs: WorkerLogs) -> None:
    say("a line", "echo")
    say("worker of 'echo' died", level=logging.ERROR)
    say("loading: echo:1")
    say("successfully unloaded 'other' version 1")
    say("the weather is fine")
    lines = logs.lines("echo")
    assert [(line["text"], line["level"]) for line in lines] == [
        ("a line", "warning"), ("worker of 'echo' died", "error"), ("loading: echo:1", "warning"),
    ]  # fmt: skip
    assert [line["from"] for line in lines] == ["echo_0", "server", "server"]
    assert logs.lines("echo", after=lines[1]["number"]) == lines[2:]
    assert len(logs.lines("other")) == 1
    assert logs.lines("nobody") == []


def test_memory_is_limited_in_lines_characters_and_models(logs: WorkerLogs) -> None:
    for number in range(MOST_LINES + 5):
        say(f"{number}" + "x" * (2 * LONGEST_LINE), "echo")
    lines = logs.lines("echo")
    assert len(lines) == MOST_LINES and lines[0]["text"].startswith("5x")
    assert all(len(line["text"]) == LONGEST_LINE for line in lines)
    for number in range(MOST_MODELS - 1):
        say("a line", f"model_{number}")
    assert logs.lines("echo")
    say("a line", "one_more")
    assert not logs.lines("echo") and logs.lines("one_more")


def test_nothing_is_kept_after_the_end(logs: WorkerLogs) -> None:
    logs.end()
    say("a line", "echo")
    assert logs.lines("echo") == []
