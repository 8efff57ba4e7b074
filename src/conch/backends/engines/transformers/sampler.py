"""From the logits of a step to its tokens: samples for the rows of a batch, or a step of a beam search."""

from __future__ import annotations

from typing import Any

from conch.backends.engines.transformers.batch import BatchRow
from conch.backends.engines.transformers.sampling import adjust, choose, logprobs
from conch.backends.engines.transformers.structure import restrict
from conch.backends.generation.engine import Progress

Tensor = Any


def sample(rows: list[BatchRow], logits: Tensor) -> list[Progress]:
    """Choose a token for each row and append it to its ``tokens``; overwrites ``logits`` ``[rows, vocabulary]``."""
    wanted = [row.sampling.logprobs for row in rows]
    raw = logits.clone() if any(count is not None for count in wanted) else logits
    restrict(logits, [row.matcher for row in rows])
    adjust(logits, rows)
    tokens = choose(logits, rows)
    progress = []
    for row, token, entry in zip(rows, tokens, logprobs(raw, tokens, wanted), strict=True):
        row.tokens.append(token)
        error = row.matcher.accept(token) if row.matcher is not None else None
        finish = "stop" if token in row.end_ids else "length" if len(row.tokens) >= row.max_length else ""
        if error is not None:
            progress.append(Progress(row.id, error=error))
        else:
            progress.append(Progress(row.id, [token], finish, logprobs=None if entry is None else [entry]))
    return progress


def sample_beams(row: BatchRow, logits: Tensor) -> tuple[list[int], list[Progress]]:
    """Advance a beam search by the logits ``[beams, vocabulary]``.

    Returns the beams that the new ones continue, or the progress of all beams once the search is done.
    """
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
