"""Fill-in-the-middle: the order and the marks in which models of code read the text before and after a gap.

Sources: the papers and model cards of the families (Qwen2.5-Coder, StarCoder, Granite, CodeGemma, Code Llama,
DeepSeek-Coder) and Mistral's tokenizers. A model is recognised by the marks in its vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from conch.checkpoints.tokenizers.tokenizer import TextTokenizer

#: The marks before the prefix and the suffix, and after both; Mistral's models read the suffix first, and have no last
#: mark.
_MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("[PREFIX]", "[SUFFIX]", ""),
)
#: Other tokens that such models write at the end of the middle.
_ENDS: Final = ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<file_sep>", "▁<EOT>")
#: A text before the suffix for tokenizers of SentencePiece, which begin a text with a space.
_BEFORE: Final = "☺"


@dataclass(frozen=True, slots=True)
class Infilling:
    """The ids of the marks of a model; ``middle`` is None if nothing follows the prefix. ``ends`` end a completion."""

    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]

    def prompt(self, tokenizer: TextTokenizer, prefix: str | list[int], suffix: str) -> list[int]:
        """Return the prompt for the text between ``prefix``, a text or token ids, and ``suffix``.

        Raises INVALID_ARG for texts that cannot be tokenised.
        """
        before = tokenizer.encode(prefix, special_tokens=False) if isinstance(prefix, str) else prefix
        head = [id for id in tokenizer.encode("") if id not in tokenizer.special.eos_ids]
        lead = tokenizer.encode(_BEFORE, special_tokens=False)
        if lead and tokenizer.token(lead[0]).startswith("▁"):
            after = tokenizer.encode(_BEFORE + suffix, special_tokens=False)[len(lead) :]
        else:
            after = tokenizer.encode(suffix, special_tokens=False)
        if self.middle is None:
            return [*head, self.suffix, *after, self.prefix, *before]
        return [*head, self.prefix, *before, self.suffix, *after, self.middle]


def infilling(tokenizer: TextTokenizer) -> Infilling | None:
    """Return the marks in a vocabulary; None for a model that does not fill in the middle."""
    for marks in _MARKS:
        ids = [tokenizer.token_id(mark) for mark in marks if mark]
        if None in ids:
            continue
        prefix, suffix, *middle = [id for id in ids if id is not None]
        others = map(tokenizer.token_id, _ENDS)
        ends = dict.fromkeys([prefix, suffix, *middle, *(id for id in others if id is not None)])
        return Infilling(prefix, suffix, middle[0] if middle else None, tuple(ends))
    return None
