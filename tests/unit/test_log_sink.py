"""Lines for a reader that stops, a full disk and a pipe without a reader: callers that log never wait."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import resource
import socket
import threading
from pathlib import Path

import pytest

from conch.machine import logs
from conch.machine.logs import MOST_LINES, LogSettings, Sink, target_of


def notice(lost: int) -> bytes:
    return f"lost {lost}\n".encode()


def log_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "log"]


class FakeTarget:
    """Takes ``room`` bytes, and then nothing more (None: any number), or fails with ``error``."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.error: OSError | None = None
        self.written = b""
        self.waited = threading.Event()
        self.go_on = threading.Event()
        self._others = log_threads()

    @property
    def writers(self) -> list[threading.Thread]:
        """The threads that write lines later."""
        return [thread for thread in log_threads() if thread not in self._others]

    def write(self, data: bytes) -> int:
        if self.error is not None:
            raise self.error
        if self.room == 0:
            raise BlockingIOError
        count = len(data) if self.room is None else min(self.room, len(data))
        if self.room is not None:
            self.room -= count
        self.written += data[:count]
        return count

    def wait(self, seconds: float) -> None:
        self.waited.set()
        self.go_on.wait(60)

    def close(self) -> None:
        self.go_on.set()


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


def until_written(target: FakeTarget) -> None:
    """Wait until the thread that writes later has ended."""
    for writer in target.writers:
        writer.join(60)
    assert not target.writers


def test_lines_are_written_at_once_while_there_is_room(target: FakeTarget) -> None:
    sink = Sink(target, notice)
    sink.put(b"one\n")
    sink.put(b"two\n")
    assert target.written == b"one\ntwo\n"
    assert not target.writers


def test_lines_are_kept_in_order_until_the_reader_continues(target: FakeTarget) -> None:
    target.room = 6
    sink = Sink(target, notice)
    for line in (b"one\n", b"two\n", b"three\n"):
        sink.put(line)
    assert target.written == b"one\ntw"
    target.room = None
    target.go_on.set()
    until_written(target)
    assert target.written == b"one\ntwo\nthree\n"


def test_lines_beyond_what_is_kept_are_counted_and_said(target: FakeTarget) -> None:
    target.room = 0
    sink = Sink(target, notice)
    for number in range(MOST_LINES + 1234):
        sink.put(b"%d\n" % number)
    target.room = None
    target.go_on.set()
    until_written(target)
    sink.put(b"after\n")
    assert target.written.splitlines()[-3:] == [b"%d" % (MOST_LINES - 1), b"lost 1234", b"after"]


def test_lines_that_are_kept_have_a_limit_of_bytes(target: FakeTarget) -> None:
    target.room = 0
    sink = Sink(target, notice)
    for _ in range(100):
        sink.put(b"x" * (1 << 20) + b"\n")
    target.room = None
    target.go_on.set()
    until_written(target)
    assert 1 << 20 < len(target.written) < 5 << 20
    sink.close()


def test_nothing_is_written_to_a_target_that_was_closed(target: FakeTarget) -> None:
    target.room = 0
    sink = Sink(target, notice)
    for _ in range(MOST_LINES + 2):
        sink.put(b"line\n")
    writers = target.writers
    target.room = None
    sink.close()
    for writer in writers:
        writer.join()
    assert writers and target.written == b""


def test_full_disk_loses_lines_and_nothing_else(target: FakeTarget) -> None:
    sink = Sink(target, notice)
    target.error = OSError(errno.ENOSPC, "No space left on device")
    for _ in range(3):
        sink.put(b"lost\n")
    target.error = None
    sink.put(b"after\n")
    assert target.written == b"lost 3\nafter\n"
    assert not target.writers


def test_part_of_a_line_that_was_lost_is_ended_before_the_next(target: FakeTarget) -> None:
    target.room = 3
    sink = Sink(target, notice)
    sink.put(b"broken\n")
    target.error = OSError(errno.EPIPE, "Broken pipe")
    target.go_on.set()
    sink.flush(20)
    target.error, target.room = None, None
    until_written(target)
    sink.put(b"after\n")
    assert target.written == b"bro\nlost 1\nafter\n"


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


def test_a_logger_with_a_full_pipe_continues_and_shares_nothing(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    with os.fdopen(writing, "w") as stream:
        sink = Sink(target_of(stream), notice)
        for number in range(20_000):
            sink.put(b"%07d\n" % number)
        assert os.get_blocking(writing)  # which other processes may share
        received = b""
        while not received.endswith(b"lost") and b"lost" not in received:
            received += os.read(reading, 1 << 16)
        numbers = [int(line) for line in received.split(b"\n") if line.isdigit()]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= MOST_LINES
        sink.close()
    os.close(reading)


def test_socket_without_a_reader_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ours, ours.makefile("w") as stream:
        sink = Sink(target_of(stream), notice)
        for _ in range(20_000):
            sink.put(b"x" * 100 + b"\n")
        assert ours.getblocking()
        received = b""
        while b"lost" not in received:
            received += theirs.recv(1 << 16)
        sink.close()


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200, reason="needs descriptors beyond 1024")
def test_socket_of_a_process_with_many_descriptors_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "dup", lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 1100))
    ours, theirs = socket.socketpair()
    with theirs, ours, ours.makefile("w") as stream:
        target = target_of(stream)
        sink = Sink(target, notice)
        sink.put(b"x\n")
        target.wait(1)
        assert theirs.recv(2) == b"x\n"
        sink.close()


def test_pipe_in_place_of_the_log_file_needs_no_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    handler = logs.setup(LogSettings(log_file=str(tmp_path / "log")))
    try:
        for _ in range(2000):
            logging.getLogger("conch").info("x" * 100)
        reading = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
        assert b'"' + b"x" * 100 + b'"\n' in os.read(reading, 4096)
        fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 1 << 20)
        os.close(reading)
    finally:
        logs.reset(handler)


def test_lines_that_were_lost_are_said_in_the_format_of_the_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    handler = logs.setup(LogSettings(log_file=str(tmp_path / "log")))
    try:
        for _ in range(2 * MOST_LINES):
            logging.getLogger("conch").info("x")
        text = ""
        with open(tmp_path / "log", encoding="utf-8") as reading:
            while "lost" not in text:
                text = reading.readline()
    finally:
        logs.reset(handler)
    told = r'W.*sink\.py] "\d,\d{3} log lines were lost, because the reader was too slow or the disk is full"\n'
    assert re.fullmatch(told, text)
