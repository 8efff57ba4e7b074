"""Exports Whisper to OpenVINO's IR as three graphs, verified against torch; ``backends.tasks.whisper`` runs them.

The encoder reads ``input_features`` FP32 ``[rows, bins, frames]`` and gives ``last_hidden_state``. From that, ``cross``
computes the keys and values of cross attention, which the decoder reads for every token. The decoder has the inputs of
an exported language model, keeps its KV cache as state, and gives ``logits`` and the queries of cross attention, from
which the times of words are derived.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.checkpoints.folder import Checkpoint
from conch.convert.causal.export import (
    TEXT_INPUTS,
    TOLERANCE,
    TRACED,
    cache_names,
    cache_of,
    make_stateful,
    name_ports,
    select_rows,
    traced,
)
from conch.convert.libraries import describe_error, silence_libraries
from conch.core.errors import internal, unsupported

GRAPH: Final = "openvino_model.xml"
#: The folders of the graphs in that of a variant.
FOLDERS: Final = {"decoder": "", "encoder": "encoder", "cross": "cross"}


def export(network: Any) -> dict[str, Any]:
    """Return the graphs (``openvino.Model``) of transformers' ``WhisperForConditionalGeneration`` in FP32, by name.

    Raises UNSUPPORTED if the export fails, or a graph differs from torch.
    """
    try:
        with silence_libraries():
            return {"encoder": _encoder(network), "cross": _cross(network), "decoder": _decoder(network)}
    except Exception as error:  # an error of torch's tracing or OpenVINO's frontend
        raise unsupported(
            f"the export to OpenVINO failed ({describe_error(error)}): serve the checkpoint directly (engine torch)"
        ) from None


def _encoder(network: Any) -> Any:
    import torch

    class EncoderPass(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = network.model.encoder

        def forward(self, features: Any) -> Any:
            return self.encoder(features).last_hidden_state

    config = network.config
    frames = 2 * config.max_source_positions
    model = traced(EncoderPass(), [torch.randn(2, config.num_mel_bins, frames)])
    name_ports(model, {"input_features": (-1, config.num_mel_bins, frames)}, ["last_hidden_state"])
    return model


def _cross(network: Any) -> Any:
    import torch

    layers = [layer.encoder_attn for layer in network.model.decoder.layers]

    class CrossPass(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projections = torch.nn.ModuleList([part for layer in layers for part in (layer.k_proj, layer.v_proj)])

        def forward(self, hidden: Any) -> tuple[Any, ...]:
            shape = (*hidden.shape[:2], layers[0].num_heads, layers[0].head_dim)
            return tuple(part(hidden).view(shape).transpose(1, 2).contiguous() for part in self.projections)

    config = network.config
    model = traced(CrossPass(), [torch.randn(2, config.max_source_positions, config.d_model)])
    hidden = (-1, config.max_source_positions, config.d_model)
    name_ports(model, {"last_hidden_state": hidden}, cache_names(2 * len(layers), "cross"))
    return model


def _decoder(network: Any) -> Any:
    import torch
    from transformers import EncoderDecoderCache

    layers = len(network.model.decoder.layers)

    class DecoderPass(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.head = network.model.decoder, network.proj_out

        def forward(self, ids: Any, mask: Any, positions: Any, *tensors: Any) -> tuple[Any, ...]:
            past, cross = tensors[: 2 * layers], tensors[2 * layers :]
            cache = EncoderDecoderCache(cache_of(past), cache_of(cross))
            cache.is_updated = dict.fromkeys(range(layers), True)
            queries: list[Any] = []
            hooks = [
                layer.encoder_attn.q_proj.register_forward_hook(lambda *call: queries.append(call[-1]))
                for layer in self.decoder.layers
            ]
            hidden = self.decoder(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                encoder_hidden_states=cross[0],  # not read: the cache has the keys and values of cross attention
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            for hook in hooks:
                hook.remove()
            present = (tensor for layer in cache.self_attention_cache.layers for tensor in (layer.keys, layer.values))
            return (self.head(hidden), *present, *queries)

    config, (rows, past, new) = network.config, TRACED
    heads, frames = config.decoder_attention_heads, config.max_source_positions
    width = config.d_model // heads
    example = [
        torch.randint(0, config.vocab_size, (rows, new), generator=torch.Generator().manual_seed(7)),
        torch.ones((rows, past + new), dtype=torch.int64),
        torch.arange(past, past + new).repeat(rows, 1),
        *(torch.zeros((rows, heads, past, width)) for _ in range(2 * layers)),
        *(torch.zeros((rows, heads, frames, width)) for _ in range(2 * layers)),
    ]
    model = traced(DecoderPass().eval(), example)
    inputs: dict[str, Sequence[int]] = dict.fromkeys(TEXT_INPUTS, (-1, -1))
    inputs |= dict.fromkeys(cache_names(2 * layers, "past_key_values"), (-1, heads, -1, width))
    inputs |= dict.fromkeys(cache_names(2 * layers, "cross"), (-1, heads, frames, width))
    queries = [f"query.{layer}" for layer in range(layers)]
    name_ports(model, inputs, ["logits", *cache_names(2 * layers, "present"), *queries])
    select_rows(model)
    make_stateful(model)
    return model


def write(graphs: dict[str, Any], folder: Path, precision: str) -> Path:
    """Write graphs, with the decoder's weights in 8 bits for ``int8``, to ``folder``; returns the decoder's file.

    The encoder keeps its weights: it computes 1,500 positions at once, so smaller weights would cost accuracy without
    making it faster.
    """
    import openvino

    with silence_libraries():
        for name, model in graphs.items():
            file = folder / FOLDERS[name] / GRAPH
            file.parent.mkdir(exist_ok=True)
            if precision == "int8" and name != "encoder":
                import nncf

                model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
            openvino.save_model(model, file, compress_to_fp16=False)
    return folder / GRAPH


def verify(folder: Path, network: Any) -> None:
    """Compare graphs in FP32 with torch, while the cache grows by many tokens and by one.

    Raises INTERNAL for other logits.
    """
    import torch

    from conch.backends.graphs.openvino import CompileSettings
    from conch.backends.tasks.whisper import GraphCache, WhisperGraphs

    config = network.config
    generator = torch.Generator().manual_seed(7)
    features = torch.randn((2, config.num_mel_bins, 2 * config.max_source_positions), generator=generator)
    ids = torch.randint(0, config.vocab_size, (2, 6), generator=generator)
    with torch.inference_mode(), silence_libraries():
        expected = network(input_features=features, decoder_input_ids=ids).logits.numpy()
        graphs = WhisperGraphs(folder / GRAPH, CompileSettings(precision="fp32"))
        cache, hidden = GraphCache(graphs), graphs.encode(features)
        parts = [np.array(cache.run(hidden, part, None, None).get_tensor("logits").data) for part in ids.split(5, 1)]
    difference = float(np.abs(np.concatenate(parts, 1) - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise internal(f"the logits of the exported graphs differ from torch's by {difference:.2g}")


def load(checkpoint: Checkpoint) -> Any:
    """Load transformers' network in FP32. Raises UNSUPPORTED for other models than Whisper."""
    from conch.backends.tasks.transformers import load_pipeline

    if checkpoint.config.get("model_type") != "whisper":
        raise unsupported(
            f"of the models that transcribe, only Whisper can be converted; '{checkpoint.source}' is "
            f"'{checkpoint.config.get('model_type', '')}': serve the checkpoint directly"
        )
    return load_pipeline("automatic-speech-recognition", checkpoint, "cpu")
