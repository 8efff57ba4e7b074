"""The interface of decoders: a network that reads tokens of several sequences at once into a paged KV cache.

A decoder only computes. ``batcher.py`` assigns tokens of sequences to steps, ``kv_blocks.py`` assigns blocks of the
cache to sequences, and ``sampler.py`` chooses tokens from the logits. The engines ``openvino`` and ``llamacpp`` are
such a batcher with a decoder each.

All calls come from the engine's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from conch.backends.generation.lora import LoraWeights
from conch.backends.generation.media import MediaItem, MediaPreparer

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class MediaSpan:
    """The tokens ``start`` to ``end`` of a prompt, in whose place the decoder reads vectors of an image or a recording.

    They take ``positions`` positions, which may be fewer than tokens. ``content`` belongs to the decoder.
    """

    start: int
    end: int
    positions: int
    content: Any


@dataclass(slots=True)
class Chunk:
    """The next tokens of a sequence in a step.

    ``slot`` is the number of the sequence, ``start`` the number of its tokens in the KV cache, and ``tokens`` those
    that follow. The step returns the logits after each of the last ``wanted`` tokens: 0 for a prompt that continues in
    a later step, 1 to choose the next token, more to check proposed tokens. ``blocks`` are the blocks of the cache that
    hold the sequence with these tokens, in order. ``media`` are the spans of images and recordings among the tokens; a
    chunk never ends within one.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    wanted: int = 1
    blocks: Sequence[int] = field(default_factory=list)
    media: Sequence[MediaSpan] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SavedTokens:
    """A copy of the tokens of a slot outside the KV cache, ``size`` bytes large; ``content`` belongs to the decoder."""

    size: int
    content: Any


class Decoder(ABC):
    """A network and the memory of its KV cache.

    ``context`` is the maximum length of a sequence (tokens), ``vocabulary`` the number of logits, ``slots`` the number
    of sequences that the cache can tell apart, and ``blocks`` the size of the cache in blocks of ``block_tokens``
    tokens, each ``token_bytes`` large (0: unknown). ``batched_tokens`` is the maximum number of tokens in a step.
    ``precision`` is the data type of the computation for display. ``rewinds`` is whether a sequence can be shortened
    and its beginning shared; a network with a recurrent state cannot do either. ``retained_tokens`` is the maximum
    number of tokens of ended sequences in the cache, for a decoder whose steps take longer with more of them (None: as
    many as there is room for), and ``saved_bytes`` the maximum size of those that are saved outside the cache (0: the
    decoder saves none). ``adapters`` are the names of LoRA adapters. ``preparer`` prepares images and recordings, and
    ``shares_media`` is whether a sequence can be shortened within them. ``warnings`` are for the log.
    """

    block_tokens: ClassVar[int] = 32
    context: int
    vocabulary: int
    slots: int
    blocks: int
    batched_tokens: int
    token_bytes: int = 0
    precision: str = ""
    rewinds: bool = True
    retained_tokens: int | None = None
    saved_bytes: int = 0
    adapters: tuple[str, ...] = ()
    loads_adapters: ClassVar[bool] = False
    preparer: MediaPreparer | None = None
    shares_media: bool = False
    warnings: tuple[str, ...] = ()

    @abstractmethod
    def run(self, chunks: Sequence[Chunk], adapter: str = "") -> Logits:
        """Read the tokens of ``chunks``; each slot occurs at most once.

        Returns the logits ``[sum of wanted, vocabulary]`` in the order of ``chunks`` and tokens. The caller may
        overwrite them, and the next call may too. An exception means that the decoder is broken.
        """

    def media_spans(self, prompt: Sequence[int], items: Sequence[MediaItem]) -> list[MediaSpan]:
        """Return the places of ``items`` in a prompt (token ids), in order.

        Raises INVALID_ARG unless the prompt has the placeholders of all items, and text after them.
        """
        raise NotImplementedError

    def attach_adapter(self, key: str, adapter: LoraWeights) -> None:
        """Add an adapter, as an engine does; see ``GenerationEngine.attach_adapter``."""
        raise NotImplementedError

    def detach_adapter(self, key: str) -> None:
        """Free an adapter that no run uses any more."""
        raise NotImplementedError

    @abstractmethod
    def share(self, source: int, target: int, tokens: int, copied: tuple[int, int] | None) -> None:
        """Let the unused slot ``target`` begin with the first ``tokens`` tokens of ``source``, without computing them.

        ``copied`` has the block of ``source`` that holds the end of these tokens and the block of ``target`` that gets
        a copy; it is None if ``tokens`` fill whole blocks, which the slots share.
        """

    def holds(self, slot: int, tokens: int) -> bool:
        """Whether a sequence can continue after the first ``tokens`` tokens of a slot."""
        return True

    @abstractmethod
    def truncate(self, slot: int, tokens: int) -> None:
        """Keep only the first ``tokens`` tokens of a slot; 0 frees the slot."""

    def save(self, slot: int) -> SavedTokens | None:
        """Return a copy of the tokens of a slot for :meth:`restore`; None if that is not possible."""
        raise NotImplementedError

    def restore(self, slot: int, saved: SavedTokens, tokens: int, blocks: Sequence[int]) -> bool:
        """Copy the first ``tokens`` saved tokens to an unused slot, which has ``blocks``.

        Returns False if the decoder has no room, or if a sequence cannot continue after these tokens.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 (most decoders hold nothing but memory)
        """Free all resources."""
