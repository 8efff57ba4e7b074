"""The ``progress`` frame: what a step brought to requests, and what the worker has under way.

Its ``load`` is what ``telemetry/generation.py`` counts.  Used by the thread that runs the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from conch.backends.generation.engine import GenerationEngine
from conch.backends.generation.job import Job
from conch.backends.native.arrays import Request, Result
from conch.errors import ConchError


class Report:
    """What has happened since the last frame."""

    def __init__(self) -> None:
        #: Whether there is something to tell, be it only that nothing is under way any more.
        self.changed = False
        self._answers: list[tuple[Request, Result | ConchError, bool]] = []
        self._done: list[tuple[int, tuple[int, int, int]]] = []
        self._generated = 0
        self._prompt = 0
        self._first: list[float] = []
        self._gaps: dict[int, int] = {}
        self._ended: list[tuple[Any, ...]] = []
        self._queries = self._hits = self._preemptions = 0

    def tokens(self, job: Job, fresh: int, now: int) -> None:
        """A continuation of a job got new tokens."""
        self._generated += fresh
        if not job.first:
            job.first = now
            self._prompt += job.prompt_tokens
            self._first.append((now - job.arrived) / 1e9)
        elif now > job.last:
            gap = (now - job.last) // fresh
            self._gaps[gap] = self._gaps.get(gap, 0) + fresh
        job.last = now

    def respond(self, job: Job, answer: Result | ConchError, final: bool) -> None:
        """A job has a response."""
        self.changed = True
        self._answers.append((job.request, answer, final))

    def end(self, job: Job) -> None:
        """A job has had its last response."""
        now = monotonic_ns()
        added = job.added or now
        first = job.first or now
        self._done.append((job.batch, (added - job.taken, now - added, 0)))
        times = (now - job.arrived, added - job.arrived, first - added, now - first)
        if job.reply.prompts:
            self._ended.append(
                (job.reasons, *(max(time, 0) / 1e9 for time in times), job.prompt_tokens, job.generated, job.max_tokens)
            )

    def frame(
        self, engine: GenerationEngine, waiting: int, pack: Callable[[Request, Result | ConchError], dict[str, Any]]
    ) -> dict[str, Any]:
        """All of it; starts the next one.  ``waiting`` sequences are with the worker but not with the engine."""
        load = engine.load()
        frame = {
            "op": "progress",
            "responses": [
                {"serial": request.serial, "final": final, **pack(request, answer)}
                for request, answer, final in self._answers
            ],
            "done": self._done,
            "load": {
                "running": load.running,
                "waiting": load.waiting + waiting,
                "used": load.used_tokens,
                "capacity": engine.cache_tokens,
                "prompt": self._prompt,
                "generated": self._generated,
                "preempted": load.preemptions - self._preemptions,
                "queries": load.prefix_queries - self._queries,
                "hits": load.prefix_hits - self._hits,
                "first": self._first,
                "gaps": [(gap / 1e9, times) for gap, times in self._gaps.items()],
                "ended": self._ended,
            },
        }
        self._queries, self._hits, self._preemptions = load.prefix_queries, load.prefix_hits, load.preemptions
        self.changed = False
        self._answers, self._done, self._first, self._gaps, self._ended = [], [], [], {}, []
        self._generated = self._prompt = 0
        return frame
