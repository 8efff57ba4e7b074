"""Computes the vectors of a GGUF file's tokens in float32, with numpy only: the reference for embeddings.

Source of BERT's network: llama.cpp's models/bert.cpp, which also has XLM-RoBERTa's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from conch.checkpoints.activations import ACTIVATIONS, softmax
from conch.checkpoints.gguf import Floats, GgufFile, type_name
from conch.checkpoints.gguf_reference import GgufReference
from conch.checkpoints.gguf_weights import GgufWeights, decodable
from conch.core.errors import invalid


def token_vectors(file: GgufFile, pool: ThreadPoolExecutor, ids: Sequence[int], limit: float = math.inf) -> Floats:
    """Return the output ``[tokens, width]`` of the last layer for a text.

    ``limit`` is the maximum processor time in seconds, as estimated after the first layer. Raises INVALID_ARG for a
    file that the reference cannot compute, or not in that time.
    """
    architecture = file.text("general.architecture")
    if architecture == "bert":
        return BertReference(file, pool).vectors(ids, limit)
    if not file.flag(f"{architecture}.attention.causal", True):
        raise invalid(f"there is no reference for architecture '{architecture}' with attention to later tokens")
    return GgufReference(file, pool).vectors(ids, limit)


class BertReference:
    """The encoder of a file of the architecture ``bert``; ``pool`` has the threads that compute."""

    def __init__(self, file: GgufFile, pool: ThreadPoolExecutor) -> None:
        for tensor in file.tensors.values():
            if not decodable(tensor.type):
                raise invalid(f"tensor '{tensor.name}' is of type {type_name(tensor.type)}, which is not decoded here")
        self._file, self._weights = file, GgufWeights(file, pool)
        self._width, self._heads = file.integer("bert.embedding_length"), file.integer("bert.attention.head_count")
        self._epsilon = np.float32(file.number("bert.attention.layer_norm_epsilon", 1e-12))

    def vectors(self, ids: Sequence[int], limit: float) -> Floats:
        weights, width = self._weights, self._width
        state = weights.rows("token_embd.weight", ids, width) + weights.rows(
            "position_embd.weight", range(len(ids)), width
        )
        if weights.has("token_types.weight"):
            state = state + weights.rows("token_types.weight", [0], width)
        state = self._norm("token_embd_norm", state)
        layers = self._file.integer("bert.block_count")
        for layer in range(layers):
            state = self._layer(f"blk.{layer}.", state)
            if layer == 0 and (seconds := weights.seconds * layers) > limit:
                raise invalid(f"it would take about {seconds:.0f} s of processor time")
        if unused := self._file.tensors.keys() - weights.used:
            raise invalid(f"the reference does not use tensor '{min(unused)}'")
        return state

    def _layer(self, block: str, state: Floats) -> Floats:
        heads = [
            self._linear(f"{block}attn_{name}", state, self._width).reshape(len(state), self._heads, -1).swapaxes(0, 1)
            for name in "qkv"
        ]
        queries, keys, values = heads
        scores = softmax(queries @ keys.swapaxes(1, 2) / np.float32(math.sqrt(queries.shape[-1])))
        mixed = (scores @ values).swapaxes(0, 1).reshape(state.shape)
        state = self._norm(f"{block}attn_output_norm", state + self._linear(f"{block}attn_output", mixed, self._width))
        inner = self._linear(f"{block}ffn_up", state, self._weights.shape(f"{block}ffn_up.weight")[0])
        inner = ACTIVATIONS["GELU"](inner).astype(np.float32)
        return self._norm(f"{block}layer_output_norm", state + self._linear(f"{block}ffn_down", inner, self._width))

    def _linear(self, name: str, inputs: Floats, rows: int) -> Floats:
        return self._weights.multiply(inputs, f"{name}.weight", rows) + self._weights.vector(f"{name}.bias", rows)

    def _norm(self, name: str, values: Floats) -> Floats:
        centred = values - values.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + self._epsilon)
        weight, bias = (self._weights.vector(f"{name}.{part}", values.shape[-1]) for part in ("weight", "bias"))
        normed: Floats = scaled * weight + bias
        return normed
