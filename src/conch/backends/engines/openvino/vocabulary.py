"""The token list of tokenizers in OpenVINO format, from which OpenVINO GenAI computes the masks of grammars.

The list must contain tokens as they appear in a text. The lists of SentencePiece and similar tokenizers have ``▁`` for
a space and ``<0x41>`` for a byte, so that GenAI would find no token for a space.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

#: The files of a tokenizer in OpenVINO format, next to the graph.
TOKENIZER: Final = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
_SPACE: Final = "▁".encode()
_BYTE: Final = re.compile(rb"<0x([0-9A-F]{2})>")


def misfit(folder: Path, vocabulary: int) -> str:
    """Return why the tokenizer in ``folder`` does not fit a network with ``vocabulary`` logits; empty if it fits.

    GenAI does not check this: with more tokens than logits, its masks write past the end of the logits.
    """
    import openvino
    import openvino_tokenizers  # noqa: F401  (registers its operators)

    core: Any = openvino.Core()
    try:
        tokens = _tokens(_decoder(core.read_model(folder / TOKENIZER[1])))
    except RuntimeError:
        return "OpenVINO's tokenizer cannot be read"
    if not tokens:
        return "OpenVINO's tokenizer has no list of tokens"
    if len(tokens) > vocabulary:
        return f"the tokenizer has {len(tokens)} tokens and the network only {vocabulary}"
    return "" if b" " in tokens else "OpenVINO's tokenizer has no token for a space"


def spell(detokenizer: Any) -> None:
    """Rewrite the token list of a detokenizer with plain spaces and bytes; decoding does not change."""
    node = _decoder(detokenizer)
    tokens = _tokens(node)
    if b" " in tokens or _SPACE not in tokens:
        return
    special = set(node.input_value(4).get_node().data.tolist()) if node.get_input_size() > 4 else set()
    _replace(node, [token if id in special else _spelt(token) for id, token in enumerate(tokens)])


def _spelt(token: bytes) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes.fromhex(byte[1].decode()) if byte else token.replace(_SPACE, b" ")


def _decoder(detokenizer: Any) -> Any:
    """Return the operator with the token list, or None in a detokenizer of another kind."""
    return next((node for node in detokenizer.get_ops() if node.get_type_name() == "VocabDecoder"), None)


def _tokens(node: Any) -> list[bytes]:
    inputs = [] if node is None else [node.input_value(place).get_node() for place in (1, 2, 3)]
    if not inputs or any(node.get_type_name() != "Constant" for node in inputs):
        return []
    begins, ends, content = (node.data for node in inputs)
    text = content.tobytes()
    return [text[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _replace(node: Any, tokens: Sequence[bytes]) -> None:
    from openvino import opset13

    ends = np.cumsum([len(token) for token in tokens], dtype=np.int32)
    begins = np.concatenate([np.zeros(1, np.int32), ends[:-1]])
    content = np.frombuffer(b"".join(tokens), np.uint8)
    for place, values in enumerate((begins, ends, content), start=1):
        node.input(place).replace_source_output(opset13.constant(values).output(0))
