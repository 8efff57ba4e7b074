"""What stays of the texts of a pair is what the library keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from conch.checkpoints.tokenizers.fast import shares, truncated_lengths
from tests.unit.checkpoints.tokenizers.encoders import opened


def test_pairs_share_the_room_as_the_library_does(folder: Path) -> None:
    encoder = opened(folder)
    assert encoder.tokenizer.fast is not None
    reference = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    for first in (1, 3, 9, 24, 60):
        for second in (1, 4, 9, 25, 70):
            texts = [" ".join(["the"] * first), " ".join(["the"] * second)]
            one, two = (len(encoder.tokenizer.fast.encode(text, add_special_tokens=False).ids) for text in texts)
            for room in (4, 7, 20, 61):
                reference.enable_truncation(room + reference.num_special_tokens_to_add(True))
                kept = reference.encode(*texts)
                sequences = [
                    id for id, special in zip(kept.sequence_ids, kept.special_tokens_mask, strict=True) if not special
                ]
                assert shares(one, two, room) == (sequences.count(0), sequences.count(1))


@pytest.mark.parametrize(
    ("first", "second", "kept"), [(3, 4, (3, 4)), (9, 4, (6, 4)), (1, 9, (1, 9)), (9, 9, (1, 9)), (9, 10, None)]
)
def test_second_text_stays_whole_where_the_first_gives_way(
    first: int, second: int, kept: tuple[int, int] | None
) -> None:
    assert truncated_lengths(first, second, 10, "first") == kept
