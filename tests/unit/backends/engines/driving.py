"""Engines driven to the end of their requests; needs no library of an engine."""

from __future__ import annotations

from typing import Any

from conch.backends.generation.engine import EngineRequest, GenerationEngine, Progress
from conch.core.sampling.parameters import SamplingParams


def finished(engine: GenerationEngine, *requests: EngineRequest) -> list[Progress]:
    """All progress until nothing is under way."""
    for request in requests:
        engine.add(request)
    progress: list[Progress] = []
    while engine.busy:
        progress += engine.step()
    return progress


def finished_by_id(engine: GenerationEngine, *requests: EngineRequest) -> dict[int, list[Progress]]:
    """All progress until nothing is under way, by request."""
    by_id: dict[int, list[Progress]] = {}
    for progress in finished(engine, *requests):
        by_id.setdefault(progress.id, []).append(progress)
    return by_id


def tokens(done: list[Progress]) -> list[int]:
    return [token for progress in done for token in progress.tokens]


def generate(engine: GenerationEngine, prompt: list[int], **sampling: Any) -> list[int]:
    """The tokens of a request that is alone."""
    return tokens(finished(engine, EngineRequest(0, prompt, SamplingParams(**sampling))))
