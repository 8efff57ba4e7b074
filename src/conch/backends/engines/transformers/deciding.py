"""From the logits of a step to what it did for each sequence of a batch."""

from __future__ import annotations

from typing import Any

from conch.backends.engines.transformers.batch import BatchRow
from conch.backends.engines.transformers.sampling import adjust, choose, logprobs
from conch.backends.engines.transformers.structure import accept, restrict
from conch.backends.generation.engine import Progress

Tensor = Any


def decide(rows: list[BatchRow], logits: Tensor) -> list[Progress]:
    """Choose a token for each row, whose ``tokens`` it is appended to; the logits are used up."""
    wanted = [row.sampling.logprobs for row in rows]
    raw = logits.clone() if any(count is not None for count in wanted) else logits
    restrict(logits, [row.matcher for row in rows])
    adjust(logits, rows)
    tokens = choose(logits, rows)
    progress = []
    for row, token, found in zip(rows, tokens, logprobs(raw, tokens, wanted), strict=True):
        row.tokens.append(token)
        error = accept(row.matcher, token) if row.matcher is not None else None
        finish = "stop" if token in row.ends else "length" if len(row.tokens) >= row.longest else ""
        if error is not None:
            progress.append(Progress(row.id, error=error))
        else:
            progress.append(Progress(row.id, [token], finish, logprobs=None if found is None else [found]))
    return progress


def decide_beams(row: BatchRow, logits: Tensor) -> tuple[list[int], list[Progress]]:
    """One step of a beam search: which beams go on, or what they all came to."""
    search = row.search
    assert search is not None
    going = search.advance(logits)
    if not search.done:
        return going, []
    return [], [
        Progress(
            row.id,
            beam.tokens,
            "stop" if beam.stopped else "length",
            beam=index,
            cumulative_logprob=beam.total,
        )
        for index, beam in enumerate(search.results())
    ]
