"""Answers messages that were answered from the response cache before with the same bytes, without decoding them.

Front ends ask it, where a model has one: a message says all that its request has, so the same message again is the same
request.  What was sent is kept beside the response and goes when that goes.  Lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from time import monotonic_ns
from typing import Final

from conch.caching.entries import CachedResponse
from conch.caching.local import LocalScope
from conch.inference import InferRequest
from conch.telemetry.statistics import ModelStatistics

#: Larger messages are not kept: going through them takes longer than what is saved.
MOST_MESSAGE_BYTES: Final = 4 << 10
#: About what a message and an answer take besides their bytes.
_OVERHEAD: Final = 500


class CachedMessages:
    """What was sent in answer to messages for one model version; ``scope`` gives the entries that count now."""

    def __init__(self, scope: Callable[[], LocalScope], statistics: ModelStatistics) -> None:
        self._scope = scope
        self._statistics = statistics

    def answer_to(self, message: Hashable) -> object | None:
        """What :meth:`keep` was given for the same message, which counts as a hit of the cache; None for none."""
        begun = monotonic_ns()
        answer = self._scope().answer_to(message)
        if answer is not None:
            took = monotonic_ns() - begun
            self._statistics.record_cache_hit(took, took, took)
        return answer

    def keep(self, request: InferRequest, message: Hashable, answer: object, size: int) -> None:
        """Keep ``answer``, of ``size`` bytes with its message, if the cache answered ``request``.

        One with an id of its own is not sent again.
        """
        entry = request.times.entry
        if isinstance(entry, CachedResponse) and not request.id:
            self._scope().attach(request.times.key, entry, message, answer, size + _OVERHEAD)
