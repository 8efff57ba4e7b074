"""The modules of sentence-transformers after the network, in numpy: each reads and writes features of a batch.

Features are arrays with one row per text: ``token_embeddings`` FP32 ``[n, length, size]``, ``attention_mask`` INT64
``[n, length]``, ``input_ids`` INT64 ``[n, length]``, ``all_layer_embeddings`` FP32 ``[n, layers, length, size]``,
``sentence_embedding`` FP32 ``[n, size]``. Pickled weights are read with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.checkpoints.activations import activation_named
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.modules import SENTENCE, TOKENS, EmbeddingModel, Module, includes_prompt, joined
from conch.checkpoints.pooling import masked, pool, pool_words, splade_settings
from conch.checkpoints.tensor_files import read_safetensors
from conch.core.errors import invalid, unsupported
from conch.machine import extras

Array = npt.NDArray[Any]
MASK: Final = "attention_mask"
#: Activations over one axis of a matrix; for a vector per token PyTorch's choose that of the texts.
_OVER_ONE_AXIS: Final = ("Softmax", "Softmin", "LogSoftmax")
LAYERS: Final = "all_layer_embeddings"
IDS: Final = "input_ids"


@dataclass(slots=True)
class Features:
    """The features of a batch by name; ``padded`` is true if some positions are padding.

    ``prompt_lengths`` is the number of leading tokens of each text that belong to its prompt, if pooling excludes
    them, and ``tasks`` the task of each. ``expansion`` is BOOL ``[n, length]``, true for tokens that expand a query
    and that the network does not attend to.
    """

    arrays: dict[str, Array]
    padded: bool = True
    prompt_lengths: Sequence[int] = ()
    tasks: Sequence[str | None] = ()
    expansion: Array | None = None
    #: INT64 ``[n]``, for ``input_ids`` of all texts one after another, without padding.
    lengths: Array | None = None


Step = Callable[[Features], None]


class Steps:
    """The steps of ``modules``, in order; dropout has none, because it only affects training."""

    def __init__(self, checkpoint: Checkpoint, modules: Sequence[Module], vocabulary: Vocabulary | None = None) -> None:
        self.steps = [
            step(checkpoint, module, vocabulary or Vocabulary()) for module in modules if module.kind != "Dropout"
        ]

    def __call__(self, features: Features) -> Features:
        for step in self.steps:
            step(features)
        return features


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a tokenizer: ``id_of`` returns the id of a token, None for a text that is not one."""

    size: int = 0
    id_of: Callable[[str], int | None] = lambda text: None

    def ids(self, words: Sequence[str]) -> list[int]:
        """Return the ids of those ``words`` that are tokens."""
        return [id for word in words if (id := self.id_of(word)) is not None]


def step(checkpoint: Checkpoint, module: Module, vocabulary: Vocabulary) -> Step:
    """Return the step of a module. Raises INVALID_ARG for wrong weights, UNSUPPORTED for an unknown activation."""
    match module.kind:
        case "Pooling":
            return _pooling(module)
        case "Dense":
            return _through(module, dense(checkpoint, module))
        case "Normalize":
            return _through(module, normalized, optional=True)
        case "LayerNorm":
            return _through(module, _layer_norm(checkpoint, module))
        case "WeightedLayerPooling":
            return _weighted_layers(checkpoint, module)
        case "SpladePooling":
            return _splade(module)
        case "SparseAutoEncoder":
            return _through(module, _auto_encoder(checkpoint, module))
        case "MultiVectorMask":
            return _mask(module, vocabulary)
        case "HierarchicalTokenPooling":
            return _clusters(checkpoint, module)
        case "StaticEmbedding":
            return _token_vectors(checkpoint, module)
        case "SparseStaticEmbedding":
            return _token_weights(checkpoint, module, vocabulary)
    raise unsupported(f"'{checkpoint.source}': the module '{module.kind}' reads texts, so it must be the first module")


def _through(module: Module, function: Callable[[Array], Array], *, optional: bool = False) -> Step:
    """Return the step that applies ``function`` to a feature; nothing happens without the feature if ``optional``."""
    source, target = module.source, module.target

    def apply(features: Features) -> None:
        if not optional or source in features.arrays:
            features.arrays[target] = function(features.arrays[source])

    return apply


def _pooling(module: Module) -> Step:
    modes, include_prompt = module.modes, includes_prompt(module)

    def apply(features: Features) -> None:
        hidden = features.arrays[TOKENS]
        mask: Array | None = features.arrays[MASK] if features.padded else None
        if not include_prompt and any(features.prompt_lengths):
            mask = masked(features.arrays[MASK], features.prompt_lengths)
        vectors = [pool(mode, hidden, mask) for mode in modes]
        features.arrays[SENTENCE] = vectors[0] if len(vectors) == 1 else np.concatenate(vectors, 1)

    return apply


def normalized(vectors: Array) -> Array:
    """Scale vectors (the last axis) to length 1; zero vectors stay zero."""
    lengths = np.sqrt(np.einsum("...j,...j->...", vectors, vectors))
    return np.asarray(vectors / np.maximum(lengths, np.float32(1e-12))[..., None])


def activation_of(module: Module) -> str:
    """Return the dotted name of the activation of a ``Dense`` module."""
    name = str(module.config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    return name.strip("<>").removeprefix("class ").strip("'") or "torch.nn.Identity"


def dense(checkpoint: Checkpoint, module: Module) -> Callable[[Array], Array]:
    """Return the function of a ``Dense`` module: a linear layer with an activation, and its input if it is residual."""
    config = module.config
    name = activation_of(module)
    activation = activation_named(name, checkpoint.source)
    weights = read_weights(checkpoint, module)
    learned = {name: array for name, array in weights.items() if name.startswith("activation_function.")}
    if name.endswith("PReLU") and [array.size for array in learned.values()] == [1]:
        slope = float(learned.popitem()[1][0])
        activation = lambda vectors: np.where(vectors > 0, vectors, vectors * np.float32(slope))  # noqa: E731
    if learned or (module.source != SENTENCE and name.endswith(_OVER_ONE_AXIS)):
        why = "whose weights are learned" if learned else "which compares vectors of tokens"
        raise unsupported(f"'{checkpoint.source}': '{module.path}' has the activation '{name}', {why}")
    weight = np.ascontiguousarray(weight_named(checkpoint, module, weights, "linear.weight").T)
    bias = weights.get("linear.bias")
    shift = np.float32(0) if bias is None else bias.astype(np.float32)
    if not config.get("use_residual"):
        return lambda vectors: activation(vectors @ weight + shift)
    if weight.shape[0] == weight.shape[1]:
        return lambda vectors: np.asarray(activation(vectors @ weight + shift) + vectors)
    residual = weight_named(checkpoint, module, weights, "residual.weight").T
    return lambda vectors: np.asarray(activation(vectors @ weight + shift) + vectors @ residual)


def _layer_norm(checkpoint: Checkpoint, module: Module) -> Callable[[Array], Array]:
    weights = read_weights(checkpoint, module)
    weight, bias = (weight_named(checkpoint, module, weights, f"norm.{name}") for name in ("weight", "bias"))

    def apply(vectors: Array) -> Array:
        centred = vectors - vectors.mean(-1, keepdims=True)
        variance = np.square(centred).mean(-1, keepdims=True)
        return np.asarray(centred / np.sqrt(variance + np.float32(1e-5)) * weight + bias)

    return apply


def _token_vectors(checkpoint: Checkpoint, module: Module) -> Step:
    """Return the step that computes the mean of the vectors of a text's tokens, as of Model2Vec."""
    weights = read_weights(checkpoint, module)
    own = "embedding.weight" in weights
    table = weight_named(checkpoint, module, weights, "embedding.weight" if own else "embeddings")
    if not own and "mapping" in weights:
        table = table[weights["mapping"].astype(np.int64)]
    if not own and "weights" in weights:
        table = table * weights["weights"].astype(np.float32)[:, None]
    table = np.ascontiguousarray(table)

    def apply(features: Features) -> None:
        assert features.lengths is not None
        sums = np.zeros((len(features.lengths), table.shape[1]), np.float32)
        ids, start = features.arrays[IDS], 0
        # A third of the time of np.add.reduceat.
        for total, length in zip(sums, features.lengths.tolist(), strict=True):
            if length:
                np.add.reduce(table.take(ids[start : start + length], 0), 0, out=total)
            start += length
        features.arrays[SENTENCE] = sums / np.maximum(features.lengths, 1)[:, None].astype(np.float32)

    return apply


def _token_weights(checkpoint: Checkpoint, module: Module, vocabulary: Vocabulary) -> Step:
    """Return the step that assigns each token of a text its weight, times the text's vector if there is one."""
    file = str(module.config.get("path") or "")
    if file.endswith(".json"):
        # Not a path of the checkpoint's author's machine: the file of that name in the folder of the module.
        name = joined(module.path, file.rpartition("/")[2])
        by_word = checkpoint.json(name)
        if by_word is None:
            raise invalid(f"'{checkpoint.source}' lacks {name}, with the weights of words")
        weights = np.zeros(vocabulary.size, np.float32)
        for word, weight in by_word.items():
            if (id := vocabulary.id_of(word)) is not None:
                weights[id] = weight
    else:
        weights = weight_named(checkpoint, module, read_weights(checkpoint, module), "weight")

    def apply(features: Features) -> None:
        ids, mask = features.arrays[IDS], features.arrays[MASK] > 0
        vectors = np.zeros((len(ids), len(weights)), np.float32)
        rows = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
        vectors[rows[mask], ids[mask]] = weights[ids[mask]]
        before = features.arrays.get(SENTENCE)
        features.arrays[SENTENCE] = vectors if before is None else vectors * before

    return apply


def _weighted_layers(checkpoint: Checkpoint, module: Module) -> Step:
    weights = weight_named(checkpoint, module, read_weights(checkpoint, module), "layer_weights")
    shares = weights / weights.sum()
    start = int(module.config.get("layer_start", 4))

    def apply(features: Features) -> None:
        layers = features.arrays.get(LAYERS)
        if layers is not None:
            features.arrays[TOKENS] = np.asarray(np.einsum("k,nkld->nld", shares, layers[:, start:]))

    return apply


def _splade(module: Module) -> Step:
    strategy, twice = splade_settings(module)

    def apply(features: Features) -> None:
        features.arrays[SENTENCE] = pool_words(features.arrays[TOKENS], features.arrays[MASK], strategy, twice)

    return apply


def _auto_encoder(checkpoint: Checkpoint, module: Module) -> Callable[[Array], Array]:
    config, weights = module.config, read_weights(checkpoint, module)
    # The decoder has the same weights, and safetensors keeps one name of each tensor.
    name = "encoder.weight" if "encoder.weight" in weights else "decoder.linear.weight"
    encoder = np.ascontiguousarray(weight_named(checkpoint, module, weights, name).T)
    pre, latent = (weight_named(checkpoint, module, weights, f"{name}_bias") for name in ("pre", "latent"))
    active = int(config.get("max_active_dims") or config.get("k", 8))
    scales = bool(config.get("normalize"))

    def apply(vectors: Array) -> Array:
        if scales:
            centred = vectors - vectors.mean(-1, keepdims=True)
            vectors = centred / (centred.std(-1, ddof=1, keepdims=True) + np.float32(1e-5))
        return largest(np.maximum((vectors - pre) @ encoder + latent, 0), active)

    return apply


def largest(vectors: Array, count: int) -> Array:
    """Keep the ``count`` elements of each vector that are farthest from 0, and set the others to 0."""
    if count >= vectors.shape[-1]:
        return vectors
    kept = np.argpartition(np.abs(vectors), -count, -1)[..., -count:]
    sparse = np.zeros_like(vectors)
    np.put_along_axis(sparse, kept, np.take_along_axis(vectors, kept, -1), -1)
    return sparse


def _mask(module: Module, vocabulary: Vocabulary) -> Step:
    """Return the step that selects the tokens of a text whose vectors are used."""
    skipped = vocabulary.ids(module.config.get("skiplist_words") or ())
    tasks = module.config.get("skiplist_tasks") or ["document"]
    tasks = [tasks] if isinstance(tasks, str) else tasks
    allowed = module.config.get("keep_only_token_ids")

    def apply(features: Features) -> None:
        ids, mask = features.arrays[IDS], features.arrays[MASK] > 0
        if features.expansion is not None:
            mask = mask | features.expansion
        if skipped:
            skips = np.array([(task or "document") in tasks for task in features.tasks])
            mask = mask & ~(np.isin(ids, skipped) & skips[:, None])
        if allowed:
            queries = np.array([task == "query" for task in features.tasks])
            mask = mask & (np.isin(ids, allowed) | queries[:, None])
        features.arrays[MASK] = mask.astype(np.int64)
        features.padded = True

    return apply


def _clusters(checkpoint: Checkpoint, module: Module) -> Step:
    """Return the step that replaces similar vectors of a text's tokens by their means, except for the first ones."""
    config = module.config
    factor, kept = float(config.get("pool_factor", 1.0)), int(config.get("num_protected_tokens", 1))
    scales = bool(config.get("normalize_embeddings"))
    tasks = config.get("tasks") or ["document"]
    tasks = [tasks] if isinstance(tasks, str) else tasks
    what = f"the module '{module.kind}' of '{checkpoint.source}'"
    hierarchy = extras.load(what, "scipy.cluster.hierarchy")
    squareform = extras.load(what, "scipy.spatial.distance").squareform

    def means(vectors: Array) -> Array:
        count = max(int(len(vectors) // factor), 1)
        if count >= len(vectors):
            return vectors
        distances = np.clip(1 - vectors @ vectors.T, 0, 2)
        tree = hierarchy.linkage(squareform(distances, checks=False), method="ward")
        labels = hierarchy.fcluster(tree, t=count, criterion="maxclust")
        return np.stack([vectors[labels == label].mean(0) for label in np.unique(labels)])

    def pooled(vectors: Array) -> Array:
        if factor > 1:
            vectors = np.concatenate([vectors[:kept], means(vectors[kept:])])
        return normalized(vectors) if scales else vectors

    def apply(features: Features) -> None:
        rows = []
        texts = zip(features.arrays[TOKENS], features.arrays[MASK] > 0, features.tasks, strict=True)
        for vectors, real, task in texts:
            own = vectors[real]
            rows.append(pooled(own) if (task or "document") in tasks else own)
        size = max(map(len, rows))
        features.arrays[MASK] = np.array([[1] * len(row) + [0] * (size - len(row)) for row in rows])
        features.arrays[TOKENS] = np.stack([np.pad(row, ((0, size - len(row)), (0, 0))) for row in rows])
        features.padded = True

    return apply


def finish(model: EmbeddingModel, vectors: Array) -> Array:
    """Truncate dense vectors ``[n, size]`` after all modules, and normalize them if the model's options require it."""
    if model.truncate_dim:
        vectors = vectors[:, : model.truncate_dim]
    return normalized(vectors) if model.normalize else vectors


def read_weights(checkpoint: Checkpoint, module: Module) -> dict[str, Array]:
    """Read the weights of a module by name. Raises INVALID_ARG if its folder has none."""
    file = checkpoint.path(joined(module.path, "model.safetensors"))
    if file is not None:
        return read_safetensors(file)
    file = checkpoint.path(joined(module.path, "pytorch_model.bin"))
    if file is None:
        raise invalid(
            f"'{checkpoint.source}' lacks {joined(module.path, 'model.safetensors')}, which modules.json names"
        )
    what = f"the module '{module.kind}' of '{checkpoint.source}'"
    extras.require(f"{what} in {joined(module.path, 'pytorch_model.bin')}", "torch")
    import torch

    return {name: tensor.float().numpy() for name, tensor in torch.load(file, weights_only=True).items()}


def weight_named(checkpoint: Checkpoint, module: Module, weights: Mapping[str, Array], name: str) -> Array:
    """Return a weight of a module as FP32. Raises INVALID_ARG if there is none of that name."""
    try:
        return weights[name].astype(np.float32)
    except KeyError:
        raise invalid(f"'{checkpoint.source}': the weights in {module.path or '.'} have no {name}") from None
