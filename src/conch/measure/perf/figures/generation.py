"""Figures of text generation: TTFT, inter-token latency, and the requests that meet an objective.

Pure. Each message of a stream counts as a token if the server does not return the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conch.core.errors import invalid
from conch.measure.perf.figures.latency import LatencyFigures
from conch.measure.perf.senders.records import Outcome, Records, Span, ended_in, seconds_of


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective that a good request meets (s, None: no limit): TTFT, inter-token latency, and total latency."""

    ttft: float | None = None
    itl: float | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Parse ``ttft:200,itl:50`` (milliseconds); raises INVALID_ARG for other text."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, colon, value = part.partition(":")
            try:
                limits[name] = float(value) / 1000
            except ValueError:
                colon = ""
            if not colon or name not in ("ttft", "itl", "latency") or not limits[name] > 0:
                raise invalid(f"--slo {text}: expected ttft:MS,itl:MS,latency:MS, or some of them")
        return cls(**limits)


@dataclass(frozen=True, slots=True)
class GenerationFigures:
    """The figures of one window of a generative model.

    ``ttft`` is the time from a request's due time to its first token. ``itl`` is the inter-token latency, averaged per
    request, so that long responses do not weigh more. ``tokens`` is the rate of all tokens (per second),
    ``tokens_per_user`` the rate per request (the average over requests). ``goodput`` is the rate of requests that meet
    the objective (per second).
    """

    requests: int
    tokens: float
    tokens_per_user: float
    ttft: LatencyFigures | None
    itl: LatencyFigures | None
    goodput: float | None


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """The token times of successful ``requests``: ``tokens`` of each, ``ttft`` and ``itl`` (ns).

    ``several`` marks the requests with more than one token, which ``itl`` is for.
    """

    requests: Records
    tokens: NDArray[np.int64]
    ttft: NDArray[np.int64]
    several: NDArray[np.bool_]
    itl: NDArray[np.float64]


def token_times(records: Records, events: NDArray[np.int64], spans: Sequence[Span]) -> TokenTimes:
    """Return the token times of successful requests in the windows ``spans``; ``events`` are by row of ``records``."""
    inside = np.flatnonzero(ended_in(records, spans) & (records["outcome"] == Outcome.OK) & (records["responses"] > 0))
    first, last = _of_requests(events, len(records))
    requests = records[inside]
    tokens = np.where(requests["tokens"] > 0, requests["tokens"], requests["responses"])
    # Several tokens may share a message: the rate after the first message counts. A response in a single message has no
    # inter-token latency.
    several = (tokens > 1) & (requests["responses"] > 1)
    itl = (last[inside] - first[inside])[several] / (tokens[several] - 1)
    return TokenTimes(requests, tokens, first[inside] - requests["due"], several, itl)


def generation_of(
    records: Records, events: NDArray[np.int64], spans: Sequence[Span], objective: Objective | None = None
) -> GenerationFigures:
    """Return the figures of the successful requests in the windows ``spans``; ``events`` are by row of ``records``."""
    seconds = seconds_of(spans)
    times = token_times(records, events, spans)
    requests, tokens = times.requests, times.tokens
    took = (requests["end"] - requests["due"]) / 1e9
    per_user = tokens / np.maximum(took, 1e-9)
    goodput = None
    if objective is not None:
        distances = np.zeros(len(requests))
        distances[times.several] = times.itl
        good = _keeps(times.ttft, objective.ttft) & _keeps(distances, objective.itl)
        good &= _keeps(requests["end"] - requests["due"], objective.latency)
        goodput = float(good.sum()) / seconds
    return GenerationFigures(
        len(requests), float(tokens.sum()) / seconds, float(per_user.mean()) if len(requests) else 0.0,
        LatencyFigures.of(times.ttft), LatencyFigures.of(times.itl), goodput,
    )  # fmt: skip


def _of_requests(events: NDArray[np.int64], count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first and the last timestamp (ns) of each row's events."""
    first = np.full(count, np.iinfo(np.int64).max)
    last = np.zeros(count, np.int64)
    np.minimum.at(first, events[:, 0], events[:, 1])
    np.maximum.at(last, events[:, 0], events[:, 1])
    return first, last


def _keeps(values: NDArray[Any], limit: float | None) -> NDArray[np.bool_]:
    return np.ones(len(values), bool) if limit is None else values / 1e9 <= limit
