"""How long a text may be, in tokens: pure functions over what a checkpoint's small files say.

Used by folder.py when a checkpoint is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conch.errors import invalid

#: The maximum length where no file names one.
DEFAULT_MAX_LENGTH: Final = 512
#: Limits from here on mean that there is none: transformers writes 10^30.
_UNLIMITED: Final = 10**9
#: Families whose positions begin after that of the padding.
_AFTER_PADDING: Final = frozenset({
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "data2vec-text", "ibert", "luke",
    "mluke", "markuplm", "layoutlmv3", "lilt", "roberta-prelayernorm", "xmod", "esm", "phobert",
})  # fmt: skip
#: Families with relative positions, which take texts beyond those in their configuration.
_RELATIVE: Final = ("t5", "mt5", "umt5", "deberta-v2", "xlnet")
#: The names of the number of positions in config.json, in the order in which they count.
_POSITIONS: Final = ("max_encoder_position_embeddings", "max_position_embeddings", "n_positions", "max_seq_len")


def positions_of(config: Mapping[str, Any]) -> int:
    """How many tokens the network of a config.json has positions for; 0 where they are relative or unlimited."""
    inner = config.get("text_config")
    for document in (config, inner if isinstance(inner, dict) else {}):
        counts = [document[name] for name in _POSITIONS if isinstance(document.get(name), int) and document[name] > 0]
        if counts:
            offset = 0
            if document.get("model_type", config.get("model_type")) in _AFTER_PADDING:
                padding = document.get("pad_token_id")
                offset = (padding if isinstance(padding, int) else 1) + 1
            return max(1, int(counts[0]) - offset)
    return 0


def max_length_of(
    requested: int,
    config: Mapping[str, Any],
    positions: int,
    tokenizer_config: Mapping[str, Any],
    sentence_bert_config: Mapping[str, Any],
    *,
    generates: bool,
) -> int:
    """The tokens of the longest text: those ``requested`` (0: none are), or the least of what the files say.

    A model that ``generates`` text takes as many tokens as it has ``positions`` for.  Raises INVALID_ARG for more than
    those.
    """
    if requested:
        if positions and requested > positions and config.get("model_type") not in _RELATIVE:
            raise invalid(f"parameter 'max_length' is {requested}; the model has positions for {positions} tokens")
        return requested
    if generates:
        return positions or DEFAULT_MAX_LENGTH
    limits = (tokenizer_config.get("model_max_length"), sentence_bert_config.get("max_seq_length"), positions)
    return min(
        (int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < _UNLIMITED),
        default=DEFAULT_MAX_LENGTH,
    )
