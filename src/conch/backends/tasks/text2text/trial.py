"""What a few examples tell of an encoder-decoder model: which texts may share a run, and whether it answers well.

Called when a task is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import process_time
from typing import Any, Final, Protocol

from conch.backends.native.likeness import SLOW_STEP, VERIFIED_TOKENS, greedy_difference, tie_of, unlike
from conch.backends.tasks.encoders.trial import Sharing
from conch.errors import one_line

_logger = logging.getLogger(__name__)

#: A text, another of about its length, and a longer one; a tokenizer may see them otherwise.
EXAMPLES: Final = (
    "Where is the nearest library?",
    "There is the oldest station!",
    "A program takes a list of numbers and returns the even ones, while the bus to the station is late.",
)
#: One greedy answer of a few tokens, whatever generation_config.json says.
_GREEDY: Final[Mapping[str, Any]] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}


class Writer(Protocol):
    """The task, as far as a comparison needs it."""

    def runs(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which texts of these lengths run together."""

    def write(self, texts: Sequence[Sequence[int]], generation: Mapping[str, Any], **arguments: Any) -> list[list[int]]:
        """The tokens that are written for texts in one run."""


def examine(model: Any, examples: Sequence[list[int]], pad: int) -> Sharing:
    """Find out which texts may share a run so that each gets the logits that it gets alone; ``pad`` fills rows."""
    [short, *_, long] = sorted(examples, key=len)
    # A text of the same length: the short one with its tokens in another order, except the last.
    other = [*short[-2::-1], short[-1]]
    wanted = _first_logits(model, [short], pad)
    tolerance = tie_of(str(model.dtype).removeprefix("torch."))

    def holds(texts: Sequence[list[int]]) -> bool:
        try:
            found = _first_logits(model, texts, pad)
        except Exception:  # whatever a network raises that takes one text at a time, or one length
            return False
        size = wanted[wanted.isfinite()].abs().max().clamp(min=1e-6)
        apart = (wanted - found).where(wanted != found, 0.0).abs().max()
        return bool(apart <= tolerance * size)

    return _first_that_holds(holds, short, other, long)


def _first_that_holds(
    holds: Callable[[Sequence[list[int]]], bool], short: list[int], other: list[int], long: list[int]
) -> Sharing:
    if not holds([short, other]):
        return Sharing.ALONE
    return Sharing.PADDED if holds([short, long]) else Sharing.EQUAL


def _first_logits(model: Any, texts: Sequence[list[int]], pad: int) -> Any:
    """The logits ``[vocabulary]`` of the first token that is written for the first of ``texts``."""
    import torch

    longest = max(map(len, texts))
    ids = torch.tensor([text + [pad] * (longest - len(text)) for text in texts], device=model.device)
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts], device=model.device)
    with torch.inference_mode():
        given = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=1, return_dict_in_generate=True, output_logits=True,
            **_GREEDY,
        )  # fmt: skip
    return given.logits[0][0].float()


def verify(task: Writer, model: Any, examples: Sequence[list[int]]) -> None:
    """Have ``task`` answer ``examples`` (token ids), and ``generate`` of transformers each of them alone, greedily.

    Raises INVALID_ARG where an answer differs.  Nothing is compared where it is not cheap.
    """
    import torch

    generation = {**_GREEDY, "max_new_tokens": VERIFIED_TOKENS}
    answers: dict[int, list[int]] = {}
    before = process_time()
    for run in task.runs([len(ids) for ids in examples]):
        answers.update(zip(run, task.write([examples[index] for index in run], generation), strict=True))
    if process_time() - before > SLOW_STEP * VERIFIED_TOKENS * torch.get_num_threads():
        _logger.info("not compared with transformers: a step takes more than %s s on each core", SLOW_STEP)
        return
    tie = tie_of(str(model.dtype).removeprefix("torch."))
    for index, text in enumerate(examples):
        ids = torch.tensor([text], device=model.device)
        try:
            with torch.inference_mode():
                given = model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True,
                    output_logits=True, **generation,
                )  # fmt: skip
        except Exception as error:
            raise unlike(f"transformers itself fails: {type(error).__name__}: {one_line(error)}") from error
        begin = given.sequences.shape[1] - len(given.logits)
        wanted = given.sequences[0, begin:].tolist()
        logits = [row[0] for row in given.logits]
        if difference := greedy_difference(answers[index][begin:], wanted, logits, tie):
            raise unlike(f"for a text of {len(text)} tokens among {len(examples)}, {difference}")
