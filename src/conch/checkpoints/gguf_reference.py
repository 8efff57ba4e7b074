"""The reference for engines: log-probabilities or vectors of a GGUF file's model in float32, with numpy only.

Weights are decoded a few rows at a time, so that the memory does not depend on the size of the model. Sources of the
networks: llama.cpp's llama-model.cpp and the modeling files of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from conch.checkpoints.activations import ACTIVATIONS
from conch.checkpoints.gguf import Floats, GgufFile, rope_scaling, type_name
from conch.checkpoints.gguf_retrieval import CLASSIFIER, PROJECTIONS
from conch.checkpoints.gguf_weights import GgufWeights, decodable
from conch.core.errors import invalid


@dataclass(frozen=True, slots=True)
class _Architecture:
    """The differences of an architecture from Llama, except those in its tensors and metadata.

    ``rotary`` defines which numbers of a head are rotated together: ``neighbours``, or the first ones of both
    ``halves``, and so on. ``activation`` is that of the feed-forward network; GELU has a variant with tanh.
    ``normalized_experts`` divides the weights of the chosen experts by their sum. With ``layer_norm``, norms subtract
    the mean. The tokens of a model that is not ``causal`` attend to later ones.
    """

    rotary: Literal["neighbours", "halves"] = "halves"
    activation: Literal["SiLU", "GELU", "tanh"] = "SiLU"
    normalized_experts: bool = True
    #: Of so many layers, the last one has no rotary positions.
    position_period: int = 0
    #: Of so many layers, the last one, or the first, has no sliding window; the others have their own rotary base.
    window_period: int = 0
    first_is_full: bool = False
    layer_norm: bool = False
    causal: bool = True
    #: Embeddings are multiplied by the square root of their width.
    scaled_embeddings: bool = False
    #: With so many layers, queries are scaled by the width per head and not by the size of a head.
    wide_layers: int = 0


_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "llama": _Architecture("neighbours"),
    "granite": _Architecture("neighbours"),
    "smollm3": _Architecture("neighbours", position_period=4),
    "qwen2": _Architecture(),
    "qwen2moe": _Architecture(normalized_experts=False),
    "qwen3": _Architecture(),
    "qwen3moe": _Architecture(),
    "phi3": _Architecture(),
    "olmo2": _Architecture(),
    "gemma": _Architecture(activation="tanh", scaled_embeddings=True),
    "gemma2": _Architecture(activation="tanh", scaled_embeddings=True, wide_layers=46),
    "gemma3": _Architecture(activation="tanh", scaled_embeddings=True, wide_layers=62, window_period=6),
    "gemma-embedding": _Architecture(activation="tanh", scaled_embeddings=True, window_period=6, causal=False),
    "eurobert": _Architecture(causal=False),
    "modern-bert": _Architecture(activation="GELU", window_period=3, first_is_full=True, layer_norm=True, causal=False),
}
#: The default rotary base of layers with a sliding window.
_WINDOW_BASE: Final = 10000.0


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The log-probability of a token, and those of the most likely token at its position."""

    token: int
    logprob: float
    best: int
    best_logprob: float


class GgufReference:
    """The model of a file; ``pool`` has the threads that compute.

    All methods raise INVALID_ARG for a file that the reference cannot compute: with an unknown architecture or type,
    with missing or additional tensors, or with tensors of other shapes.
    """

    def __init__(self, file: GgufFile, pool: ThreadPoolExecutor) -> None:
        self._file, self._name = file, file.text("general.architecture")
        if self._name not in _ARCHITECTURES:
            raise invalid(f"there is no reference for architecture '{self._name}'")
        scaling, self._rotary_factor = rope_scaling(file)
        if scaling not in ("none", "linear"):
            raise invalid(f"there is no reference for a scaling of rotary frequencies of type '{scaling}'")
        for tensor in file.tensors.values():
            if not decodable(tensor.type):
                raise invalid(
                    f"tensor '{tensor.name}' is of type {type_name(tensor.type)}, which the check does not decode"
                )
        self._architecture = _ARCHITECTURES[self._name]
        self._weights = GgufWeights(file, pool)
        self._width = self._size("embedding_length")
        self._heads = self._size("attention.head_count")
        self._key_heads = self._size("attention.head_count_kv", self._heads)
        self._head_size = self._size("attention.key_length", self._width // self._heads)
        self._pairs = self._size("rope.dimension_count", self._head_size) // 2
        if self._size("attention.value_length", self._head_size) != self._head_size or self._heads % self._key_heads:
            raise invalid("there is no reference for values whose size differs from that of the keys")
        if not 2 <= 2 * self._pairs <= self._head_size:
            raise invalid(f"there is no reference for {2 * self._pairs} rotary positions in {self._head_size} numbers")
        self._vocabulary, *_ = self._weights.shape("token_embd.weight") or (0,)
        self._causal = file.flag(f"{self._name}.attention.causal", self._architecture.causal)
        norm = "layer_norm" if self._architecture.layer_norm else "layer_norm_rms"
        self._epsilon = self._number(f"attention.{norm}_epsilon", 1e-5)
        self._window = self._size("attention.sliding_window", 0)
        self._residual_scale = np.float32(self._number("residual_scale", 1.0))

    def score(self, sequences: Sequence[tuple[Sequence[int], int]], limit: float = math.inf) -> list[list[TokenScores]]:
        """Return the scores of the last tokens of ``sequences``: pairs of token ids and a number of last tokens.

        ``limit`` is the maximum processor time in seconds. If the first layer shows that the computation takes longer,
        raises INVALID_ARG.
        """
        lengths = [len(ids) - 1 for ids, _ in sequences]  # The last token is only scored.
        if not self._causal:
            raise invalid("there is no reference for text of a model with attention to later tokens")
        if (greatest := max(max(ids) for ids, _ in sequences)) >= self._vocabulary:
            raise invalid(f"it has no token {greatest}")
        ends = np.cumsum(lengths).tolist()
        spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        scored = [row for end, (_, count) in zip(ends, sequences, strict=True) for row in range(end - count, end)]
        with np.errstate(all="ignore"):
            state = self._states([id for ids, _ in sequences for id in ids[:-1]], spans, limit)
            logits = self._logits(self._norm("output_norm", state[scored]))
            if unused := self._file.tensors.keys() - self._weights.used:
                raise invalid(f"the reference does not use tensor '{min(unused)}'")
            return _scores(logits, [ids[-count:] for ids, count in sequences])

    def vectors(self, ids: Sequence[int], limit: float = math.inf) -> Floats:
        """Return the normalised output ``[tokens, width]`` of the last layer for a text; see :meth:`score`.

        The file may have the layers of a classifier, which are not used.
        """
        if (greatest := max(ids)) >= self._vocabulary:
            raise invalid(f"it has no token {greatest}")
        with np.errstate(all="ignore"):
            vectors = self._norm("output_norm", self._states(ids, [slice(0, len(ids))], limit))
            for name in PROJECTIONS:
                if self._weights.has(f"{name}.weight"):
                    vectors = self._linear(name, vectors, self._weights.shape(f"{name}.weight")[0])
        unused = self._file.tensors.keys() - self._weights.used - {"output.weight"}
        if unused := {name for name in unused if not name.startswith(CLASSIFIER)}:
            raise invalid(f"the reference does not use tensor '{min(unused)}'")
        return vectors

    def _states(self, ids: Sequence[int], spans: Sequence[slice], limit: float) -> Floats:
        """Return the output ``[tokens, width]`` of the last layer for the tokens of all sequences."""
        # A window of a model that is not causal has half of its tokens before the middle.
        window = self._window if self._causal else self._window // 2
        if 0 < window < max(span.stop - span.start for span in spans):
            raise invalid(f"there is no reference for a text longer than the sliding window of {window} tokens")
        state = self._weights.rows("token_embd.weight", ids, self._width)
        state = self._norm("token_embd_norm", state * np.float32(self._embedding_scale()))
        for layer in range(self._size("block_count")):
            state = self._layer(layer, state, spans)
            if layer == 0 and (seconds := self._total_seconds()) > limit:
                raise invalid(f"it would take about {seconds:.0f} s of processor time")
        return state

    def _embedding_scale(self) -> float:
        return math.sqrt(self._width) if self._architecture.scaled_embeddings else self._number("embedding_scale", 1.0)

    def _total_seconds(self) -> float:
        """Estimate the time for all layers and the logits after the first layer."""
        sizes = {name: tensor.size for name, tensor in self._file.tensors.items()}
        first = sum(size for name, size in sizes.items() if name.startswith("blk.0."))
        return self._weights.seconds * sum(sizes.values()) / max(first, 1)

    def _layer(self, layer: int, state: Floats, spans: Sequence[slice]) -> Floats:
        block = f"blk.{layer}."
        output = self._attention(block, layer, self._norm(f"{block}attn_norm", state), spans)
        state = state + self._residual_scale * self._norm(f"{block}post_attention_norm", output)
        inputs = self._norm(f"{block}ffn_norm", state)
        routed = self._weights.has(f"{block}ffn_gate_inp.weight")
        output = self._experts(block, inputs) if routed else self._ffn(block, inputs)
        return state + self._residual_scale * self._norm(f"{block}post_ffw_norm", output)

    def _norm(self, name: str, values: Floats) -> Floats:
        """Divide vectors by the root of their mean square; returns them unchanged if the file has no such tensor."""
        if not self._weights.has(f"{name}.weight"):
            return values
        if self._architecture.layer_norm:
            values = values - values.mean(-1, keepdims=True)
        weights = self._weights.vector(f"{name}.weight", values.shape[-1])
        squares = np.mean(np.square(values), axis=-1, keepdims=True)
        normed: Floats = values / np.sqrt(squares + np.float32(self._epsilon)) * weights
        return normed

    def _linear(self, name: str, inputs: Floats, rows: int) -> Floats:
        outputs = self._weights.multiply(inputs, f"{name}.weight", rows)
        if self._weights.has(f"{name}.bias"):
            outputs += self._weights.vector(f"{name}.bias", rows)
        return outputs

    def _attention(self, block: str, layer: int, inputs: Floats, spans: Sequence[slice]) -> Floats:
        size, counts = self._head_size, (self._heads, self._key_heads, self._key_heads)
        if self._weights.has(f"{block}attn_qkv.weight"):
            fused = self._linear(f"{block}attn_qkv", inputs, sum(counts) * size)
            parts = np.split(fused, [counts[0] * size, (counts[0] + counts[1]) * size], -1)
        else:
            parts = [
                self._linear(f"{block}attn_{part}", inputs, count * size)
                for part, count in zip("qkv", counts, strict=True)
            ]
        queries = self._heads_normed(f"{block}attn_q_norm", parts[0])
        keys = self._heads_normed(f"{block}attn_k_norm", parts[1])
        values = parts[2].reshape(len(inputs), self._key_heads, size)
        scale = self._number("attention.scale", 0.0) or 1 / math.sqrt(self._query_size())
        outputs = np.empty((len(inputs), self._heads * size), np.float32)
        for span in spans:
            rotation = self._rotation(layer, span.stop - span.start)
            query, key = self._rotate(queries[span], rotation), self._rotate(keys[span], rotation)
            outputs[span] = self._attend(query * np.float32(scale), key, values[span])
        return self._linear(f"{block}attn_output", outputs, self._width)

    def _query_size(self) -> int:
        wide = self._architecture.wide_layers and self._size("block_count") == self._architecture.wide_layers
        return self._width // self._heads if wide else self._head_size

    def _heads_normed(self, name: str, values: Floats) -> Floats:
        """Apply a norm to each head, or to all heads at once, depending on the length of its weights."""
        heads = values.reshape(len(values), -1, self._head_size)
        if not self._weights.has(f"{name}.weight"):
            return heads
        whole = self._weights.shape(f"{name}.weight") == values.shape[-1:]
        return self._norm(name, values).reshape(heads.shape) if whole else self._norm(name, heads)

    def _rotation(self, layer: int, length: int) -> tuple[Floats, Floats] | None:
        """Return cosines and sines ``[length, 1, pairs]`` of a layer's rotary positions; None if it has none."""
        position_period = self._architecture.position_period
        if position_period and layer % position_period == position_period - 1:
            return None
        base, factor = self._number("rope.freq_base", 10000.0), self._rotary_factor
        if self._has_window(layer):
            base, factor = self._number("rope.freq_base_swa", _WINDOW_BASE), 1.0
        frequencies = base ** -(np.arange(self._pairs) / self._pairs) / factor
        if self._weights.has("rope_freqs.weight"):
            frequencies = frequencies / self._weights.vector("rope_freqs.weight", self._pairs)
        angles = np.arange(length)[:, None, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def _has_window(self, layer: int) -> bool:
        """Whether a layer has a sliding window, with its own rotary base."""
        period: Any = self._architecture.window_period
        if not period or not self._window:
            return False
        period = self._file.metadata.get(f"{self._name}.attention.sliding_window_pattern", period)
        if isinstance(period, np.ndarray):  # a truth value for each layer
            return layer < len(period) and bool(period[layer])
        if type(period) is not int or period < 1:
            raise invalid(f"{self._name}.attention.sliding_window_pattern is {period}")
        return layer % period != (0 if self._architecture.first_is_full else period - 1)

    def _rotate(self, heads: Floats, rotation: tuple[Floats, Floats] | None) -> Floats:
        if rotation is None:
            return heads
        (cosines, sines), pairs = rotation, self._pairs
        rotated = heads.copy()
        if self._architecture.rotary == "neighbours":
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        else:
            first, second = slice(pairs), slice(pairs, 2 * pairs)
        rotated[..., first] = heads[..., first] * cosines - heads[..., second] * sines
        rotated[..., second] = heads[..., first] * sines + heads[..., second] * cosines
        return rotated

    def _attend(self, queries: Floats, keys: Floats, values: Floats) -> Floats:
        """Return the attention outputs ``[tokens, heads * size]`` of a sequence."""
        tokens, group = len(queries), self._heads // self._key_heads
        grouped = queries.reshape(tokens, self._key_heads, group, -1).transpose(1, 2, 0, 3)
        weights = grouped @ keys.transpose(1, 2, 0)[:, None]
        weights = _capped(weights, self._number("attn_logit_softcapping", 0.0))
        if self._causal:
            weights += np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)
        outputs = _softmax(weights) @ values.transpose(1, 0, 2)[:, None]
        result: Floats = outputs.transpose(2, 0, 1, 3).reshape(tokens, -1)
        return result

    def _ffn(self, block: str, inputs: Floats, expert: str = "", size: int = 0) -> Floats:
        """Compute a feed-forward network; ``expert`` ends the names of its tensors."""
        size = size or self._size("feed_forward_length")
        if self._weights.has(f"{block}ffn_gate{expert}.weight"):
            gate = self._linear(f"{block}ffn_gate{expert}", inputs, size)
            up = self._linear(f"{block}ffn_up{expert}", inputs, size)
        else:
            gate, up = np.split(self._linear(f"{block}ffn_up{expert}", inputs, 2 * size), 2, -1)
        return self._linear(f"{block}ffn_down{expert}", self._activation(gate) * up, self._width)

    def _experts(self, block: str, inputs: Floats) -> Floats:
        """Compute the experts that each token chooses, and the one that all tokens share."""
        count, chosen = self._size("expert_count"), self._size("expert_used_count")
        size = self._size("expert_feed_forward_length", self._size("feed_forward_length"))
        weights = _softmax(self._linear(f"{block}ffn_gate_inp", inputs, count))
        order = np.argsort(-weights, -1, kind="stable")[:, :chosen]
        if self._architecture.normalized_experts:
            weights /= np.take_along_axis(weights, order, -1).sum(-1, keepdims=True)
        outputs = np.zeros_like(inputs)
        for expert in np.unique(order).tolist():
            tokens = np.flatnonzero((order == expert).any(-1))
            gate = self._weights.multiply(inputs[tokens], f"{block}ffn_gate_exps.weight", size, expert)
            up = self._weights.multiply(inputs[tokens], f"{block}ffn_up_exps.weight", size, expert)
            inner = self._activation(gate) * up
            output = self._weights.multiply(inner, f"{block}ffn_down_exps.weight", self._width, expert)
            outputs[tokens] += output * weights[tokens, expert, None]
        if self._weights.has(f"{block}ffn_gate_inp_shexp.weight"):
            gate = inputs @ self._weights.vector(f"{block}ffn_gate_inp_shexp.weight", self._width)
            shared = self._ffn(block, inputs, "_shexp", self._size("expert_shared_feed_forward_length"))
            outputs += shared / (1 + np.exp(-gate))[:, None]
        return outputs

    def _activation(self, values: Floats) -> Floats:
        activated: Floats
        activation = self._architecture.activation
        if activation == "GELU" and self._file.text(f"{self._name}.hidden_activation") not in ("silu", "swiglu"):
            activated = ACTIVATIONS["GELU"](values).astype(np.float32)
        elif activation == "tanh":
            inner = np.float32(math.sqrt(2 / math.pi)) * (values + np.float32(0.044715) * values**3)
            activated = np.float32(0.5) * values * (1 + np.tanh(inner))
        else:
            activated = values / (1 + np.exp(-values))
        return activated

    def _logits(self, state: Floats) -> Floats:
        name = "output" if self._weights.has("output.weight") else "token_embd"
        logits = self._linear(name, state, self._vocabulary)
        logits /= np.float32(self._number("logit_scale", 1.0))
        return _capped(logits, self._number("final_logit_softcapping", 0.0))

    def _size(self, key: str, default: int = -1) -> int:
        """Return a positive number of the metadata, or ``default``."""
        value = self._file.integer(f"{self._name}.{key}", default)
        if value < 1 and value != default:
            raise invalid(f"{self._name}.{key} is {value}")
        if value == -1:
            raise invalid(f"{self._name}.{key} is missing")
        return value

    def _number(self, key: str, default: float) -> float:
        return self._file.number(f"{self._name}.{key}", default)


def _capped(values: Floats, cap: float) -> Floats:
    return np.float32(cap) * np.tanh(values / np.float32(cap)) if cap else values


def _softmax(values: Floats) -> Floats:
    exponentials = np.exp(values - values.max(-1, keepdims=True))
    result: Floats = exponentials / exponentials.sum(-1, keepdims=True)
    return result


def _scores(logits: Floats, sequences: Sequence[Sequence[int]]) -> list[list[TokenScores]]:
    """Return the scores of ``sequences`` of tokens, one after the other in ``logits``."""
    greatest = logits.max(-1)
    totals = greatest + np.log(np.exp(logits - greatest[:, None]).sum(-1))
    best = logits.argmax(-1)
    rows = iter(range(len(logits)))
    return [
        [
            TokenScores(
                token, float(logits[row, token] - totals[row]), int(best[row]), float(greatest[row] - totals[row])
            )
            for token, row in zip(tokens, rows, strict=False)
        ]
        for tokens in sequences
    ]
