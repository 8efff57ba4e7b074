"""A network with the modules of sentence-transformers after it, in torch, so that the exported graph contains both.

Outputs are ``sentence_embedding`` FP32 ``[n, size]`` of a dense or sparse model, ``token_vectors`` FP32
``[n, length, size]`` of a multi-vector model, and both with ``token_weights`` FP32 ``[n, length]`` of a model with the
heads of BGE-M3. Graphs of dense models also return ``last_hidden_state``, which requests may name.
Which of the token vectors count is decided outside of the graph, because it depends on the task.

Texts must be padded at the end, as conch pads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from conch.backends.tasks.engines import POOLED, TOKEN_VECTORS, TOKEN_WEIGHTS
from conch.backends.tasks.retrieval.pipeline import HIDDEN, gives_layers, output_of
from conch.checkpoints.activations import activation_named
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.heads import read_heads
from conch.checkpoints.modules import (
    DENSE,
    MULTI_VECTOR,
    SENTENCE,
    TOKENS,
    EmbeddingModel,
    Module,
    divided_for_graph,
    includes_prompt,
)
from conch.checkpoints.pooling import splade_settings
from conch.checkpoints.steps import LAYERS, MASK, activation_of, read_weights, weight_named
from conch.core.errors import unsupported

#: The number of words whose logits a graph computes at a time, and the maximum number of such parts. The logits of all
#: words at all positions are the largest tensor of a sparse model by far.
WORDS: Final = 4096
MOST_PARTS: Final = 16

#: The features of a batch by name, as tensors.
Features = dict[str, Any]
Step = Callable[[Features], None]


def tails(model: EmbeddingModel, network: Module) -> list[tuple[Module, ...]]:
    """Return the different lists of modules that follow ``network`` in ``model``."""
    paths = [model.path_of(task) for task in model.tasks]
    different: list[tuple[Module, ...]] = []
    for first, *others in paths:
        if first is network and tuple(others) not in different:
            different.append(tuple(others))
    return different


def contained(model: EmbeddingModel, network: Module) -> tuple[Module, ...] | None:
    """Return the modules that a graph of ``network`` can contain, of those that follow; None if it contains none.

    Modules that differ between tasks stay outside of the graph, as does pooling without the tokens of the prompt,
    because only the server has their number.
    """
    followers = tails(model, network)
    if len(followers) > 1 or not all(includes_prompt(module) for module in followers[0] if module.kind == "Pooling"):
        return None
    kinds = [module.kind for module in followers[0]]
    masks = kinds.index("MultiVectorMask") if "MultiVectorMask" in kinds else len(kinds)
    return divided_for_graph(followers[0])[0] if "Pooling" not in kinds[masks:] else None


def outputs_of(model: EmbeddingModel, first: Module) -> tuple[str, ...]:
    """Return the outputs of the network of the Transformer module ``first`` with all modules after it."""
    if model.family != DENSE:
        return (TOKEN_VECTORS,) if model.family == MULTI_VECTOR else (POOLED,)
    hidden = (HIDDEN[0],) if output_of(first) == HIDDEN[0] else ()
    return (POOLED, *hidden, *((TOKEN_WEIGHTS, TOKEN_VECTORS) if model.heads else ()))


def with_modules(
    network: Any, checkpoint: Checkpoint, part: Checkpoint, model: EmbeddingModel, first: Module, rest: Sequence[Module]
) -> Any:
    """Return a ``torch.nn.Module`` of ``network`` and ``rest``; its outputs are a mapping with :func:`outputs_of`.

    ``part`` is the checkpoint in the folder of the Transformer module ``first``.
    """
    import torch

    functional = torch.nn.functional
    layers = any(module.kind == "WeightedLayerPooling" for module in rest) and gives_layers(part, first)
    words = SplitVocabulary(network, rest[0]) if rest and rest[0].kind == "SpladePooling" else None
    steps = [
        step
        for module in (rest[1:] if words is not None and words.splits else rest)
        if module.kind != "Dropout"
        for step in [_step(checkpoint, module)]
    ]
    heads = [tuple(map(_tensor, head)) for head in read_heads(checkpoint)] if model.heads else []

    class NetworkWithModules(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network
            self.config = network.config

        def forward(self, return_dict: bool = True, **arrays: Any) -> dict[str, Any]:
            features: Features = {name: arrays[name] for name in (MASK,) if name in arrays}
            if words is not None and words.splits:
                features[SENTENCE] = words(arrays)
            else:
                given = {"output_hidden_states": True} if layers else {}
                outputs = self.network(**arrays, **given, return_dict=True)
                features[first.target] = outputs[output_of(first)]
                if layers:
                    features[LAYERS] = torch.stack(tuple(outputs["hidden_states"]), 1)
            hidden = features.get(first.target)
            for step in steps:
                step(features)
            if model.family == MULTI_VECTOR:
                return {TOKEN_VECTORS: features[TOKENS]}
            vectors = features[SENTENCE]
            if model.family == DENSE and model.truncate_dim:
                vectors = vectors[:, : model.truncate_dim]
            pooled = {POOLED: functional.normalize(vectors, dim=-1) if model.normalize else vectors}
            if HIDDEN[0] in outputs_of(model, first):
                pooled[HIDDEN[0]] = hidden
            if not heads:
                return pooled
            weights, token_vectors = (hidden @ weight + bias for weight, bias in heads)
            return {
                **pooled,
                TOKEN_WEIGHTS: torch.relu(weights)[..., 0],
                TOKEN_VECTORS: functional.normalize(token_vectors, dim=-1),
            }

    return NetworkWithModules().eval()


class SplitVocabulary:
    """Pools the logits of a masked language model by the SpladePooling ``module``, for some words at a time.

    ``splits`` is false for a network whose last layer is not linear, or computes something else from the pooled logits.
    """

    def __init__(self, network: Any, module: Module) -> None:
        import torch

        self._torch = torch
        self._network = network
        self._strategy, self._twice = splade_settings(module)
        self._mask: Any = None
        last = network.get_output_embeddings()
        self.splits = isinstance(last, torch.nn.Linear)
        if self.splits:
            size = max(WORDS, -(-last.out_features // MOST_PARTS))
            self._last = last
            # Separate matrices: a part of a larger one would be cut out at every run.
            self._parts = [part.t().contiguous() for part in last.weight.detach().split(size)]
            self._biases = [None] * len(self._parts) if last.bias is None else last.bias.detach().split(size)
            self.splits = self._agrees()

    def __call__(self, arrays: Mapping[str, Any]) -> Any:
        """Return ``[n, vocabulary]`` for the network's inputs."""
        self._mask, whole = arrays[MASK], self._last.forward
        self._last.forward = self._pooled
        try:
            return self._network(**arrays, return_dict=True).logits[:, 0]
        finally:
            self._last.forward = whole

    def _pooled(self, hidden: Any) -> Any:
        torch = self._torch
        real = self._mask[:, :, None] > 0
        if self._strategy == "max":
            # Padding repeats the first token, which does not change the maximum. The bias is the same at all positions.
            hidden = torch.where(real, hidden, hidden[:, :1])
        pooled = []
        for part, bias in zip(self._parts, self._biases, strict=True):
            logits = hidden @ part
            if self._strategy == "max":
                logits = logits.amax(1)
            values = saturated(logits if bias is None else logits + bias, self._twice)
            pooled.append(values if self._strategy == "max" else (values * real.to(values.dtype)).sum(1))
        return torch.cat(pooled, -1)[:, None]

    def _agrees(self) -> bool:
        """Whether this equals pooling the logits of the network, for an example."""
        torch = self._torch
        ids = torch.arange(12).reshape(2, 6) % self._network.config.vocab_size
        arrays = {"input_ids": ids, MASK: torch.ones_like(ids)}
        arrays[MASK][1, 4:] = 0
        with torch.inference_mode():
            features = {TOKENS: self._network(**arrays, return_dict=True).logits, MASK: arrays[MASK]}
            _splade(self._strategy, self._twice)(features)
            try:
                pooled = self(arrays)
            except Exception:  # networks that need all positions after the last layer raise many types
                return False
        expected = features[SENTENCE]
        return pooled.shape == expected.shape and bool(torch.allclose(pooled, expected, 1e-3, 1e-4))


def saturated(logits: Any, twice: bool) -> Any:
    """Return log(1 + max(0, x)) of a tensor, or the logarithm of 1 more than that."""
    values = logits.relu().log1p()
    return values.log1p() if twice else values


def _step(checkpoint: Checkpoint, module: Module) -> Step:
    """Return the step of a module. Raises UNSUPPORTED for one that reads texts."""
    import torch

    functional = torch.nn.functional
    match module.kind:
        case "Pooling":
            return _pooling(module)
        case "Dense":
            return _through(module, _dense(checkpoint, module))
        case "Normalize":
            return _through(module, lambda vectors: functional.normalize(vectors, dim=-1), optional=True)
        case "LayerNorm":
            weights = read_weights(checkpoint, module)
            weight, bias = (
                _tensor(weight_named(checkpoint, module, weights, f"norm.{name}")) for name in ("weight", "bias")
            )
            return _through(module, lambda vectors: functional.layer_norm(vectors, weight.shape, weight, bias, 1e-5))
        case "WeightedLayerPooling":
            return _weighted_layers(checkpoint, module)
        case "SpladePooling":
            return _splade(*splade_settings(module))
        case "SparseAutoEncoder":
            return _through(module, _auto_encoder(checkpoint, module))
    raise unsupported(f"'{checkpoint.source}': the module '{module.kind}' cannot be part of a graph")


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(np.array(array, np.float32))


def _through(module: Module, function: Callable[[Any], Any], *, optional: bool = False) -> Step:
    source, target = module.source, module.target

    def apply(features: Features) -> None:
        if not optional or source in features:
            features[target] = function(features[source])

    return apply


def _pooling(module: Module) -> Step:
    import torch

    def apply(features: Features) -> None:
        vectors = [_pool(mode, features[TOKENS], features[MASK]) for mode in module.modes]
        features[SENTENCE] = torch.cat(vectors, 1) if len(vectors) > 1 else vectors[0]

    return apply


def _pool(mode: str, hidden: Any, mask: Any) -> Any:
    """Pool ``[n, length, size]`` to ``[n, size]``."""
    import torch

    if mode == "cls":
        return hidden[:, 0]
    weights = mask.to(hidden.dtype)
    if mode == "max":
        return torch.where(mask[:, :, None] > 0, hidden, -1e9).amax(1)
    if mode == "lasttoken":
        last = (mask.sum(1) - 1).clamp(min=0)[:, None]
        vectors = hidden.gather(1, last[:, :, None].expand(-1, -1, hidden.shape[2]))[:, 0]
        return vectors * weights.gather(1, last)
    if mode == "weightedmean":
        weights = weights * torch.ones_like(weights).cumsum(1)
    total = weights.sum(1, keepdim=True).clamp(min=1e-9)
    return (hidden * weights[:, :, None]).sum(1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


def _dense(checkpoint: Checkpoint, module: Module) -> Callable[[Any], Any]:
    import torch

    name = activation_of(module)
    activation_named(name, checkpoint.source)  # rejects an unknown one
    activation = getattr(torch.nn, name.rpartition(".")[2])().eval()
    weights = read_weights(checkpoint, module)
    learned = [_tensor(weights[name]) for name in weights if name.startswith("activation_function.")]
    if learned:  # that of PReLU; others are not served
        activation = partial(torch.nn.functional.prelu, weight=learned[0])
    weight = _tensor(weight_named(checkpoint, module, weights, "linear.weight"))
    bias = _tensor(weights["linear.bias"]) if weights.get("linear.bias") is not None else None
    linear = torch.nn.functional.linear
    if not module.config.get("use_residual"):
        return lambda vectors: activation(linear(vectors, weight, bias))
    if weight.shape[0] == weight.shape[1]:
        return lambda vectors: activation(linear(vectors, weight, bias)) + vectors
    residual = _tensor(weight_named(checkpoint, module, weights, "residual.weight"))
    return lambda vectors: activation(linear(vectors, weight, bias)) + linear(vectors, residual)


def _weighted_layers(checkpoint: Checkpoint, module: Module) -> Step:
    weights = weight_named(checkpoint, module, read_weights(checkpoint, module), "layer_weights")
    shares = _tensor(weights / weights.sum())[None, :, None, None]
    start = int(module.config.get("layer_start", 4))

    def apply(features: Features) -> None:
        if LAYERS in features:
            features[TOKENS] = (features[LAYERS][:, start:] * shares).sum(1)

    return apply


def _splade(strategy: str, twice: bool) -> Step:
    def apply(features: Features) -> None:
        values = saturated(features[TOKENS], twice) * features[MASK][:, :, None].to(features[TOKENS].dtype)
        features[SENTENCE] = values.amax(1) if strategy == "max" else values.sum(1)

    return apply


def _auto_encoder(checkpoint: Checkpoint, module: Module) -> Callable[[Any], Any]:
    import torch

    config, weights = module.config, read_weights(checkpoint, module)
    name = "encoder.weight" if "encoder.weight" in weights else "decoder.linear.weight"
    encoder, pre, latent = (
        _tensor(weight_named(checkpoint, module, weights, name)) for name in (name, "pre_bias", "latent_bias")
    )
    active = min(int(config.get("max_active_dims") or config.get("k", 8)), encoder.shape[0])

    def apply(vectors: Any) -> Any:
        if config.get("normalize"):
            centred = vectors - vectors.mean(-1, keepdim=True)
            deviation = (centred.square().sum(-1, keepdim=True) / (centred.shape[-1] - 1)).sqrt()
            vectors = centred / (deviation + 1e-5)
        values = torch.relu(torch.nn.functional.linear(vectors - pre, encoder, latent))
        kept, positions = values.topk(active, -1)
        return torch.zeros_like(values).scatter(-1, positions, kept)

    return apply
