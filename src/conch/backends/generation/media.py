"""Images and recordings in prompts, processed by a processor of transformers for the engines.

A prompt has placeholder tokens in the place of an item. An engine computes features of the item, one for each
placeholder, and uses them in place of the embeddings of the placeholders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

#: The words of a digest: placeholders have the same token ids for all items, so keys of prefixes use the words instead.
_WORD: Final = 8
#: The default of parameter ``media_cache_bytes``.
CACHE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """An image or a recording, depending on ``kind``.

    ``digest`` identifies its content. ``arrays`` are the inputs of the network for a prompt with this item alone, by
    name, among them ``input_ids`` ``[1, tokens]``. ``replacement`` is the text that takes its place in a prompt, and
    ``tokens`` the number of placeholders in it.
    """

    kind: str
    digest: bytes
    arrays: Mapping[str, Any]
    replacement: str
    tokens: int

    @property
    def size(self) -> int:
        """The size of the arrays (bytes)."""
        return sum(int(array.nbytes) for array in self.arrays.values() if hasattr(array, "nbytes"))

    def words(self) -> list[int]:
        """Return the words of the digest as negative numbers, which cannot be token ids."""
        parts = (self.digest[start : start + _WORD] for start in range(0, len(self.digest), _WORD))
        return [-1 - (int.from_bytes(part, "little") >> 1) for part in parts]


class MediaPreparer(Protocol):
    """The part of an engine that reads images and recordings by itself."""

    @property
    def marks(self) -> Mapping[str, str]:
        """The texts of placeholders by kind."""

    @property
    def sample_rate(self) -> int:
        """The sample rate of recordings (Hz), 0 if it reads none."""

    def prepare(self, kind: str, digest: bytes, content: Any) -> MediaItem:
        """Return the item for an image of Pillow or the samples of a recording; any thread may call this.

        Its array ``tokens`` has the token ids of the item in a prompt, with words of the digest for placeholders.
        Raises INVALID_ARG for content that cannot be processed.
        """


@dataclass(frozen=True, slots=True)
class ProjectorSpec:
    """A file that makes vectors of images and recordings; ``cache_bytes`` limits the vectors that are kept."""

    path: Path
    cache_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class MediaSpec:
    """The media that a checkpoint reads.

    ``placeholders`` are the ids of placeholder tokens by kind of item. ``example`` is a prompt (token ids) with its
    items; ``arrays`` are the inputs of the network for the whole prompt, as transformers prepares them.
    ``cache_bytes`` limits the features that an engine keeps.
    """

    placeholders: Mapping[str, int]
    example: tuple[list[int], Sequence[MediaItem]]
    arrays: Mapping[str, Any]
    cache_bytes: int

    def places(self, prompt: Sequence[int], items: Sequence[MediaItem]) -> Iterator[tuple[MediaItem, list[int]]]:
        """Yield each item with the positions of its placeholders in a prompt (token ids).

        Items of a kind are in the order of the prompt, and have as many placeholders as the prompt.
        """
        for kind, placeholder in self.placeholders.items():
            positions = [position for position, token in enumerate(prompt) if token == placeholder]
            start = 0
            for item in items:
                if item.kind == kind:
                    yield item, positions[start : start + item.tokens]
                    start += item.tokens
