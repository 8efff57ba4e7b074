"""Log lines and tables in Triton's formats or as JSON, based on the standard ``logging`` module.

Modules log with ``logging.getLogger("conch")``. The command, and the library for servers with logging enabled, call
``setup``, which adds a handler to the root logger, so that library warnings get the same format. If several servers run
in one process, each has a handler, and every line goes to all handlers. The settings may change while the server runs
(``LogSettings.update``, for the logging extension). Any thread may log.

No log line blocks on its reader. If a pipe, a terminal or a socket is full, lines are buffered up to a limit, and a
thread writes them when there is room again. Lines beyond the limit, or for a full disk, are counted, and the log
reports how many were lost. While there is room, the thread that logs a line also writes it, so that nothing is lost if
the process dies.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import wrap
from time import monotonic
from typing import Any, Final, Protocol, TextIO

from conch.core.errors import internal

#: Limits of the lines buffered for a slow reader (lines, bytes).
MOST_LINES: Final = 10_000
MOST_BYTES: Final = 4 << 20
#: Interval between checks for room if no event reports it (s).
_PERIOD: Final = 1.0


class Target(Protocol):
    """A destination of log lines."""

    def write(self, data: bytes) -> int:
        """Write at least a part of ``data``; returns the number of bytes written.

        Raises BlockingIOError if there is no room now, and OSError for a permanent failure.
        """

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` until there is room."""

    def close(self) -> None: ...


class Sink:
    """Buffers the lines for one target. Thread-safe; ``notice`` makes the line that reports lost lines."""

    def __init__(self, target: Target, notice: Callable[[int], bytes]) -> None:
        self._target = target
        self._notice = notice
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._lost = 0
        #: Whether the last write ended within a line.
        self._broken = False
        self._writer: threading.Thread | None = None

    def put(self, line: bytes) -> None:
        """Write a line; buffer it if there is no room, and count it as lost if the buffer is full."""
        with self._lock:
            if (self._waiting or self._lost) and not self._drain():
                self._keep(line)
            else:
                self._waiting.append(line)
                self._bytes += len(line)
                self._drain()
            if self._waiting and self._writer is None:
                self._start_writer()

    def flush(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the reader to take buffered lines."""
        until = monotonic() + seconds
        while self._waiting and (left := until - monotonic()) > 0:
            self._target.wait(left)
            with self._lock:
                self._drain()

    def close(self) -> None:
        """Discard buffered lines, and close the target."""
        with self._lock:
            self._waiting.clear()
            self._lost = 0  # the writer writes nothing more: the descriptor may be another file's by then
            self._target.close()

    def _start_writer(self) -> None:
        writer = threading.Thread(target=self._write_later, name="log", daemon=True)
        try:
            writer.start()
        except RuntimeError:  # the process is exiting, or has no more threads: the next line tries again
            return
        self._writer = writer

    def _keep(self, line: bytes) -> None:
        if len(self._waiting) < MOST_LINES and self._bytes + len(line) <= MOST_BYTES and self._waiting:
            self._waiting.append(line)
            self._bytes += len(line)
        else:
            self._lost += 1

    def _drain(self) -> bool:
        """Write buffered lines, then the notice of lost ones; returns whether everything was written."""
        try:
            while self._waiting:
                line = self._waiting[0]
                written = self._target.write(line)
                self._bytes -= written
                if written == len(line):
                    self._waiting.popleft()
                    self._broken = False
                else:
                    self._waiting[0] = line[written:]
                    self._broken = self._broken or written > 0
            if self._lost:
                line = (b"\n" if self._broken else b"") + self._notice(self._lost)
                written = self._target.write(line)
                self._lost, self._broken = 0, False
                if written < len(line):
                    self._waiting.append(line[written:])
                    self._bytes += len(line) - written
                    return self._drain()
        except BlockingIOError:
            return False
        except OSError:
            # A full disk or a closed reader: waiting would not help.
            self._lost += len(self._waiting)
            self._waiting.clear()
            self._bytes = 0
            return False
        return True

    def _write_later(self) -> None:
        while True:
            self._target.wait(_PERIOD)
            with self._lock:
                if self._drain() or not self._waiting:
                    self._writer = None
                    return


def target_of(stream: Any) -> Target:
    """Return a target for a text stream that never blocks: its descriptor, if it has one."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
    except (AttributeError, OSError, ValueError):
        return _Stream(stream)
    if stat.S_ISSOCK(mode):
        return _Socket(descriptor)
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        try:
            # Non-blocking mode belongs to the open file, which other processes share, so it is opened again.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            return _Descriptor(os.open(f"/proc/self/fd/{descriptor}", flags), own=True)
        except OSError:
            pass  # the file belongs to another user
    return _Descriptor(descriptor, own=False)


def open_log_file(path: str) -> int:
    """Return a descriptor that appends to a file, which may be a pipe without a reader. Raises OSError."""
    flags = os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(path, flags | os.O_WRONLY, 0o666)
    except OSError:
        # Opening a pipe only for writing fails without a reader.
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            raise
        return os.open(path, flags | os.O_RDWR)


class _Descriptor:
    def __init__(self, descriptor: int, *, own: bool) -> None:
        self._descriptor = descriptor
        self._own = own
        mode = os.fstat(descriptor).st_mode
        self._may_wait = not own and not stat.S_ISREG(mode) and os.get_blocking(descriptor)

    def write(self, data: bytes) -> int:
        if self._may_wait:
            # A pipe with room accepts this much without blocking.
            if not self._has_room(0):
                raise BlockingIOError
            data = data[: select.PIPE_BUF]
        return os.write(self._descriptor, data)

    def wait(self, seconds: float) -> None:
        self._has_room(seconds)

    def _has_room(self, seconds: float) -> bool:
        return _has_room(self._descriptor, seconds)

    def close(self) -> None:
        if self._own:
            os.close(self._descriptor)
            self._own = False


class _Socket:
    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))

    def write(self, data: bytes) -> int:
        return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def wait(self, seconds: float) -> None:
        _has_room(self._socket.fileno(), seconds)

    def close(self) -> None:
        self._socket.close()


class _Stream:
    """Writes directly to a stream of the application, such as a notebook's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(data.decode("utf-8"))
        self._stream.flush()
        return len(data)

    def wait(self, seconds: float) -> None: ...

    def close(self) -> None: ...


def _has_room(descriptor: int, seconds: float) -> bool:
    """Wait until the descriptor is writable; ``select`` is limited to descriptors below 1024."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(int(seconds * 1000)))


FORMATS: Final = ("default", "ISO8601", "json")
LOGGER: Final = logging.getLogger("conch")

#: The minimum width of the widest column of a table on a terminal (characters).
_NARROWEST: Final = 20
#: Control characters, including bidirectional ones, that text from a model or a client must not send to a terminal.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
#: Characters that JSON does not escape but that a log line must not contain: more control characters, line ends, and
#: surrogates, which file names may contain and a log file cannot.
_UNQUOTED: Final = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: Characters that the source location of a log line must not contain: all of these, and line ends.
_UNPRINTABLE: Final = re.compile(rf"{_CONTROL.pattern}|{_UNQUOTED.pattern}|[\n\t]")

#: The maximum length of a name or a path in verbose lines (characters).
_SHOWN: Final = 256

#: The time for a slow reader to catch up when the log ends (s).
_LAST_SECONDS: Final = 1.0

_WORKER_LEVEL: Final = {
    "VERBOSE": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
}
#: The names of levels in JSON, by their minimum.
_LEVEL_NAMES: Final = ((logging.ERROR, "ERROR"), (logging.WARNING, "WARNING"), (logging.INFO, "INFO"), (0, "VERBOSE"))


@dataclass(slots=True)
class LogSettings:
    """The levels, destination and format of the log.

    ``log_file`` is a path, empty for standard error; a ``log_verbose_level`` of 0 disables verbose lines. With
    ``log_access``, each call of a client has a line. ``setup`` keeps a reference to the object, so later changes take
    effect.
    """

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"
    log_access: bool = False

    @property
    def extension(self) -> dict[str, bool | int | str]:
        """The fields of the logging extension, in its order."""
        return {
            "log_file": self.log_file,
            "log_info": self.log_info,
            "log_warning": self.log_warning,
            "log_error": self.log_error,
            "log_verbose_level": self.log_verbose_level,
            "log_format": self.log_format,
        }

    @property
    def logs_calls(self) -> bool:
        """Whether each call of a client has a line."""
        return self.log_access or self.log_verbose_level > 0

    def update(self, **changes: bool | int | str) -> None:
        """Change some fields, from the next line on; ``log_file`` is read only by ``setup``.

        Does not check the values: front ends refuse invalid ones with their protocol's errors.
        """
        for name, value in changes.items():
            setattr(self, name, value)

    def allows(self, level: int) -> bool:
        """Return whether lines of this level of the ``logging`` module are written."""
        if level >= logging.ERROR:
            return self.log_error
        if level >= logging.WARNING:
            return self.log_warning
        if level >= logging.INFO:
            return self.log_info
        return self.log_verbose_level > 0


#: Whether messages are quoted and escaped as JSON strings; Triton's environment variable disables it.
_ESCAPES: Final = os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") != "0"


class _Handler(logging.StreamHandler[Any]):
    """Writes the lines that ``settings`` allow to their log file, or to standard error.

    Raises OSError if the log file cannot be opened.
    """

    def __init__(self, settings: LogSettings) -> None:
        self.path = settings.log_file
        stream: TextIO = sys.stderr
        if self.path:
            stream = os.fdopen(open_log_file(self.path), "w", encoding="utf-8", errors="backslashreplace")
        super().__init__(stream)
        self.target: object = self.path or stream
        self.settings = settings
        self._sink: Sink | None = None
        #: Records held until ``release``; None unless held.
        self.held: deque[logging.LogRecord] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if not self.settings.allows(record.levelno) or _last_with(self.target) is not self:
            return
        if self.held is not None and self.stream.isatty():
            self.held.append(record)
            return
        try:
            line = self.format(record) + self.terminator
            if self._sink is None:
                self._sink = Sink(target_of(self.stream), self._lost)
            self._sink.put(line.encode("utf-8", "backslashreplace"))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait for a limited time until the log's reader has taken the last lines; called when the process ends."""
        if self._sink is not None:
            self._sink.flush(_LAST_SECONDS)

    def end(self) -> None:
        """Write the last lines and close the log file."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.flush(_LAST_SECONDS)
            sink.close()
        if self.path:
            self.stream.close()

    def _lost(self, count: int) -> bytes:
        """Return the line that reports lost lines."""
        text = f"{count:,} log lines were lost, because the reader was too slow or the disk is full"
        record = LOGGER.makeRecord(LOGGER.name, logging.WARNING, "sink.py", 0, text, (), None)
        return (self.format(record) + self.terminator).encode("utf-8", "backslashreplace")

    def format(self, record: logging.LogRecord) -> str:
        if self.settings.log_format == "json":
            return _json_line(record)
        line = f":{record.lineno}" if record.lineno else ""  # 0: the message concerns the whole file
        file = record.filename if record.filename.isprintable() else _UNPRINTABLE.sub(_escaped, record.filename)
        location = f"{record.process} {file}{line}]"
        head = f"{_stamp(record, self.settings.log_format)} {location} "
        table: str | None = getattr(record, "table", None)
        text = record.getMessage()
        if table is not None:
            return f"{head}{_quote(text) if text else ''}\n{_CONTROL.sub(_escaped, table)}\n"
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        first, several, rest = text.partition("\n")
        if several and self.stream.isatty():
            return f"{head}{_quote(first)}\n{_CONTROL.sub(_escaped, rest.rstrip())}"
        return head + _quote(text)


#: Active handlers, newest last.
_handlers: list[_Handler] = []
#: The settings if there is no handler and the application configures logging itself.
_without_handler = LogSettings()
#: The level of the logger before the first handler.
_previous_level = logging.NOTSET


def setup(settings: LogSettings) -> logging.Handler:
    """Send all log lines to the destination of ``settings`` until ``reset``.

    Raises INTERNAL if the log file cannot be opened. :func:`current` returns the settings of the last call. A file or
    terminal with several handlers gets each line once.
    """
    global _previous_level
    try:
        handler = _Handler(settings)
    except OSError as error:
        raise internal(f"failed to open log file '{settings.log_file}': {error.strerror}") from error
    if not _handlers:
        _previous_level = LOGGER.level
        LOGGER.setLevel(logging.DEBUG)
    _handlers.append(handler)
    logging.getLogger().addHandler(handler)
    return handler


def reset(handler: logging.Handler) -> None:
    """Undo the call of ``setup`` that returned ``handler`` and close its log file."""
    global _without_handler
    for own in [installed for installed in _handlers if installed is handler]:
        logging.getLogger().removeHandler(own)
        _handlers.remove(own)
        own.end()
    if not _handlers:
        LOGGER.setLevel(_previous_level)
        _without_handler = LogSettings()


def _last_with(target: object) -> _Handler | None:
    """Return the newest handler that writes to a log file or stream."""
    return next((handler for handler in reversed(_handlers) if handler.target == target), None)


def hold() -> None:
    """Hold lines for terminals until ``release``, because a prompt is open; keeps the last 10,000 lines."""
    for handler in _handlers:
        if handler.held is None:
            handler.held = deque(maxlen=10_000)


def release() -> None:
    """Write the lines held since ``hold``."""
    for handler in _handlers:
        held, handler.held = handler.held, None
        for record in held or ():
            handler.handle(record)


def current() -> LogSettings:
    """Return the settings in force."""
    return _handlers[-1].settings if _handlers else _without_handler


def verbose(level: int, message: str, *arguments: object) -> None:
    """Log a message if the verbose level is at least ``level`` (1 or more)."""
    if level <= current().log_verbose_level:
        LOGGER.debug(message, *arguments, stacklevel=2)


def shortened(text: str) -> str:
    """Truncate a client's text to the length limit of log lines."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Log a table at INFO, unquoted after a heading that may be empty, limited to the width of a terminal."""
    width = get_terminal_size().columns if _handlers and _handlers[-1].stream.isatty() else 0
    fields = {"table": [dict(zip(columns, map(str, row), strict=True)) for row in rows]}
    text = format_table(columns, rows, width)
    LOGGER.info("%s", heading, stacklevel=2, extra={"table": text, "fields": fields})


def format_table(columns: Sequence[str], rows: Sequence[Sequence[object]], width: int = 0) -> str:
    """Format a table with rules and left-aligned cells of one or more lines; every row has a cell per column.

    If the table is wider than ``width`` characters, the widest column is wrapped; 0 means unlimited.
    """
    cells = [[str(cell).splitlines() or [""] for cell in row] for row in (columns, *rows)]
    widths = _widths(cells)
    excess = sum(width_of_column + 3 for width_of_column in widths) + 1 - width
    if width and excess > 0:
        widest = widths.index(max(widths))
        room = max(widths[widest] - excess, _NARROWEST)
        for row in cells:
            row[widest] = [part for line in row[widest] for part in wrap(line, room) or [""]]
        widths = _widths(cells)
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    head, *body = (
        "| " + " | ".join(map(str.ljust, line, widths)) + " |"
        for row in cells
        for line in zip_longest(*row, fillvalue="")
    )
    return "\n".join([rule, head, rule, *body, rule])


def _widths(rows: Sequence[Sequence[Sequence[str]]]) -> list[int]:
    return [max(len(line) for cell in column for line in cell) for column in zip(*rows, strict=True)]


def emit_from_worker(level: str, file: str, line: int, message: str, instance: str, pid: int, model: str = "") -> None:
    """Log a line from a model in its worker, with its ``instance``, process, and the model's file and line.

    ``level`` is ``INFO``, ``WARNING``, ``ERROR`` or ``VERBOSE``; anything else counts as INFO. The record has the name
    of the ``model`` as an attribute.
    """
    number = _WORKER_LEVEL.get(level, logging.INFO)
    allowed = any(handler.settings.allows(number) for handler in _handlers) or current().allows(number)
    if allowed and LOGGER.isEnabledFor(number):
        record = LOGGER.makeRecord(LOGGER.name, number, file, line, message, (), None)
        record.filename = f"{instance}/{record.filename}"
        record.process = pid
        record.fields = {"worker": instance, "file": file}
        record.model = model
        LOGGER.handle(record)


def _escaped(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def _quote(text: str) -> str:
    return _json(text) if _ESCAPES else text


def _json(value: object) -> str:
    """Format a value as JSON without characters that a log line must not contain."""
    return _UNQUOTED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def _json_line(record: logging.LogRecord) -> str:
    """Format an event as an object: time (UTC), level, message, place, its own fields, and the traceback, if any."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    event: dict[str, object] = {
        "time": f"{seconds}.{int(record.created % 1 * 1_000_000):06d}Z",
        "level": next(name for number, name in _LEVEL_NAMES if record.levelno >= number),
        "message": record.getMessage(),
        "pid": record.process,
        "file": record.filename,
        **({"line": record.lineno} if record.lineno else {}),
        **getattr(record, "fields", {}),
    }
    if record.exc_info:
        event["exception"] = logging.Formatter().formatException(record.exc_info)
    return _json(event)


def _stamp(record: logging.LogRecord, form: str) -> str:
    letter = "E" if record.levelno >= logging.ERROR else "W" if record.levelno >= logging.WARNING else "I"
    now = time.gmtime(record.created)
    if form == "ISO8601":
        return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', now)} {letter}"
    return f"{letter}{time.strftime('%m%d %H:%M:%S', now)}.{int(record.created % 1 * 1_000_000):06d}"
