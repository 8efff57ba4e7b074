"""Tiny chat models that read images or sound: random weights, a tokenizer and the family's own processor."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from conch.backends.io_formats.processor import without_videos
from tests.checkpoints import END, train_tokenizer

#: A template that takes lists of parts.
TEMPLATE: Final = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}MEDIA{% endif %}"
    "{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_TEXT: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_CLIP: Final[dict[str, Any]] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
    "projection_dim": 32,
}
_SIZES: Final = {"height": 28, "width": 28}
_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def _ids(tokenizer: Any, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _llava(tokenizer: Any, text: dict[str, Any]) -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        vision_config=_CLIP,
        text_config={"model_type": "llama", **text},
        vision_feature_layer=-1,
        image_seq_length=16,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    processor = transformers.LlavaProcessor(
        transformers.LlavaImageProcessor(size={"shortest_edge": 28}, crop_size=_SIZES),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


def _llava_next(tokenizer: Any, text: dict[str, Any]) -> tuple[Any, Any]:
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = transformers.LlavaNextConfig(
        vision_config=_CLIP,
        text_config={"model_type": "mistral", **text},
        vision_feature_layer=-1,
        image_grid_pinpoints=pinpoints,
        image_seq_length=16,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    processor = transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessor(
            size={"shortest_edge": 28}, crop_size=_SIZES, image_grid_pinpoints=pinpoints
        ),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


def _qwen(name: str, vision: dict[str, Any], **more: Any) -> Callable[[Any, dict[str, Any]], tuple[Any, Any]]:
    def make(tokenizer: Any, text: dict[str, Any]) -> tuple[Any, Any]:
        config = getattr(transformers, f"{name}Config")(
            vision_config={"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, **vision},
            text_config={**text, "rope_parameters": {**_ROPE, **more}},
            **_ids(
                tokenizer,
                image_token_id="<|image_pad|>",
                video_token_id="<|video_pad|>",
                vision_start_token_id="<|vision_start|>",
                vision_end_token_id="<|vision_end|>",
            ),
        )
        pixels = {"shortest_edge": 8 * 8, "longest_edge": 48 * 48}
        images = transformers.Qwen2VLImageProcessor(patch_size=4, merge_size=2, size=pixels)
        return config, without_videos(f"{name}Processor")(images, tokenizer)

    return make


def _idefics(name: str) -> Callable[[Any, dict[str, Any]], tuple[Any, Any]]:
    def make(tokenizer: Any, text: dict[str, Any]) -> tuple[Any, Any]:
        config = getattr(transformers, f"{name}Config")(
            vision_config={**_CLIP, "model_type": f"{name.lower()}_vision"},
            text_config={"model_type": "llama", **text},
            scale_factor=2,
            **_ids(tokenizer, image_token_id="<image>"),
        )
        images = getattr(transformers, f"{name}ImageProcessor")(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
        )
        videos = () if name == "Idefics3" else (None,)
        return config, without_videos(f"{name}Processor")(images, tokenizer, *videos, image_seq_len=4)

    return make


_PIXTRAL: Final[dict[str, Any]] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 48,
    "patch_size": 4,
}


def _pixtral(merged: int) -> Callable[[Any, dict[str, Any]], tuple[Any, Any]]:
    """Pixtral, or Mistral 3, which merges the features of several patches."""

    def make(tokenizer: Any, text: dict[str, Any]) -> tuple[Any, Any]:
        own = {"vision_feature_select_strategy": "full"} if merged == 1 else {"spatial_merge_size": merged}
        config = (transformers.LlavaConfig if merged == 1 else transformers.Mistral3Config)(
            vision_config=_PIXTRAL,
            text_config={"model_type": "mistral", **text},
            vision_feature_layer=-1,
            **own,
            **_ids(tokenizer, image_token_index="[IMG]"),
        )
        images = PixtralImageProcessorPil(size={"longest_edge": 48}, patch_size={"height": 4, "width": 4})
        processor = without_videos("PixtralProcessor")(images, tokenizer, patch_size=4, spatial_merge_size=merged)
        return config, processor

    return make


def _gemma3(tokenizer: Any, text: dict[str, Any]) -> tuple[Any, Any]:
    config = transformers.Gemma3Config(
        vision_config={**_CLIP, "model_type": "siglip_vision_model"},
        text_config={
            **text,
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        mm_tokens_per_image=4,
        **_ids(tokenizer, image_token_index="<img>", boi_token_index="<boi>", eoi_token_index="<eoi>"),
    )
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessor(size=_SIZES, do_pan_and_scan=False), tokenizer, image_seq_length=4
    )
    return config, processor


def _gemma4(large: bool) -> Callable[[Any, dict[str, Any]], tuple[Any, Any]]:
    """Gemma 4: a small one, with sound and shared keys and values, or a large one, whose images are read at once."""

    def make(tokenizer: Any, text: dict[str, Any]) -> tuple[Any, Any]:
        own = {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 16,
            "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": text["vocab_size"],
        }
        if large:
            own |= {"use_bidirectional_attention": "vision", "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
        else:
            own |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4}
        patches = {"patch_size": 4, "pooling_kernel_size": 2}
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        audio = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "subsampling_conv_channels": [16, 4],
            "attention_chunk_size": 4,
            "attention_context_left": 5,
            "output_proj_dims": 32,
        }
        config = transformers.Gemma4Config(
            text_config={**text, **own},
            vision_config={
                **vision, "num_key_value_heads": 4, "head_dim": 8, "position_embedding_size": 128, **patches
            },
            audio_config=None if large else audio,
            **_ids(
                tokenizer, image_token_id="<|image|>", audio_token_id="<|audio|>", boi_token_id="<|image>",
                eoi_token_id="<image|>", boa_token_id="<|audio>", eoa_token_index="<audio|>",
            ),
        )  # fmt: skip
        processor = without_videos("Gemma4Processor")(
            transformers.Gemma4AudioFeatureExtractor(feature_size=16),
            Gemma4ImageProcessorPil(**patches, max_soft_tokens=70),
            tokenizer,
            None,
            image_seq_length=70,
        )
        return config, processor

    return make


def _paligemma(tokenizer: Any, text: dict[str, Any]) -> tuple[Any, Any]:
    images = transformers.SiglipImageProcessor(size=_SIZES)
    images.image_seq_length = 16
    processor = transformers.PaliGemmaProcessor(images, tokenizer)
    config = transformers.PaliGemmaConfig(
        vision_config={**_CLIP, "model_type": "siglip_vision_model", "num_image_tokens": 16},
        text_config={"model_type": "gemma", **text, "head_dim": 8, "vocab_size": len(tokenizer)},
        projection_dim=32,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    return config, processor


def _qwen2_audio(tokenizer: Any, text: dict[str, Any]) -> tuple[Any, Any]:
    config = transformers.Qwen2AudioConfig(
        audio_config={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 100,
        },
        text_config={"model_type": "qwen2", **text},
        **_ids(tokenizer, audio_token_index="<|AUDIO|>"),
    )
    sound = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    return config, transformers.Qwen2AudioProcessor(sound, tokenizer)


def _voxtral(tokenizer: Any, text: dict[str, Any]) -> tuple[Any, Any]:
    audio = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.VoxtralConfig(
        audio_config={**audio, "num_mel_bins": 16, "max_source_positions": 100},
        text_config={"model_type": "llama", **text, "head_dim": 8},
        audio_token_id=24,
    )
    sound = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    return config, transformers.VoxtralProcessor(sound, tokenizer)


_VISION_MARKS: Final = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_TILES: Final = (
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)  # fmt: skip
_GEMMA4: Final = {
    "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
    "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip
_LINES: Final = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_QWEN_IMAGE: Final = {"image": "<|vision_start|><|image_pad|><|vision_end|>"}
_IMAGE: Final = {"image": "<image>"}

#: By name: the function that makes configuration and processor, special tokens, which may have names, and what stands
#: for an item of each kind in a prompt.
FAMILIES: Final[
    dict[
        str,
        tuple[
            Callable[[Any, dict[str, Any]], tuple[Any, Any]], tuple[str, ...] | Mapping[str, str], Mapping[str, str]
        ],
    ]
] = {
    "llava": (_llava, ("<image>",), _IMAGE),
    "llava_next": (_llava_next, ("<image>",), _IMAGE),
    "qwen2_vl": (
        _qwen("Qwen2VL", {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}),
        _VISION_MARKS,
        _QWEN_IMAGE,
    ),
    "qwen2_5_vl": (
        _qwen(
            "Qwen2_5_VL",
            {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "window_size": 16,
             "fullatt_block_indexes": [1]},
        ),
        _VISION_MARKS,
        _QWEN_IMAGE,
    ),
    "qwen3_vl": (
        _qwen(
            "Qwen3VL",
            {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 64,
             "deepstack_visual_indexes": [0, 1]},
            mrope_interleaved=True,
        ),
        _VISION_MARKS,
        _QWEN_IMAGE,
    ),
    "idefics3": (_idefics("Idefics3"), _TILES, _IMAGE),
    "smolvlm": (_idefics("SmolVLM"), _TILES, _IMAGE),
    "pixtral": (_pixtral(1), _LINES, {"image": "[IMG]"}),
    "mistral3": (_pixtral(2), _LINES, {"image": "[IMG]"}),
    "gemma3": (_gemma3, {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"}, {"image": "<boi>"}),
    "gemma4": (_gemma4(large=False), _GEMMA4, {"image": "<|image|>", "audio": "<|audio|>"}),
    "gemma4_large": (_gemma4(large=True), _GEMMA4, {"image": "<|image|>"}),
    "paligemma": (_paligemma, ("<image>",), _IMAGE),
    "qwen2_audio": (
        _qwen2_audio,
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
    ),
}  # fmt: skip
#: Those whose recordings are not read.
TEXTS_ALONE: Final = {"voxtral": (_voxtral, ("[AUDIO]",), {"audio": "[AUDIO]"})}


def write(folder: Path, name: str, **text: Any) -> Path:
    """The checkpoint of a family in ``folder``; ``text`` differs from the usual configuration of its language model."""
    make, marks, media = (FAMILIES | TEXTS_ALONE)[name]
    tokenizer = train_tokenizer(every_byte=True)
    tokenizer.pad_token = END
    if isinstance(marks, Mapping):
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer,
            **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END),
            extra_special_tokens=dict(marks),
        )
    else:
        tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    config, processor = make(tokenizer, {**_TEXT, "vocab_size": len(tokenizer) + 2000 * (name == "paligemma"), **text})
    torch.manual_seed(5)
    model = transformers.AutoModelForMultimodalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.generation_config = transformers.GenerationConfig(do_sample=False, bos_token_id=0, eos_token_id=0)
    model.save_pretrained(folder)
    texts = (f"{{% elif part.type == '{kind}' %}}{mark}" for kind, mark in media.items())
    processor.chat_template = TEMPLATE.replace("MEDIA", "".join(texts))
    processor.save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 40, height: int = 24) -> bytes:
    """A PNG file with noise."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
