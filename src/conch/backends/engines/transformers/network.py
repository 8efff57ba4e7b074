"""Loads a causal language model of transformers and runs it: from token ids and a cache to the next logits."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch.nn import functional
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from conch.backends.base.verification import example_ids, require_tensors
from conch.backends.engines.transformers.cache import PaddedCache
from conch.backends.engines.transformers.media import MediaNetwork, PromptMedia, network_inputs
from conch.backends.generation.engine import EngineSpec
from conch.backends.generation.lora import LoraWeights
from conch.checkpoints.gguf import GgufFile, TensorData, require_whole, rope_scaling
from conch.core.errors import ConchError, invalid, one_line
from conch.machine.facts import cpu_flags

Tensor = Any


def cache_argument(model: Any) -> str:
    """Return the name of the argument of ``forward`` for a KV cache: ``cache`` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class DecoderNetwork:
    """A model on its device with its LoRA adapters; not thread-safe."""

    def __init__(
        self, model: Any, device: Any, adapters: Iterable[str] = (), media: MediaNetwork | None = None
    ) -> None:
        self.model = model
        self.media = media
        self.device = device
        self.adapters = tuple(adapters)
        self._adapter: str | None = None
        #: The matrices of attached adapters by layer, those in use, and the layers with a hook that adds them.
        self._attached: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
        self._branches: dict[str, tuple[Tensor, Tensor]] = {}
        self._hooked: set[str] = set()
        taken = inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        self.cached = self._cache_argument in taken and "attention_mask" in taken
        self._positions = "position_ids" in taken
        #: Arguments that request only the logits of the last position.
        self.last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}

    def use(self, adapter: str) -> None:
        """Switch to a LoRA adapter; ``""`` selects none."""
        if adapter == self._adapter:
            return
        if adapter in self.adapters:
            self.model.enable_adapters()
            self.model.set_adapter(adapter)
        elif self.adapters:
            self.model.disable_adapters()
        self._branches = self._attached.get(adapter, {})
        self._adapter = adapter

    def attach(self, key: str, adapter: LoraWeights) -> None:
        """Add an adapter for ``use``. Raises INVALID_ARG for one that does not fit the model."""
        modules = dict(self.model.named_modules())
        current_name = _renaming(self.model, modules)
        matrices = {}
        for name, (down, up) in adapter.layers.items():
            layer = current_name(name)
            columns, rows = _size(modules.get(layer))
            if not rows or layer in matrices:
                raise adapter.misfit(f"{name}.lora_A.weight")
            adapter.check_layer(name, columns, rows)
            matrices[layer] = tuple(torch.from_numpy(values).to(self.device, self.model.dtype) for values in (down, up))
        for layer in matrices.keys() - self._hooked:
            modules[layer].register_forward_hook(partial(self._add_branch, layer))
        self._hooked |= matrices.keys()
        self._attached[key] = matrices

    def detach(self, key: str) -> None:
        """Free an attached adapter."""
        del self._attached[key]
        if self._adapter == key:
            self._adapter, self._branches = None, {}

    def _add_branch(self, layer: str, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Add the branch of the adapter in use to the output of a layer, after its forward run."""
        if layer not in self._branches:
            return None
        down, up = self._branches[layer]
        branch = functional.linear(functional.linear(inputs[0].to(down.dtype), down), up)
        return output + branch.to(output.dtype)

    def synchronize(self) -> None:
        """Wait for the runs of a GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self, ids: Tensor, cache: PaddedCache, media: PromptMedia | None = None) -> Tensor:
        """Read ``ids`` ``[rows, new]`` into a cache; returns the last FP32 logits, ``[rows, vocabulary]``.

        ``media`` are the items of the prompt of the only row.
        """
        new = ids.shape[1]
        mask, positions = cache.mask(new, self.device)
        arguments: dict[str, Any] = {self._cache_argument: cache}
        if self._positions:
            # Networks whose images have other positions read three for each token.
            arguments["position_ids"] = positions.expand(3, -1, -1) if any(cache.offsets) else positions
        if media is not None:
            assert self.media is not None
            arguments |= self.media.begin(media, cache.width, cache.width + new)
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            use_cache=True,
            return_dict=True,
            **arguments,
            **self.last,
        )
        cache.advance(new)
        return output.logits[:, -1].float()


def _renaming(model: Any, modules: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function that maps the name of a layer in a file, which may be that of an older version, to a module's.

    transformers renames the layers of many architectures, and the tensors of checkpoints while it loads them.
    """
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    weights = {f"{name}.weight": True for name in modules}

    def current_name(layer: str) -> str:
        if layer in modules:
            return layer
        name, _ = rename_source_key(f"{layer}.weight", renamings, [], model.base_model_prefix, weights)
        return str(name).removesuffix(".weight")

    return current_name


def _size(module: Any) -> tuple[int, int]:
    """Return the number of inputs and outputs of a linear layer, 0 for other modules."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return getattr(module, "in_features", 0), getattr(module, "out_features", 0)


_logger = logging.getLogger(__name__)

#: The types of models that AutoModelForCausalLM and AutoModelForMultimodalLM load.
_CAUSAL: Final = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_MULTIMODAL: Final = frozenset(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
#: CPU flags of bfloat16 multiplication; without them, bfloat16 is several times slower than float32.
_NATIVE: Final = frozenset({"amx_bf16", "avx512_bf16"})
#: The buffers with rotary frequencies; the frequencies of Gemma 3's sliding windows are in others and are not scaled.
_FREQUENCIES: Final = ("inv_freq", "full_attention_inv_freq")
#: The context (tokens) of a model with unlimited positions.
_ENDLESS: Final = 2**31 - 1


def load(spec: EngineSpec) -> DecoderNetwork:
    """Load the model of a checkpoint, with its adapters, on its device. Raises INVALID_ARG if it cannot be loaded."""
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cpu" if spec.device == "cpu" else f"{spec.device}:{spec.device_id}")
    try:
        model = _model(spec).eval().to(device)
    except ConchError:
        raise
    except Exception as error:
        raise invalid(f"engine 'transformers' cannot load '{spec.source}': {one_line(error)}") from error
    for name, path in spec.adapters.items():
        if not (path / "adapter_config.json").is_file():
            raise invalid(f"LoRA adapter '{name}' cannot be loaded from '{path}': it has no adapter_config.json")
        try:
            report = model.load_adapter(str(path), adapter_name=name)
        except Exception as error:
            raise invalid(f"LoRA adapter '{name}' cannot be loaded from '{path}': {one_line(error)}") from error
        if report.unexpected_keys:
            raise invalid(
                f"LoRA adapter '{name}' cannot be loaded from '{path}': the model does not have its weights "
                f"'{min(report.unexpected_keys)}'"
            )
    media = MediaNetwork(model, device, spec.media) if spec.media is not None else None
    return DecoderNetwork(model.eval(), device, spec.adapters, media)


def _model(spec: EngineSpec) -> Any:
    arguments: dict[str, Any] = dict(spec.arguments)
    if spec.gguf is not None:
        require_whole(spec.gguf, spec.adapters.values(), "transformers")
        arguments["gguf_file"] = str(spec.gguf.path.relative_to(spec.directory))
    # Some models that read images have no class for texts alone.
    is_causal = spec.media is None and not (_MULTIMODAL - _CAUSAL) & {spec.config.get("model_type")}
    kind = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForMultimodalLM
    model, report = kind.from_pretrained(
        spec.directory,
        dtype=_dtype(spec),
        trust_remote_code=spec.trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # require_tensors rejects those that affect outputs, by name
        **arguments,
    )
    require_tensors(model, report, lambda: _scores(model, spec), spec.source)
    if spec.gguf is not None:
        _scale_rotary_frequencies(model, spec.gguf)
    return model


def _scale_rotary_frequencies(model: Any, file: GgufFile) -> None:
    """Divide the rotary frequencies by the divisors in a GGUF file, which transformers 5 ignores.

    Files of Llama 3 models have a tensor with a divisor for each frequency, others have one factor. Raises INVALID_ARG
    for another kind of scaling.
    """
    (scaling, factor), tensor = rope_scaling(file), file.tensors.get("rope_freqs.weight")
    if scaling not in ("none", "linear"):
        raise invalid(
            f"engine 'transformers' cannot load '{file.path}': transformers ignores its scaling of rotary frequencies, "
            f"'{scaling}'"
        )
    divisors = torch.tensor(factor)
    if tensor is not None:
        divisors = factor * torch.from_numpy(TensorData(file).of(tensor).view(np.float32).copy())
    elif scaling == "none":
        return
    rotary = [
        buffer
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2] in _FREQUENCIES and divisors.shape in ((), buffer.shape)
    ]
    if not rotary:
        raise invalid(
            f"engine 'transformers' cannot load '{file.path}': its model has no rotary embedding with the frequencies "
            "that it scales"
        )
    for frequencies in rotary:
        frequencies /= divisors


def _scores(model: Any, spec: EngineSpec) -> Any:
    """Return the logits of an example prompt."""
    arrays = {"input_ids": example_ids(model.config)} if spec.media is None else spec.media.arrays
    with torch.inference_mode():
        return model.eval()(**network_inputs(model, arrays)).logits


def _dtype(spec: EngineSpec) -> Any:
    if spec.dtype != "auto":
        return getattr(torch, spec.dtype)
    if spec.device != "cpu":
        return torch.float16 if spec.gguf is not None else "auto"
    stored = spec.config.get("dtype") or spec.config.get("torch_dtype")
    return torch.bfloat16 if stored == "bfloat16" and not _NATIVE.isdisjoint(cpu_flags()) else torch.float32


def context(spec: EngineSpec, config: Any) -> int:
    """Return the length limit of a sequence in tokens.

    Raises INVALID_ARG for a context beyond the model's positions.
    """
    # XLNet's configuration uses -1 for no limit.
    known = max(getattr(config, "max_position_embeddings", None) or 0, 0)
    if known and spec.context > known:
        raise invalid(f"max_model_len {spec.context} is more than the {known} positions of the model")
    maximum = int(spec.context or known or _ENDLESS)
    return min(maximum, spec.cache_tokens) if spec.cache_tokens else maximum
