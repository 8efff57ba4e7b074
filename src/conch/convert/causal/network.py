"""A causal language model in torch, fp32: the reference that exports are made from and compared with.

Used by ``conch convert`` in its process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from conch.backends.native.arrays import Array
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.convert.libraries import quiet, reason
from conch.errors import ConchError, invalid, unsupported

#: Rotary embeddings whose angles depend on how long the text is, which one trace cannot hold.
_LENGTH_DEPENDENT: Final = ("dynamic", "longrope")


def instead(why: str) -> ConchError:
    """Why a model is not converted, and what to do with it."""
    return unsupported(f"{why}: serve the checkpoint as it is (engine transformers)")


def load(checkpoint: Checkpoint, options: Options) -> CausalNetwork:
    """The network of a checkpoint.  INVALID_ARG for one that does not load, UNSUPPORTED for one that no export fits."""
    if getattr(checkpoint, "gguf", None) is not None:
        raise instead("a GGUF file has quantised weights already")
    try:
        with quiet():
            from transformers import AutoModelForCausalLM

            module: Any = AutoModelForCausalLM.from_pretrained(
                checkpoint.directory,
                dtype="float32",
                attn_implementation="sdpa",
                trust_remote_code=options.trust_remote_code,
                local_files_only=True,
            )
    except ImportError as error:
        raise unsupported(f'conversion needs torch and transformers: pip install "conch[convert]" ({error})') from None
    except Exception as error:  # whatever transformers raises for the checkpoint
        if "scaled_dot_product_attention" in str(error):
            kind = checkpoint.config.get("model_type", "")
            raise instead(f"the attention of a '{kind}' is not of the form that OpenVINO's KV cache needs") from None
        raise invalid(f"the checkpoint does not load: {reason(error)}") from None
    problem = unsuitable(module.config.get_text_config())
    if problem:
        raise instead(problem)
    network = CausalNetwork(module.eval(), options.threads)
    network.require_plain_cache()
    return network


def unsuitable(config: Any) -> str:
    """Why the paged KV cache would change what a network of this configuration says; empty where it does not.

    All that is asked below is in the exported graph, and lost without a word where the server pages its cache.
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
        self.module = module
        if threads:
            import torch

            torch.set_num_threads(threads)

    @property
    def vocabulary(self) -> int:
        size: int = self.module.config.get_text_config().vocab_size
        return size

    def cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.module.config)

    def cached(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Heads and width of the keys and values of each layer, as one run of the network shows them."""
        import torch

        cache = self.cache()
        with torch.inference_mode(), quiet():
            self.module(input_ids=torch.ones((1, 2), dtype=torch.int64), past_key_values=cache, use_cache=True)
        shapes = [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in cache.layers]
        return [((k[1], k[3]), (v[1], v[3])) for k, v in shapes]

    def require_plain_cache(self) -> None:
        """UNSUPPORTED for a network that keeps other things than a key and a value for each token."""
        try:
            kept = self.cached()
        except Exception:  # an AttributeError, mostly: no keys, no layers
            kept = []
        if not kept:
            raise instead(f"a '{self.module.config.model_type}' keeps other things than keys and values of its tokens")

    def logits(self, ids: Array, starts: Sequence[int] = ()) -> Array:
        """FP32 ``[rows, tokens, vocabulary]``; cut at ``starts``, the parts go one after another over the cache."""
        import torch

        cache, found = self.cache(), []
        with torch.inference_mode(), quiet():
            for part in np.split(ids, list(starts), axis=1):
                answer = self.module(input_ids=torch.from_numpy(part.copy()), past_key_values=cache, use_cache=True)
                found.append(answer.logits.float().numpy())
        return np.concatenate(found, axis=1)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The likeliest next ``count`` tokens of each prompt, those of one length in one batch; no token ends them."""
        found: dict[int, list[int]] = {}
        for length in {len(prompt) for prompt in prompts}:
            places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
            found |= zip(places, self._continue([list(prompts[place]) for place in places], count), strict=True)
        return [found[place] for place in range(len(prompts))]

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds for a prompt, to its first token."""
        seconds: list[float] = []
        self._continue([list(prompt)], 1, seconds)
        return seconds[0]

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> list[float]:
        """Seconds of each of ``count`` decoding steps for prompts of one length, all in one batch."""
        seconds: list[float] = []
        self._continue([list(prompt) for prompt in prompts], count + 1, seconds)
        return seconds[1:]

    def _continue(self, prompts: list[list[int]], count: int, seconds: list[float] | None = None) -> list[list[int]]:
        import torch

        cache, found = self.cache(), []
        with torch.inference_mode(), quiet():
            ids = torch.tensor(prompts)
            for _ in range(count):
                before = time.perf_counter()
                answer = self.module(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids = answer.logits[:, -1].argmax(-1, keepdim=True)
                found.append(ids)
                if seconds is not None:
                    seconds.append(time.perf_counter() - before)
        rows: list[list[int]] = torch.cat(found, dim=1).tolist()
        return rows
