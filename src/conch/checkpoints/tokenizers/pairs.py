"""Cutting texts and pairs to a length, as ``tokenizers`` and transformers do it.

Pure functions over encodings of ``tokenizers``, used by fast.py, where a text that is part of many pairs is tokenised
once: the library itself tokenises both texts of each pair.
"""

from __future__ import annotations

from typing import Any

from conch.checkpoints.tokenizers.tokenizer import Truncation


def kept_lengths(first: int, second: int, room: int, truncation: Truncation) -> tuple[int, int] | None:
    """How many tokens of the texts of a pair stay of ``first`` and ``second``; None where the second fills the room."""
    if truncation == "longest":
        return shares(first, second, room)
    if first + second <= room:
        return first, second
    return (room - second, second) if second < room else None


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of a pair stay when the longer one gives way first, as ``tokenizers`` does it."""
    if first + second <= room:
        return first, second
    room = max(room, 0)
    short, long = min(first, second), max(first, second)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (long, short) if first > second else (short, long)


def cut(encoding: Any, length: int, side: str) -> None:
    """Keep ``length`` tokens of ``encoding``, the last ones where ``side``, which is cut, is ``left``.

    By halves, since an encoding keeps what is cut off in pieces of the length that stays, and post-processing
    combines each piece of a text with each of its pair.
    """
    while len(encoding) > 2 * length > 0:
        encoding.truncate((len(encoding) + 1) // 2, direction=side)
    encoding.truncate(length, direction=side)


def shortened(fast: Any, encoding: Any, length: int, side: str) -> Any:
    """``encoding`` cut to ``length`` tokens, which itself stays as it is."""
    if len(encoding) <= length:
        return encoding
    copy = fast.post_process(encoding, None, False)
    cut(copy, length, side)
    return copy


def kept_offsets(whole: Any, special: list[int], side: str) -> list[tuple[int, int]]:
    """The offsets of what is left of a single text, of whose tokens ``special`` are not of the text.

    They are taken from the ``whole`` encoding: post-processing a second time has trimmed them twice.
    """
    offsets: list[tuple[int, int]] = whole.offsets
    if len(special) == len(whole):
        return offsets
    inner = [place for place, added in zip(offsets, whole.special_tokens_mask, strict=True) if not added]
    count = len(special) - sum(special)
    kept = iter(inner[:count] if side == "right" else inner[len(inner) - count :])
    return [(0, 0) if added else next(kept) for added in special]
