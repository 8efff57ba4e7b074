"""The ``progress`` frame: the responses after a step, and the statistics of the worker.

Its ``load`` is what ``telemetry/statistics.py`` counts.  Used by the service's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic_ns
from typing import Any

from conch.backends.generation.engine import GenerationEngine
from conch.backends.generation.request_state import RequestState


class Report:
    """Collects what has happened since the last frame."""

    def __init__(self) -> None:
        #: Whether a frame is due, if only to say that nothing is under way any more.
        self.changed = False
        self._responses: list[dict[str, Any]] = []
        self._done: list[tuple[int, tuple[int, int, int]]] = []
        self._generated = 0
        self._prompt = 0
        self._first: list[float] = []
        self._gaps: dict[int, int] = {}
        self._ended: list[tuple[Any, ...]] = []
        self._queries = self._hits = self._preemptions = 0

    def tokens(self, state: RequestState, fresh: int, now: int) -> None:
        """Count ``fresh`` new tokens of a request; ``now`` is monotonic, in ns."""
        self._generated += fresh
        if not state.first_token:
            state.first_token = now
            self._prompt += state.prompt_tokens
            self._first.append((now - state.arrived) / 1e9)
        elif now > state.last_token:
            gap = (now - state.last_token) // fresh
            self._gaps[gap] = self._gaps.get(gap, 0) + fresh
        state.last_token = now

    def respond(self, state: RequestState, packed: Mapping[str, Any], final: bool) -> None:
        """Add a response, as a frame describes it."""
        self.changed = True
        self._responses.append({"serial": state.request.serial, "final": final, **packed})

    def end(self, state: RequestState) -> None:
        """Count a request that has had its last response."""
        now = monotonic_ns()
        scheduled = state.scheduled or now
        first = state.first_token or now
        self._done.append((state.batch, (scheduled - state.received, now - scheduled, 0)))
        times = (now - state.arrived, scheduled - state.arrived, first - scheduled, now - first)
        if state.builder.prompts:
            self._ended.append(
                (
                    state.finish_reasons,
                    *(max(time, 0) / 1e9 for time in times),
                    state.prompt_tokens,
                    state.generated_tokens,
                    state.max_tokens,
                )
            )

    def frame(self, engine: GenerationEngine, waiting: int) -> dict[str, Any]:
        """The frame; the next one begins empty.  ``waiting`` sequences have not gone to the engine yet."""
        usage = engine.usage()
        frame = {
            "op": "progress",
            "responses": self._responses,
            "done": self._done,
            "load": {
                "running": usage.running,
                "waiting": usage.waiting + waiting,
                "used": usage.used_tokens,
                "capacity": engine.cache_tokens,
                "bytes": engine.token_bytes * (engine.cache_tokens if engine.reserves_cache else usage.used_tokens),
                "prompt": self._prompt,
                "generated": self._generated,
                "preempted": usage.preemptions - self._preemptions,
                "queries": usage.prefix_queries - self._queries,
                "hits": usage.prefix_hits - self._hits,
                "first": self._first,
                "gaps": [(gap / 1e9, times) for gap, times in self._gaps.items()],
                "ended": self._ended,
            },
        }
        self._queries, self._hits, self._preemptions = usage.prefix_queries, usage.prefix_hits, usage.preemptions
        self.changed = False
        self._responses, self._done, self._first, self._gaps, self._ended = [], [], [], {}, []
        self._generated = self._prompt = 0
        return frame
