"""The last lines of the log about each model: those of its workers, and those of the server that name it."""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict, deque
from typing import Any, Final

from conch.machine.logs import LOGGER, current

#: Lines kept for each model, characters of a line, and models.
MOST_LINES: Final = 200
LONGEST_LINE: Final = 2000
MOST_MODELS: Final = 256
#: A model's name in a message of the server, as in "worker of 'NAME' died" and "loading: NAME:1".
_NAMED: Final = re.compile(r"'([^']{1,255})'|^(?:loading|unloading|successfully \w+)[ :]+'?([^':]+)")
_LEVELS: Final = {logging.DEBUG: "verbose", logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error"}


class WorkerLogs(logging.Handler):
    """Keeps lines in a fixed amount of memory; any thread may log."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: OrderedDict[str, deque[dict[str, Any]]] = OrderedDict()
        self._count = 0
        self._guard = threading.Lock()

    def open(self) -> None:
        """Begin to keep lines."""
        LOGGER.addHandler(self)

    def end(self) -> None:
        """Keep no further lines."""
        LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if not current().allows(record.levelno):
            return
        text = record.getMessage()
        model = getattr(record, "model", "")
        worker = bool(model)
        if not worker:
            match = _NAMED.search(text)
            if match is None:
                return
            model = match[1] or match[2]
        with self._guard:
            self._count += 1
            lines = self._lines.setdefault(model, deque(maxlen=MOST_LINES))
            self._lines.move_to_end(model)
            while len(self._lines) > MOST_MODELS:
                self._lines.popitem(last=False)
            lines.append(
                {
                    "number": self._count,
                    "time": record.created,
                    "level": _LEVELS.get(record.levelno, "error"),
                    "from": record.filename.partition("/")[0] if worker else "server",
                    "pid": record.process,
                    "text": text[:LONGEST_LINE],
                }
            )

    def lines(self, model: str, after: int = 0) -> list[dict[str, Any]]:
        """Return the lines about a model with a number above ``after``, oldest first."""
        with self._guard:
            return [line for line in self._lines.get(model, ()) if line["number"] > after]
