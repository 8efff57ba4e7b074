"""A causal language model in torch, fp32: the reference for exports and comparisons."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.checkpoints.folder import Checkpoint
from conch.convert.libraries import load_pretrained, silence_libraries
from conch.core.errors import ConchError, unsupported

#: Rotary embeddings with angles that depend on the length of the text, which a trace cannot represent.
_LENGTH_DEPENDENT: Final = ("dynamic", "longrope")


def not_convertible(why: str) -> ConchError:
    """Return an UNSUPPORTED error with the reason why a model cannot be converted, and an alternative."""
    return unsupported(f"{why}: serve the checkpoint as it is (engine transformers)")


def load(checkpoint: Checkpoint) -> CausalNetwork:
    """Load the network of a checkpoint.

    Raises INVALID_ARG if it cannot be loaded, UNSUPPORTED if it cannot be exported.
    """
    if checkpoint.gguf is not None:
        raise not_convertible("a GGUF file has quantised weights already")
    try:
        module = load_pretrained(checkpoint, "AutoModelForCausalLM", attention="sdpa", outputs=("logits",))
    except ConchError as error:
        if "scaled_dot_product_attention" not in str(error.__cause__):
            raise
        kind = checkpoint.config.get("model_type", "")
        why = f"the attention of a '{kind}' is not of the form that OpenVINO's KV cache needs"
        raise not_convertible(why) from None
    problem = paged_cache_problem(module.config.get_text_config())
    if problem:
        raise not_convertible(problem)
    network = CausalNetwork(module, checkpoint.options.threads)
    network.require_plain_cache()
    return network


def paged_cache_problem(config: Any) -> str:
    """Return why the paged KV cache would change the predictions of such a network; empty if it would not.

    The exported graph supports all features checked here, but a pipeline with a paged cache drops them silently.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    others = kinds - {"sliding_attention", "full_attention"}
    if others:
        return f"it has layers of kind {', '.join(sorted(others))}, which OpenVINO's KV cache does not hold"
    if getattr(config, "alibi", False):
        return "it tells positions by ALiBi, to which OpenVINO's KV cache gives another weight"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "")) if isinstance(rope, dict) else ""
    if kind in _LENGTH_DEPENDENT:
        return f"its positions ('{kind}') depend on how long a text is, which an exported graph cannot follow"
    return ""


class CausalNetwork:
    """A module of transformers with a KV cache; ids are INT64."""

    def __init__(self, module: Any, threads: int = 0) -> None:
        from conch.backends.engines.transformers.network import cache_argument

        self.module = module
        self._cache_argument = cache_argument(module)
        if threads:
            import torch

            torch.set_num_threads(threads)

    @property
    def vocabulary(self) -> int:
        size: int = self.module.config.get_text_config().vocab_size
        return size

    def new_cache(self) -> Any:
        """Return an empty KV cache."""
        from transformers import DynamicCache

        return DynamicCache(config=self.module.config)

    def run(self, cache: Any, **inputs: Any) -> Any:
        """What transformers returns for ``inputs`` after the tokens in ``cache``, which gets those of ``inputs``."""
        return self.module(use_cache=True, **{self._cache_argument: cache}, **inputs)

    def cache_shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return heads and width of the keys and of the values of each layer, determined by running the network."""
        import torch

        cache = self.new_cache()
        with torch.inference_mode(), silence_libraries():
            self.run(cache, input_ids=torch.ones((1, 2), dtype=torch.int64))
        shapes = [(layer.keys.shape, layer.values.shape) for layer in cache.layers]
        return [((keys[1], keys[3]), (values[1], values[3])) for keys, values in shapes]

    def require_plain_cache(self) -> None:
        """Raise UNSUPPORTED for a network whose cache is not a key and a value per token."""
        try:
            shapes = self.cache_shapes()
        except Exception:  # usually an AttributeError: no keys or no layers
            shapes = []
        if not shapes:
            raise not_convertible(
                f"a '{self.module.config.model_type}' keeps other things than keys and values of its tokens"
            )

    def logits(self, ids: Array, starts: Sequence[int] = ()) -> Array:
        """Return FP32 ``[rows, tokens, vocabulary]`` for INT64 ids ``[rows, tokens]``.

        The ids are split at ``starts``, and the parts run one after another with the cache.
        """
        import torch

        cache, logits = self.new_cache(), []
        with torch.inference_mode(), silence_libraries():
            for part in np.split(ids, list(starts), axis=1):
                answer = self.run(cache, input_ids=torch.from_numpy(part.copy()))
                logits.append(answer.logits.float().numpy())
        return np.concatenate(logits, axis=1)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the most likely next ``count`` tokens of each prompt, batched by length.

        No token ends a continuation.
        """
        continuations: dict[int, list[int]] = {}
        for length in {len(prompt) for prompt in prompts}:
            places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
            batch = [list(prompts[place]) for place in places]
            continuations |= zip(places, self._continue(batch, count), strict=True)
        return [continuations[place] for place in range(len(prompts))]

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the time from a prompt to its first token (s)."""
        seconds: list[float] = []
        self._continue([list(prompt)], 1, seconds)
        return seconds[0]

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> list[float]:
        """Return the time of each of ``count`` decoding steps (s) for prompts of equal length in one batch."""
        seconds: list[float] = []
        self._continue([list(prompt) for prompt in prompts], count + 1, seconds)
        return seconds[1:]

    def _continue(self, prompts: list[list[int]], count: int, seconds: list[float] | None = None) -> list[list[int]]:
        """Return the most likely next ``count`` tokens of prompts of equal length.

        Appends the time of each token (s) to ``seconds``.
        """
        import torch

        cache, tokens = self.new_cache(), []
        with torch.inference_mode(), silence_libraries():
            ids = torch.tensor(prompts)
            for _ in range(count):
                before = time.perf_counter()
                answer = self.run(cache, input_ids=ids, logits_to_keep=1)
                ids = answer.logits[:, -1].argmax(-1, keepdim=True)
                tokens.append(ids)
                if seconds is not None:
                    seconds.append(time.perf_counter() - before)
        rows: list[list[int]] = torch.cat(tokens, dim=1).tolist()
        return rows
