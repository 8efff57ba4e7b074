"""Small projectors of images and recordings with random weights, as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

#: The sizes of the vision encoders: an image has 4 x 4 patches.
_WIDTH, _HIDDEN, _LAYERS, _PATCH, _SIZE = 32, 64, 2, 4, 16
_MELS, _FRAMES = 80, 1500
_KINDS = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}


def write_llava(path: Path, size: int) -> Path:
    """Write a CLIP encoder with the projector of LLaVA, for a language model with vectors of ``size``."""
    own = {
        "v.class_embd": (_WIDTH,), "v.position_embd.weight": (17, _WIDTH),
        "v.pre_ln.weight": (_WIDTH,), "v.pre_ln.bias": (_WIDTH,),
        "mm.0.weight": (size, _WIDTH), "mm.0.bias": (size,), "mm.2.weight": (size, size), "mm.2.bias": (size,),
    }  # fmt: skip
    return _write(path, {**_vision("mlp", size), "clip.use_gelu": True}, {**_patches(), **_blocks("v"), **own})


def write_gemma3(path: Path, size: int) -> Path:
    """Write a SigLIP encoder with the projector of Gemma 3, which gives 4 vectors for an image."""
    own = {
        "v.position_embd.weight": (16, _WIDTH), "v.post_ln.weight": (_WIDTH,), "v.post_ln.bias": (_WIDTH,),
        "v.patch_embd.bias": (_WIDTH,),
        "mm.input_projection.weight": (_WIDTH, size), "mm.soft_emb_norm.weight": (_WIDTH,),
    }  # fmt: skip
    metadata = {**_vision("gemma3", size), "clip.use_gelu": True, "clip.vision.projector.scale_factor": 2}
    return _write(path, metadata, {**_patches(), **_blocks("v"), **own})


def write_qwen2vl(path: Path, size: int) -> Path:
    """Write the encoder of Qwen2-VL: an image has as many vectors as its size needs, placed in two dimensions."""
    merged = 4 * _WIDTH
    own = {
        "v.patch_embd.weight.1": (_WIDTH, 3, _PATCH, _PATCH),
        "v.post_ln.weight": (_WIDTH,), "v.post_ln.bias": (_WIDTH,),
        "mm.0.weight": (merged, merged), "mm.0.bias": (merged,), "mm.2.weight": (size, merged), "mm.2.bias": (size,),
    }  # fmt: skip
    metadata = {**_vision("qwen2vl_merger", size), "clip.use_silu": True}
    return _write(path, metadata, {**_patches(), **_blocks("v"), **own})


def write_ultravox(path: Path, size: int) -> Path:
    """Write the encoder of Whisper with the projector of Ultravox: 30 seconds of sound become 15 vectors."""
    stacked = 100
    own = {
        "a.position_embd.weight": (_FRAMES, _WIDTH), "a.conv1d.1.weight": (_WIDTH, _MELS, 3),
        "a.conv1d.1.bias": (_WIDTH, 1), "a.conv1d.2.weight": (_WIDTH, _WIDTH, 3), "a.conv1d.2.bias": (_WIDTH, 1),
        "a.post_ln.weight": (_WIDTH,), "a.post_ln.bias": (_WIDTH,),
        "mm.a.norm_pre.weight": (stacked * _WIDTH,), "mm.a.mlp.1.weight": (_HIDDEN, stacked * _WIDTH),
        "mm.a.norm_mid.weight": (_HIDDEN // 2,), "mm.a.mlp.2.weight": (size, _HIDDEN // 2),
    }  # fmt: skip
    metadata = {
        **_sizes("audio", size), "clip.has_audio_encoder": True, "clip.projector_type": "ultravox",
        "clip.audio.num_mel_bins": _MELS, "clip.audio.projector.stack_factor": stacked, "clip.use_gelu": True,
    }  # fmt: skip
    blocks = {name: shape for name, shape in _blocks("a").items() if not name.endswith("attn_k.bias")}
    return _write(path, metadata, {**blocks, **own})


def _sizes(kind: str, size: int) -> dict[str, Any]:
    values = {
        "embedding_length": _WIDTH, "feed_forward_length": _HIDDEN, "block_count": _LAYERS, "projection_dim": size,
        "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    return {f"clip.{kind}.{key}": value for key, value in values.items()}


def _vision(projector: str, size: int) -> dict[str, Any]:
    return {
        **_sizes("vision", size), "clip.has_vision_encoder": True, "clip.projector_type": projector,
        "clip.vision.image_size": _SIZE, "clip.vision.patch_size": _PATCH,
        "clip.vision.image_mean": [0.5, 0.4, 0.3], "clip.vision.image_std": [0.5, 0.4, 0.3],
    }  # fmt: skip


def _patches() -> dict[str, tuple[int, ...]]:
    return {"v.patch_embd.weight": (_WIDTH, 3, _PATCH, _PATCH)}


def _blocks(prefix: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(_LAYERS):
        block = f"{prefix}.blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= {f"{block}.{name}.weight": (_WIDTH, _WIDTH), f"{block}.{name}.bias": (_WIDTH,)}
        for name in ("ln1", "ln2"):
            shapes |= {f"{block}.{name}.weight": (_WIDTH,), f"{block}.{name}.bias": (_WIDTH,)}
        shapes |= {f"{block}.ffn_up.weight": (_HIDDEN, _WIDTH), f"{block}.ffn_up.bias": (_HIDDEN,)}
        shapes |= {f"{block}.ffn_down.weight": (_WIDTH, _HIDDEN), f"{block}.ffn_down.bias": (_WIDTH,)}
    return shapes


def _write(path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    for key, value in metadata.items():
        getattr(writer, f"add_{_KINDS[type(value)]}")(key, value)
    for name, shape in shapes.items():
        values = random.normal(0, 0.2, shape).astype(np.float32)
        writer.add_tensor(name, values + 1 if name.endswith(("ln1.weight", "ln2.weight", "norm.weight")) else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
