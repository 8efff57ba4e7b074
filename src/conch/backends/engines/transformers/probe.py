"""Determines at load how the rows of a network can be batched, from its configuration and a trial run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import DynamicCache

from conch.backends.base.verification import tie_of
from conch.backends.engines.transformers.batch import OwnRows, PaddedRows
from conch.backends.engines.transformers.network import DecoderNetwork

Tensor = Any

_logger = logging.getLogger(__name__)

#: Rotary types whose frequencies depend on the longest row of a batch if it exceeds the original context.
_SHARED: Final = frozenset({"dynamic", "longrope"})
#: Cache layers that a padded layer can replace; the mask implements sliding windows.
_LAYERS: Final = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})
#: The lengths of the trial texts in tokens; padding also reveals the effects of windows of a few tokens.
_LENGTHS: Final = (10, 17, 5)
#: The number of distinct tokens in the trial texts. Repeated tokens reveal networks that choose among equal tokens by
#: position.
_DIFFERENT: Final = 6


@dataclass(frozen=True, slots=True)
class BatchSupport:
    """The batching that a network supports.

    ``padding``: rows of different lengths may share a batch. ``several_rows``: several rows may run alternately, each
    with its own state. ``beam_search``: the state of a row can be copied.
    """

    padding: bool
    several_rows: bool
    beam_search: bool


def probe_batch_support(network: DecoderNetwork, context: int) -> BatchSupport:
    """Determine how rows can be batched without changing their logits.

    ``context`` is the length limit of a row in tokens.
    """
    with torch.inference_mode():
        trial = _Trial(network)
        if _may_be_padded(network, context) and trial.holds(trial.together):
            return BatchSupport(padding=True, several_rows=True, beam_search=True)
        return BatchSupport(
            padding=False, several_rows=trial.holds(trial.alternating), beam_search=trial.holds(trial.copied)
        )


def _may_be_padded(network: DecoderNetwork, context: int) -> bool:
    config = network.model.config.get_text_config(decoder=True)
    if not network.cached or _stretched(config, context):
        return False
    try:
        return {type(layer).__name__ for layer in DynamicCache(config=config).layers} <= _LAYERS
    except Exception:
        return False


def _stretched(config: Any, context: int) -> bool:
    """Whether rotary frequencies may change with the length of a row."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    scalings = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for scaling in scalings:
        if scaling.get("rope_type", scaling.get("type")) in _SHARED:
            original = scaling.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            if context > (original or config.max_position_embeddings):
                return True
    return False


class _Trial:
    """Random texts with the logits of each text alone, and other ways to compute the same logits."""

    def __init__(self, network: DecoderNetwork) -> None:
        self._network = network
        vocabulary = int(network.model.config.get_text_config(decoder=True).vocab_size)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, vocabulary, (_DIFFERENT,), generator=generator)
        self._texts: list[list[int]] = [
            tokens[torch.randint(0, _DIFFERENT, (length + 2,), generator=generator)].tolist() for length in _LENGTHS
        ]
        self._alone = [self._steps(text, length) for text, length in self._prompts()]

    def holds(self, way: Callable[[], list[tuple[int, int, Tensor]]]) -> bool:
        """Whether ``way``, which returns (text, step, logits), computes the same logits as for each text alone."""
        tolerance = tie_of(self._network.model)
        try:
            for text, step, logits in way():
                expected = self._alone[text][step][0]
                bound = tolerance * max(float(expected.abs().max()), 1e-6)
                if not float((expected - logits).abs().max()) <= bound:
                    return False
        except Exception:
            _logger.debug("%s: %s", type(self._network.model).__name__, way.__name__, exc_info=True)
            return False
        return True

    def together(self) -> list[tuple[int, int, Tensor]]:
        """Compute two prompts in one batch, and a third in two chunks that then joins them."""
        early, late = PaddedRows(self._network), PaddedRows(self._network)
        first = early.feed([text[:length] for text, length in self._prompts()[:2]])
        late.feed([self._texts[2][:3]])
        steps = [torch.cat([first, late.feed([self._texts[2][3 : _LENGTHS[2]]])])]
        early.cache.adopt(late.cache)
        steps += [early.feed([[text[length + more]] for text, length in self._prompts()]) for more in (0, 1)]
        return [(text, step, logits[text]) for step, logits in enumerate(steps) for text in range(3)]

    def alternating(self) -> list[tuple[int, int, Tensor]]:
        """Compute the texts alternately, each with its own state."""
        rows = [OwnRows(self._network) for _ in self._texts]
        results = []
        for step in range(3):
            for index, (text, length) in enumerate(self._prompts()):
                new = text[:length] if step == 0 else [text[length + step - 1]]
                results.append((index, step, rows[index].feed([new])[0]))
        return results

    def copied(self) -> list[tuple[int, int, Tensor]]:
        """Compute two rows, then continue two copies of the second row."""
        [_, (text, length), *_] = self._prompts()
        rows = OwnRows(self._network)
        rows.feed([text[1 : length + 1], text[:length]])
        rows.select([1, 1])
        logits = rows.feed([[text[length]], [text[length]]])
        return [(1, 1, logits[0]), (1, 1, logits[1])]

    def _prompts(self) -> list[tuple[list[int], int]]:
        return list(zip(self._texts, _LENGTHS, strict=True))

    def _steps(self, text: list[int], length: int) -> list[Tensor]:
        rows = OwnRows(self._network)
        return [rows.feed([text[:length]]), rows.feed([[text[length]]]), rows.feed([[text[length + 1]]])]
