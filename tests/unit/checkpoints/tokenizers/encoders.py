"""The tokenizers of small encoders, as tasks open them."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.inputs import InputEncoder, open_encoder
from conch.checkpoints.tokenizers.open import SlowTokenizer
from tests.text_checkpoints import TEXTS

LONG = " ".join(TEXTS) + " [SEP] and [MASK] the end"


def opened(folder: Path, **options: object) -> InputEncoder:
    given = Options.from_values({"task": "feature-extraction", **options})
    return open_encoder(Checkpoint.open(folder, given))


def in_python(folder: Path, fast: InputEncoder) -> InputEncoder:
    """The same with a tokenizer that is used as if it were written in Python."""
    tokenizer = fast.tokenizer
    slow = SlowTokenizer(AutoTokenizer.from_pretrained(folder), tokenizer.special, tokenizer.template, types=True)
    return InputEncoder(slow, fast.max_length)
