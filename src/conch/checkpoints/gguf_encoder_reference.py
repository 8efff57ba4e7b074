"""Computes the vectors of a GGUF file's tokens in float32, with numpy only, and the outputs of its classifier.

They are the reference for embedding models and rerankers. Sources of the networks: llama.cpp's models/bert.cpp, which
also has XLM-RoBERTa's, and ``build_pooling`` of its llama-graph.cpp for classifiers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from conch.checkpoints.activations import ACTIVATIONS, softmax
from conch.checkpoints.gguf import Floats, GgufFile, rope_scaling, type_name
from conch.checkpoints.gguf_reference import GgufReference
from conch.checkpoints.gguf_retrieval import CLASSIFIER, ENCODERS, answers_yes_or_no
from conch.checkpoints.gguf_weights import GgufWeights, decodable
from conch.core.errors import invalid


@dataclass(frozen=True, slots=True)
class _EncoderArchitecture:
    """The differences of an encoder from BERT.

    A ``rotary`` encoder rotates queries and keys in place of adding positions. The feed-forward network of a ``gated``
    one has a gate with SiLU.
    """

    rotary: bool = False
    gated: bool = False


_ENCODERS: Final[Mapping[str, _EncoderArchitecture]] = {
    "bert": _EncoderArchitecture(),
    "nomic-bert": _EncoderArchitecture(rotary=True, gated=True),
    "jina-bert-v3": _EncoderArchitecture(rotary=True),
}


def token_vectors(file: GgufFile, pool: ThreadPoolExecutor, ids: Sequence[int], limit: float = math.inf) -> Floats:
    """Return the output ``[tokens, width]`` of the last layer for a text.

    ``limit`` is the maximum processor time in seconds, as estimated after the first layer. Raises INVALID_ARG for a
    file that the reference cannot compute, or not in that time.
    """
    architecture = file.text("general.architecture")
    if architecture in _ENCODERS:
        return EncoderReference(file, pool).vectors(ids, limit)
    return GgufReference(file, pool).vectors(ids, limit)


def class_outputs(file: GgufFile, pool: ThreadPoolExecutor, vectors: Floats) -> Floats:
    """Return the outputs ``[classes]`` of a reranker's classifier for the ``vectors`` ``[tokens, width]`` of a text.

    They are logits, or the logarithms of the probabilities of "yes" and "no". Raises INVALID_ARG for a classifier that
    the reference cannot compute.
    """
    weights, architecture = GgufWeights(file, pool), file.text("general.architecture")
    if architecture == "modern-bert":
        raise invalid("there is no reference for the classifier of architecture 'modern-bert'")
    if not weights.has("cls.output.weight"):
        raise invalid("there is no reference for a classifier without 'cls.output.weight'")
    # A decoder's last token has read the whole text.
    state = vectors[:1] if architecture in ENCODERS else vectors[-1:]
    if weights.has("cls.weight"):
        state = np.tanh(_linear(weights, "cls", state, state.shape[1]))
    outputs: Floats = _linear(weights, "cls.output", state, weights.shape("cls.output.weight")[0])[0]
    if unused := {name for name in file.tensors if name.startswith(CLASSIFIER)} - weights.used:
        raise invalid(f"the reference does not use tensor '{min(unused)}'")
    return outputs - np.logaddexp.reduce(outputs) if answers_yes_or_no(file) else outputs


def _linear(weights: GgufWeights, name: str, inputs: Floats, rows: int) -> Floats:
    outputs = weights.multiply(inputs, f"{name}.weight", rows)
    return outputs + weights.vector(f"{name}.bias", rows) if weights.has(f"{name}.bias") else outputs


class EncoderReference:
    """The encoder of a file of an architecture in ``_ENCODERS``; ``pool`` has the threads that compute."""

    def __init__(self, file: GgufFile, pool: ThreadPoolExecutor) -> None:
        for tensor in file.tensors.values():
            if not decodable(tensor.type):
                raise invalid(
                    f"tensor '{tensor.name}' is of type {type_name(tensor.type)}, which the check does not decode"
                )
        name = file.text("general.architecture")
        self._file, self._name, self._encoder = file, name, _ENCODERS[name]
        self._weights = GgufWeights(file, pool)
        self._width = file.integer(f"{name}.embedding_length")
        self._heads = file.integer(f"{name}.attention.head_count")
        self._epsilon = np.float32(file.number(f"{name}.attention.layer_norm_epsilon", 1e-12))
        if self._heads < 1 or self._width % self._heads:
            raise invalid(f"{name}.attention.head_count is {self._heads}, and the width is {self._width}")
        size = self._width // self._heads
        if self._encoder.rotary and (
            rope_scaling(file)[0] != "none" or file.integer(f"{name}.rope.dimension_count", size) != size
        ):
            raise invalid("there is no reference for an encoder with scaled or partial rotary positions")

    def vectors(self, ids: Sequence[int], limit: float) -> Floats:
        weights, width = self._weights, self._width
        state = weights.rows("token_embd.weight", ids, width)
        if not self._encoder.rotary:
            state = state + weights.rows("position_embd.weight", range(len(ids)), width)
        if weights.has("token_types.weight"):
            state = state + weights.rows("token_types.weight", [0], width)
        state = self._norm("token_embd_norm", state)
        layers = self._file.integer(f"{self._name}.block_count")
        for layer in range(layers):
            state = self._layer(f"blk.{layer}.", state)
            if layer == 0 and (seconds := weights.seconds * layers) > limit:
                raise invalid(f"it would take about {seconds:.0f} s of processor time")
        if unused := {name for name in self._file.tensors if not name.startswith(CLASSIFIER)} - weights.used:
            raise invalid(f"the reference does not use tensor '{min(unused)}'")
        return state

    def _layer(self, block: str, state: Floats) -> Floats:
        weights = self._weights
        if weights.has(f"{block}attn_qkv.weight"):
            parts = np.split(_linear(weights, f"{block}attn_qkv", state, 3 * self._width), 3, -1)
        else:
            parts = [_linear(weights, f"{block}attn_{part}", state, self._width) for part in "qkv"]
        queries, keys, values = (part.reshape(len(state), self._heads, -1).swapaxes(0, 1) for part in parts)
        if self._encoder.rotary:
            queries, keys = self._rotated(queries), self._rotated(keys)
        scores = softmax(queries @ keys.swapaxes(1, 2) / np.float32(math.sqrt(queries.shape[-1])))
        mixed = (scores @ values).swapaxes(0, 1).reshape(state.shape)
        state = self._norm(
            f"{block}attn_output_norm", state + _linear(weights, f"{block}attn_output", mixed, self._width)
        )
        size = weights.shape(f"{block}ffn_up.weight")[0]
        inner = _linear(weights, f"{block}ffn_up", state, size)
        if self._encoder.gated:
            inner = inner * ACTIVATIONS["SiLU"](_linear(weights, f"{block}ffn_gate", state, size))
        else:
            inner = ACTIVATIONS["GELU"](inner).astype(np.float32)
        return self._norm(f"{block}layer_output_norm", state + _linear(weights, f"{block}ffn_down", inner, self._width))

    def _rotated(self, heads: Floats) -> Floats:
        """Rotate the halves of ``[heads, tokens, size]`` by their positions."""
        half = heads.shape[-1] // 2
        base = self._file.number(f"{self._name}.rope.freq_base", 10000.0)
        angles = np.arange(heads.shape[1])[:, None] * base ** -(np.arange(half) / half)
        cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = heads[..., :half], heads[..., half:]
        return np.concatenate([first * cosines - second * sines, first * sines + second * cosines], -1)

    def _norm(self, name: str, values: Floats) -> Floats:
        centred = values - values.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + self._epsilon)
        weight, bias = (self._weights.vector(f"{name}.{part}", values.shape[-1]) for part in ("weight", "bias"))
        normed: Floats = scaled * weight + bias
        return normed
