"""What became of each request, counted; shared by all client threads."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

#: Errors that what is broken explains, by a part of their message.
EXPLAINED: Final[dict[str, str]] = {
    "a worker died": r"is not healthy|does not answer|was stopped|has stopped",
    "the queue was full": r"[Ee]xceeds maximum queue size|maximum queue size|too many (pending )?requests",
    "the model was not loaded": r"unknown model|is not ready|not found|unloaded|unloading|no available versions"
    r"|has no version|is being loaded|is loading|not available",
    "resources had run out": r"No space|File too large|[Tt]oo many open files|bytes in flight|memory",
}


@dataclass
class Outcomes:
    """``answered`` right, ``explained`` errors by cause, ``wrong`` with what was wrong (the first hundred)."""

    answered: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    refused_connections: int = 0
    hung: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    longest: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, model: str, seconds: float, fault: str = "") -> None:
        """Count an answer; ``fault`` says what is wrong with it."""
        with self._lock:
            self.longest = max(self.longest, seconds)
            if fault:
                self._wrong(f"{model}: {fault}")
            else:
                self.answered[model] += 1

    def error(self, model: str, seconds: float, status: str, message: str) -> None:
        """Count an error by its cause; one without a known cause is wrong."""
        cause = next((cause for cause, pattern in EXPLAINED.items() if re.search(pattern, message)), "")
        with self._lock:
            self.longest = max(self.longest, seconds)
            if cause:
                self.explained[cause] += 1
            else:
                self._wrong(f"{model}: {status} {message[:300]}")

    def hang(self, model: str, seconds: float) -> None:
        """Count a request without an answer."""
        with self._lock:
            self.hung.append(f"{model}: nothing for {seconds:.0f} s")

    def refuse_connection(self) -> None:
        """Count a connection that the server did not accept, or closed before it had read the request."""
        with self._lock:
            self.refused_connections += 1

    def _wrong(self, what: str) -> None:
        if len(self.wrong) < 100:
            self.wrong.append(what)
