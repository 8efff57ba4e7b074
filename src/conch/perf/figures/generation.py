"""Figures of generation: how long the first token takes, the distances of the others, and who got both in time.

Pure.  A message of a stream counts as a token where the server does not say how many there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conch.errors import invalid
from conch.perf.figures.latency import LatencyFigures
from conch.perf.senders.records import Outcome, Records, Span, ended_in, seconds_of


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to count as good (s, None: anything): to the first token, between tokens, in all."""

    ttft: float | None = None
    itl: float | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, text: str) -> Objective:
        """``ttft:200,itl:50`` in milliseconds; raises INVALID_ARG for anything else."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, colon, value = part.partition(":")
            try:
                found[name] = float(value) / 1000
            except ValueError:
                colon = ""
            if not colon or name not in ("ttft", "itl", "latency") or not found[name] > 0:
                raise invalid(f"--slo {text}: expected ttft:MS,itl:MS,latency:MS, or some of them")
        return cls(**found)


@dataclass(frozen=True, slots=True)
class GenerationFigures:
    """One window of a model that writes text.

    ``ttft`` is from when a request was due to its first token, ``itl`` the distance of tokens within requests, averaged
    for each request, so that long answers do not outvote short ones.  ``tokens`` are a second, ``tokens_per_user``
    those that one request gets (the average over requests).  ``goodput`` counts requests a second that kept the
    objective.
    """

    requests: int
    tokens: float
    tokens_per_user: float
    ttft: LatencyFigures | None
    itl: LatencyFigures | None
    goodput: float | None


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """When tokens came in ``requests`` that ended well: ``tokens`` of each, ``ttft`` and ``itl`` (ns); the latter is of
    those that ``several`` says have more than one."""

    requests: Records
    tokens: NDArray[np.int64]
    ttft: NDArray[np.int64]
    several: NDArray[np.bool_]
    itl: NDArray[np.float64]


def token_times(records: Records, events: NDArray[np.int64], spans: Sequence[Span]) -> TokenTimes:
    """Of requests that ended well in the windows ``spans``; ``events`` are by row of ``records``."""
    inside = np.flatnonzero(ended_in(records, spans) & (records["outcome"] == Outcome.OK) & (records["responses"] > 0))
    first, last = _of_requests(events, len(records))
    found = records[inside]
    tokens = np.where(found["tokens"] > 0, found["tokens"], found["responses"])
    # Several tokens may share a message: what counts is how fast they came after the first one.  An answer in one piece
    # has no distances.
    several = (tokens > 1) & (found["responses"] > 1)
    itl = (last[inside] - first[inside])[several] / (tokens[several] - 1)
    return TokenTimes(found, tokens, first[inside] - found["due"], several, itl)


def generation_of(
    records: Records, events: NDArray[np.int64], spans: Sequence[Span], objective: Objective | None = None
) -> GenerationFigures:
    """The figures of requests that ended well in the windows ``spans``; ``events`` are by row of ``records``."""
    seconds = seconds_of(spans)
    times = token_times(records, events, spans)
    found, tokens = times.requests, times.tokens
    took = (found["end"] - found["due"]) / 1e9
    per_user = tokens / np.maximum(took, 1e-9)
    goodput = None
    if objective is not None:
        distances = np.zeros(len(found))
        distances[times.several] = times.itl
        good = _keeps(times.ttft, objective.ttft) & _keeps(distances, objective.itl)
        good &= _keeps(found["end"] - found["due"], objective.latency)
        goodput = float(good.sum()) / seconds
    return GenerationFigures(
        len(found), float(tokens.sum()) / seconds, float(per_user.mean()) if len(found) else 0.0,
        LatencyFigures.of(times.ttft), LatencyFigures.of(times.itl), goodput,
    )  # fmt: skip


def _of_requests(events: NDArray[np.int64], count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The first and the last moment (ns) of each row's events."""
    first = np.full(count, np.iinfo(np.int64).max)
    last = np.zeros(count, np.int64)
    np.minimum.at(first, events[:, 0], events[:, 1])
    np.maximum.at(last, events[:, 0], events[:, 1])
    return first, last


def _keeps(values: NDArray[Any], limit: float | None) -> NDArray[np.bool_]:
    return np.ones(len(values), bool) if limit is None else values / 1e9 <= limit
