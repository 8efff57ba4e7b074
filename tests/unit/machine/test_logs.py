"""Lines and tables as Triton writes them."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.machine import logs
from conch.machine.logs import LogSettings

LOG = logging.getLogger("conch")


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    handler = logs.setup(LogSettings())
    yield stream
    logs.reset(handler)


def test_line_has_severity_time_process_and_place(output: io.StringIO) -> None:
    LOG.warning("loading: %s:%d", "m", 1)
    pattern = r'W\d{4} \d\d:\d\d:\d\d\.\d{6} PID test_logs\.py:\d+\] "loading: m:1"\n'.replace("PID", str(os.getpid()))
    assert re.fullmatch(pattern, output.getvalue())


def test_iso_format(output: io.StringIO) -> None:
    logs.current().update(log_format="ISO8601")
    LOG.error("x")
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ E \d+ test_logs.py:\d+] \"x\"\n", output.getvalue())


def test_json_format_is_an_object_in_a_line_for_every_event(output: io.StringIO) -> None:
    logs.current().update(log_format="json")
    record = LOG.makeRecord("conch", logging.WARNING, "/src/a.py", 7, "two\nlines \u2028 \udc80", (), None)
    record.created = 1_700_000_000.25
    LOG.handle(record)
    try:
        raise ValueError("wrong")
    except ValueError:
        LOG.exception("it failed")
    logs.table("models", ["name", "state"], [["m", "READY"]])
    logs.emit_from_worker("ERROR", "model.py", 5, "Traceback\n  line", "m_0", 4711)
    lines = output.getvalue().splitlines()
    first, failure, table, worker = map(json.loads, lines)
    assert first == {
        "time": "2023-11-14T22:13:20.250000Z", "level": "WARNING", "message": "two\nlines \u2028 \udc80",
        "pid": os.getpid(), "file": "a.py", "line": 7,
    }  # fmt: skip
    assert (failure["level"], failure["message"]) == ("ERROR", "it failed")
    assert failure["exception"].startswith("Traceback (most") and failure["exception"].endswith("ValueError: wrong")
    assert (table["message"], table["table"]) == ("models", [{"name": "m", "state": "READY"}])
    assert (worker["worker"], worker["pid"], worker["file"], worker["line"]) == ("m_0", 4711, "model.py", 5)
    assert worker["message"] == "Traceback\n  line"


def test_time_is_utc_with_microseconds(output: io.StringIO) -> None:
    record = LOG.makeRecord("conch", logging.INFO, "a.py", 7, "x", (), None)
    record.created = 1_700_000_000.25
    LOG.handle(record)
    assert output.getvalue().startswith("I1114 22:13:20.250000 ")


def test_message_is_quoted_and_escaped(output: io.StringIO) -> None:
    LOG.info('hello "you"\nline two é')
    assert output.getvalue().endswith('] "hello \\"you\\"\\nline two é"\n')


@pytest.mark.parametrize(("value", "end"), [("0", '] two\n"lines"\n'), ("FALSE", '] "two\\n\\"lines\\""\n')])
def test_triton_s_variable_leaves_messages_as_they_are(value: str, end: str, tmp_path: Path) -> None:
    program = (
        "import sys; from conch.machine import logs; logs.setup(logs.LogSettings()); logs.LOGGER.info(sys.argv[1])"
    )
    variable = {"TRITON_SERVER_ESCAPE_LOG_MESSAGES": value}
    command = [sys.executable, "-c", program, 'two\n"lines"']
    done = subprocess.run(command, env={**os.environ, **variable}, capture_output=True, text=True)
    assert done.stderr.endswith(end), done.stderr


def test_message_of_a_client_cannot_command_a_terminal_or_begin_a_line(output: io.StringIO) -> None:
    LOG.info("csi \x9b2J del \x7f next \x85 line \u2028 half \udcff é")
    assert output.getvalue().endswith('] "csi \\u009b2J del \\u007f next \\u0085 line \\u2028 half \\udcff é"\n')


def test_what_is_no_utf_8_reaches_a_log_file(tmp_path: Path) -> None:
    handler = logs.setup(LogSettings(log_file=str(tmp_path / "log")))
    try:
        logs.table("", ["Model \udcff"], [["red \x1b[31m"]])
    finally:
        logs.reset(handler)
    assert "| red \\x1b[31m |" in (text := (tmp_path / "log").read_text())
    assert "Model \\udcff" in text


def test_what_a_client_chose_is_shown_in_part_where_it_is_long() -> None:
    assert logs.shortened("a" * 256) == "a" * 256
    assert logs.shortened("a" * 257) == "a" * 256 + "… (257 characters)"


def test_traceback_stays_on_the_line(output: io.StringIO) -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        LOG.exception("failed")
    assert output.getvalue().count("\n") == 1
    assert "ValueError: bad" in output.getvalue()


@pytest.mark.parametrize(
    ("off", "written"),
    [("log_info", ["w", "e"]), ("log_warning", ["i", "e"]), ("log_error", ["i", "w"])],
)
def test_severity_that_is_off_is_not_written(output: io.StringIO, off: str, written: list[str]) -> None:
    logs.current().update(**{off: False})
    LOG.info("i")
    LOG.warning("w")
    LOG.error("e")
    assert re.findall('"(.)"', output.getvalue()) == written


def test_verbose_lines_are_written_up_to_the_level(output: io.StringIO) -> None:
    logs.verbose(1, "none yet")
    logs.current().update(log_verbose_level=1, log_info=False)
    logs.verbose(1, "request %d", 3)
    logs.verbose(2, "too verbose")
    assert re.fullmatch(r'I.* test_logs\.py:\d+\] "request 3"\n', output.getvalue())


def test_table_is_raw_after_its_heading(output: io.StringIO) -> None:
    logs.table("", ["Model", "Version", "Status"], [["simple", 1, "READY"]])
    head, *rest = output.getvalue().split("\n")
    assert head.endswith("] ")
    assert "\n".join(rest) == (
        "+--------+---------+--------+\n"
        "| Model  | Version | Status |\n"
        "+--------+---------+--------+\n"
        "| simple | 1       | READY  |\n"
        "+--------+---------+--------+\n\n"
    )


def test_table_on_a_terminal_is_as_wide_as_that(output: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    logs.table(
        "", ["Option", "Value"], [["server_extensions", "classification model_repository statistics"], ["a", ""]]
    )
    assert output.getvalue().splitlines()[4:8] == [
        "| server_extensions | classification   |",
        "|                   | model_repository |",
        "|                   | statistics       |",
        "| a                 |                  |",
    ]


def test_empty_table_has_its_rules(output: io.StringIO) -> None:
    logs.table("agents", ["Path"], [])
    assert output.getvalue().endswith('] "agents"\n+------+\n| Path |\n+------+\n+------+\n\n')


def test_line_of_a_worker_keeps_the_models_place(output: io.StringIO) -> None:
    logs.emit_from_worker("WARNING", "/repository/m/1/model.py", 12, "100% odd", "m_0_0", 4711)
    assert re.fullmatch(r'W.* 4711 m_0_0/model\.py:12\] "100% odd"\n', output.getvalue())


def test_line_of_a_worker_that_is_of_a_whole_file_has_no_line_number(output: io.StringIO) -> None:
    logs.emit_from_worker("WARNING", "model.py", 0, "text", "m_0_0", 4711)
    assert re.fullmatch(r'W.* 4711 m_0_0/model\.py\] "text"\n', output.getvalue())


def test_verbose_line_of_a_worker_needs_the_level(output: io.StringIO) -> None:
    logs.emit_from_worker("VERBOSE", "model.py", 1, "quiet", "m_0_0", 4711)
    logs.current().update(log_verbose_level=1)
    logs.emit_from_worker("VERBOSE", "model.py", 1, "loud", "m_0_0", 4711)
    assert re.findall('"(.*)"', output.getvalue()) == ["loud"]


def test_warning_of_a_library_has_the_same_format(output: io.StringIO) -> None:
    logging.getLogger("some.library").warning("odd")
    logging.getLogger("some.library").info("chatter")
    assert re.fullmatch(r'W.* test_logs\.py:\d+\] "odd"\n', output.getvalue())


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    handler = logs.setup(LogSettings())
    yield screen
    logs.reset(handler)


def test_lines_stay_lines_at_a_terminal_and_cannot_command_it(screen: Screen) -> None:
    LOG.error('one "line"')
    LOG.error('failed\n  File "model.py"\n\x1b[2J\ttab\x07é\n')
    first, second, *rest = screen.getvalue().split("\n")
    assert first.endswith('] "one \\"line\\""')
    assert second.endswith('] "failed"')
    assert rest == ['  File "model.py"', "\\x1b[2J\ttab\\x07é", ""]


def test_held_lines_are_written_in_order_when_they_are_released(screen: Screen) -> None:
    logs.hold()
    LOG.info("one")
    logs.emit_from_worker("INFO", "model.py", 1, "two", "m_0_0", 4711)
    assert screen.getvalue() == ""
    logs.release()
    LOG.info("three")
    assert re.findall('"(.*)"', screen.getvalue()) == ["one", "two", "three"]


def test_lines_for_a_file_are_not_held(output: io.StringIO) -> None:
    logs.hold()
    LOG.info("one")
    logs.release()
    assert re.findall('"(.*)"', output.getvalue()) == ["one"]


def test_log_file_is_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("before\n")
    handler = logs.setup(LogSettings(log_file=str(file)))
    LOG.info("after")
    logs.reset(handler)
    assert re.fullmatch(r'before\nI.*"after"\n', file.read_text())


def test_log_file_that_cannot_be_opened_is_an_error(output: io.StringIO, tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"failed to open log file '.*': No such file or directory"):
        logs.setup(LogSettings(log_file=str(tmp_path / "none" / "log")))


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
def test_reset_takes_back_what_setup_did(tmp_path: Path, level: int) -> None:
    LOG.setLevel(level)
    try:
        handler = logs.setup(LogSettings(log_file=str(tmp_path / "log"), log_info=False))
        assert handler in logging.getLogger().handlers and LOG.level == logging.DEBUG
        logs.reset(handler)
        assert handler not in logging.getLogger().handlers
        assert LOG.level == level
        assert logs.current() == LogSettings()
    finally:
        LOG.setLevel(logging.NOTSET)


@pytest.mark.parametrize("closed", ["first", "second"])
def test_each_of_two_log_files_has_the_lines_until_it_is_closed(tmp_path: Path, closed: str) -> None:
    settings = {name: LogSettings(log_file=str(tmp_path / name)) for name in ("first", "second")}
    handlers = {name: logs.setup(setting) for name, setting in settings.items()}
    LOG.info("one")
    logs.reset(handlers.pop(closed))
    LOG.info("two")
    (name, handler) = handlers.popitem()
    assert logs.current() is settings[name]
    logs.reset(handler)
    LOG.info("three")
    assert re.findall('"(.*)"', (tmp_path / closed).read_text()) == ["one"]
    assert re.findall('"(.*)"', (tmp_path / name).read_text()) == ["one", "two"]


def test_two_servers_that_log_to_the_terminal_write_each_line_once(
    output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", output)
    second = logs.setup(LogSettings(log_warning=False))
    LOG.info("one")
    LOG.warning("not by the settings in force")
    logs.reset(second)
    LOG.warning("two")
    assert re.findall('"(.*)"', output.getvalue()) == ["one", "two"]


def test_lines_of_models_obey_the_level_of_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    """Without a call of ``setup``, the program's own logging configuration applies."""
    with caplog.at_level(logging.WARNING, logger="conch"):
        logs.emit_from_worker("INFO", "/models/m/1/model.py", 7, "unwanted", "m_0_0", 4711)
        logs.emit_from_worker("ERROR", "/models/m/1/model.py", 7, "wanted", "m_0_0", 4711)
    assert [record.getMessage() for record in caplog.records] == ["wanted"]


@pytest.mark.parametrize(
    ("name", "shown"), [("a\nI0101 forged", "a\\x0aI0101 forged"), ("a\u202eb", "a\\u202eb"), ("a\udcff", "a\\udcff")]
)
def test_name_of_a_model_cannot_forge_the_place_of_a_line(output: io.StringIO, name: str, shown: str) -> None:
    logs.emit_from_worker("INFO", "model.py", 1, "text", name, 4711)
    assert f" 4711 {shown}/model.py:1] " in output.getvalue()
    assert output.getvalue().count("\n") == 1


def test_characters_that_turn_the_order_about_are_written_out(output: io.StringIO) -> None:
    LOG.info("a \u202e b \u2066 c")
    logs.table("", ["Model \u202e"], [["\u200f"]])
    assert "a \\u202e b \\u2066 c" in output.getvalue()
    assert "Model \\u202e" in output.getvalue() and "| \\u200f" in output.getvalue()
