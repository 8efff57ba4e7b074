"""Responds to repeated request messages from the response cache, without decoding them.

Front ends look up each message, if the model has this cache: identical messages are identical requests. Encoded
responses are stored with their cache entry and removed with it. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from time import monotonic_ns
from typing import Final

from conch.core.inference import InferRequest
from conch.server.caching.entries import CachedResponse
from conch.server.caching.local import LocalScope
from conch.telemetry.statistics import ModelStatistics

#: Maximum message size (bytes): for larger messages, the lookup takes longer than it saves.
MOST_MESSAGE_BYTES: Final = 4 << 10
#: Approximate memory overhead of a message and its encoded response (bytes).
_OVERHEAD: Final = 500


class CachedMessages:
    """Encoded responses of a model version by request message; ``scope`` returns the current cache scope."""

    def __init__(self, scope: Callable[[], LocalScope], statistics: ModelStatistics) -> None:
        self._scope = scope
        self._statistics = statistics

    def answer_to(self, message: Hashable) -> object | None:
        """Return the encoded response to an identical earlier message and record a cache hit; None if there is none."""
        begun = monotonic_ns()
        answer = self._scope().answer_to(message)
        if answer is not None:
            took = monotonic_ns() - begun
            self._statistics.record_cache_hit(took, took, took)
        return answer

    def keep(self, request: InferRequest, message: Hashable, answer: object, size: int) -> None:
        """Store ``answer``, an encoded response, if the response cache responded to ``request``.

        ``size`` is that of the response and its message (bytes). Requests with an ID are skipped.
        """
        entry = request.times.entry
        if isinstance(entry, CachedResponse) and not request.id:
            self._scope().attach(request.times.key, entry, message, answer, size + _OVERHEAD)
