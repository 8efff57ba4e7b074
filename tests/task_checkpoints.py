"""Tiny checkpoints with random weights for tasks that write text, hear or see; each maker fills a folder.

Tokenizers and feature extractors are made on the spot, so that nothing is fetched.
"""

from __future__ import annotations

import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import soundfile
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.checkpoints import TEXT, train_tokenizer, write_checkpoint

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
#: Seconds of sound that the tiny Whisper hears at once.
WINDOW: Final = 2
RATE: Final = 16_000
_TOWER: Final = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def word_tokenizer() -> Any:
    """A tokenizer of characters and frequent pieces that ends each text with ``</s>``, as T5's and Bart's do."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=[PAD, EOS, UNK], unk_token=UNK, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK, model_max_length=64
    )


def t5(folder: Path, **config: Any) -> Path:
    """A T5 that writes its random text until ``max_new_tokens``; ``config`` goes into config.json."""
    tokenizer = word_tokenizer()
    settings = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, initializer_factor=2.0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return _save(folder, transformers.T5ForConditionalGeneration, settings, tokenizer, config=config)


def bart(folder: Path, **config: Any) -> Path:
    """A Bart, whose learned positions end at 48."""
    tokenizer = word_tokenizer()
    settings = transformers.BartConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=48, init_std=0.5,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1, forced_eos_token_id=1,
    )  # fmt: skip
    return _save(folder, transformers.BartForConditionalGeneration, settings, tokenizer, config=config)


def nllb(folder: Path) -> Path:
    """A translator between three languages, each with a token of its own."""
    characters = sorted(set("▁" + TEXT.replace(" ", "▁").replace("\n", "")))
    vocabulary = {one: index for index, one in enumerate(["<s>", PAD, EOS, UNK, *characters])}
    languages = ["eng_Latn", "deu_Latn", "fra_Latn"]
    tokenizer: Any = transformers.NllbTokenizer(
        vocab=vocabulary, merges=[], src_lang="eng_Latn", extra_special_tokens=languages
    )
    settings = transformers.M2M100Config(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, init_std=0.5,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    return _save(folder, transformers.M2M100ForConditionalGeneration, settings, tokenizer)


def whisper(folder: Path) -> Path:
    """A Whisper of two languages with windows of ``WINDOW`` seconds."""
    special = [
        "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
        "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
    ]  # fmt: skip
    stamps = [f"<|{index * 0.02:.2f}|>" for index in range(WINDOW * 50 + 1)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXT.splitlines(), trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(core.to_str())["model"]
    tokenizer: Any = transformers.WhisperTokenizer(
        vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]], unk_token=special[0]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.add_tokens(stamps)
    ids = {one: tokenizer.convert_tokens_to_ids(one) for one in special}
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW)
    settings = transformers.WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=16, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_source_positions=WINDOW * 50, max_target_positions=40, init_std=0.5,
        pad_token_id=ids[special[0]], bos_token_id=ids[special[0]], eos_token_id=ids[special[0]],
        decoder_start_token_id=ids[special[1]], suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    generation = transformers.GenerationConfig(
        max_length=30, num_beams=1, do_sample=False, is_multilingual=True,
        pad_token_id=ids[special[0]], bos_token_id=ids[special[0]], eos_token_id=ids[special[0]],
        decoder_start_token_id=ids[special[1]], no_timestamps_token_id=ids["<|notimestamps|>"],
        lang_to_id={one: ids[one] for one in ("<|en|>", "<|de|>")},
        task_to_id={one: ids[f"<|{one}|>"] for one in ("transcribe", "translate")},
        alignment_heads=[[0, 0], [0, 1]], max_initial_timestamp_index=50, return_timestamps=False,
        prev_sot_token_id=ids["<|startofprev|>"], suppress_tokens=[166, 270, len(tokenizer)],
        begin_suppress_tokens=[107],
    )  # fmt: skip
    return _save(
        folder, transformers.WhisperForConditionalGeneration, settings, tokenizer, extractor, generation=generation
    )


def ctc(folder: Path) -> Path:
    """A Wav2Vec2 that names a random character for every 20 ms."""
    characters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({character: index for index, character in enumerate(characters)}))
    tokenizer: Any = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=True)
    settings = transformers.Wav2Vec2Config(
        vocab_size=len(characters), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        conv_dim=(16,) * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, feat_extract_norm="layer",
        pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    return _save(folder, transformers.Wav2Vec2ForCTC, settings, tokenizer, extractor)


def sounds(folder: Path) -> Path:
    """A Wav2Vec2 that classifies sound."""
    settings = transformers.Wav2Vec2Config(
        vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        conv_dim=(16,) * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, classifier_proj_size=16,
        id2label={0: "speech", 1: "music", 2: "noise"}, label2id={"speech": 0, "music": 1, "noise": 2},
    )  # fmt: skip
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    return _save(folder, transformers.Wav2Vec2ForSequenceClassification, settings, extractor)


def vit(folder: Path, labels: int = 7, *, head: str = "ViTForImageClassification", **config: Any) -> Path:
    """A ViT for images of 32 by 32 pixels."""
    names = {index: f"thing {index}" for index in range(labels)}
    settings = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        id2label=names, label2id={name: index for index, name in names.items()}, initializer_range=0.5, **config,
    )  # fmt: skip
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    return _save(folder, getattr(transformers, head), settings, processor)


def detector(folder: Path) -> Path:
    """A YOLOS, which finds objects."""
    settings = transformers.YolosConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=[32, 32],
        patch_size=8, num_detection_tokens=4, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
        initializer_range=0.5,
    )  # fmt: skip
    processor = transformers.YolosImageProcessorPil(size={"height": 32, "width": 32})
    return _save(folder, transformers.YolosForObjectDetection, settings, processor)


def depth(folder: Path) -> Path:
    """A DPT, which answers an image with an image."""
    settings = transformers.DPTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, readout_type="project",
        reassemble_factors=[4, 2, 1, 0.5], is_hybrid=False, initializer_range=0.2,
    )  # fmt: skip
    processor = transformers.DPTImageProcessorPil(size={"height": 32, "width": 32})
    return _save(folder, transformers.DPTForDepthEstimation, settings, processor)


def clip(folder: Path) -> Path:
    """A CLIP, which compares images with texts."""
    tokenizer: Any = word_tokenizer()
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": 1}
    settings = transformers.CLIPConfig(
        text_config={**_TOWER, **text, "pad_token_id": 0},
        vision_config={**_TOWER, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    processor = transformers.CLIPImageProcessorPil(
        size={"height": 32, "width": 32}, crop_size={"height": 32, "width": 32}
    )
    return _save(folder, transformers.CLIPModel, settings, tokenizer, processor)


def siglip(folder: Path) -> Path:
    """A SigLIP for texts of 16 tokens, whose network takes no attention mask."""
    text = {"vocab_size": 120, "max_position_embeddings": 16, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    settings = transformers.SiglipConfig(
        text_config={**_TOWER, **text}, vision_config={**_TOWER, "image_size": 32, "patch_size": 8}
    )
    processor = transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32})
    _save(folder, transformers.SiglipModel, settings, word_tokenizer(), processor)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_input_names": ["input_ids"]}))
    return folder


def siglip2(folder: Path) -> Path:
    """A SigLIP2, which keeps the proportions of images."""
    characters = sorted(set("▁" + TEXT.lower().replace(" ", "▁").replace("\n", "")))
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *characters]
    tokenizer: Any = transformers.Siglip2Tokenizer(vocab={token: id for id, token in enumerate(tokens)})
    text = {"vocab_size": len(tokens), "max_position_embeddings": 64, "pad_token_id": 0}
    settings = transformers.Siglip2Config(
        text_config={**_TOWER, **text, "eos_token_id": 1, "bos_token_id": 2},
        vision_config={**_TOWER, "num_patches": 16},
    )  # fmt: skip
    return _save(folder, transformers.Siglip2Model, settings, tokenizer, transformers.Siglip2ImageProcessorPil())


def align(folder: Path) -> Path:
    """An ALIGN: a BERT, and convolutions for images."""
    vision = {"image_size": 32, "hidden_dim": 64, "depth_divisor": 8, "width_coefficient": 0.1}
    settings = transformers.AlignConfig(
        text_config={**_TOWER, "vocab_size": 120, "max_position_embeddings": 64},
        vision_config={**vision, "depth_coefficient": 0.1}, projection_dim=32,
    )  # fmt: skip
    size = {"height": 32, "width": 32}
    processor = transformers.EfficientNetImageProcessorPil(size=size, crop_size=size)
    return _save(folder, transformers.AlignModel, settings, word_tokenizer(), processor)


def chinese_clip(folder: Path) -> Path:
    """A Chinese-CLIP, whose texts are read by a BERT."""
    settings = transformers.ChineseCLIPConfig(
        text_config={**_TOWER, "vocab_size": 120, "max_position_embeddings": 64},
        vision_config={**_TOWER, "image_size": 32, "patch_size": 8}, projection_dim=16,
    )  # fmt: skip
    size = {"height": 32, "width": 32}
    processor = transformers.ChineseCLIPImageProcessorPil(size=size, crop_size=size)
    return _save(folder, transformers.ChineseCLIPModel, settings, word_tokenizer(), processor)


def colqwen2(folder: Path, kind: str = "qwen2_vl") -> Path:
    """A ColQwen2 (over ``qwen2_5_vl``: ColQwen2.5), which embeds pages of documents and queries."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_byte_pairs(special), pad_token=special[0], eos_token=special[0],
        extra_special_tokens=special[1:], model_max_length=512, padding_side="left",
    )  # fmt: skip
    names = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {**_TOWER, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "mlp_ratio": 2}
    else:
        vision |= {"out_hidden_size": 32, "intermediate_size": 64, "fullatt_block_indexes": [0]}
    settings = transformers.ColQwen2Config(
        vlm_config={
            "model_type": kind, "text_config": {**text, "vocab_size": len(tokenizer), "pad_token_id": 0},
            "vision_config": vision, **names,
        },
        embedding_dim=8, initializer_range=0.4,
    )  # fmt: skip
    images = transformers.Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=16 * 16, max_pixels=64 * 64)
    processor = transformers.ColQwen2Processor(images, tokenizer)
    return _save(folder, transformers.ColQwen2ForRetrieval, settings, processor)


def colpali(folder: Path) -> Path:
    """A ColPali, which embeds pages of documents and queries."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<image>"]
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_byte_pairs(special), pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
        unk_token="<unk>", model_max_length=1500,
    )  # fmt: skip
    images: Any = transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    processor = transformers.ColPaliProcessor(images, tokenizer)
    text = {**_TOWER, "model_type": "gemma", "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    vision = {**_TOWER, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, "projection_dim": 32}
    text |= {"vocab_size": len(tokenizer), "initializer_range": 0.4}
    settings = transformers.ColPaliConfig(
        vlm_config={
            "model_type": "paligemma", "text_config": text, "vision_config": vision, "projection_dim": 32,
            "hidden_size": 32, "image_token_index": processor.image_token_id,
        },
        text_config=text, embedding_dim=8, initializer_range=0.4,
    )  # fmt: skip
    return _save(folder, transformers.ColPaliForRetrieval, settings, processor)


def _byte_pairs(special: list[str]) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXT.splitlines(), trainer)
    return core


def speaker(folder: Path) -> Path:
    """A VITS, which speaks."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = ["<pad>", "<unk>", *" abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.json").write_text(json.dumps({character: index for index, character in enumerate(characters)}))
    tokenizer: Any = transformers.VitsTokenizer(str(folder / "vocab.json"), phonemize=False, is_uroman=False)
    settings = transformers.VitsConfig(
        vocab_size=len(characters), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16,
        flow_size=16, spectrogram_bins=9, upsample_initial_channel=16, upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1]], wavenet_dilation_rate=1,
        posterior_encoder_num_wavenet_layers=2, prior_encoder_num_flows=2, prior_encoder_num_wavenet_layers=2,
        duration_predictor_num_flows=2, depth_separable_num_layers=1, duration_predictor_filter_channels=16,
        sampling_rate=8000,
    )  # fmt: skip
    return _save(folder, transformers.VitsModel, settings, tokenizer)


def causal(folder: Path) -> Path:
    """A Llama that continues text."""
    write_checkpoint(folder, transformers.LlamaConfig, {"intermediate_size": 64}, train_tokenizer(), 3)
    return folder


def tone(seconds: float, rate: int = RATE, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Samples of a changing tone with some noise, FP32 between -1 and 1."""
    times = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(0, 0.02, len(times))
    samples = 0.4 * np.sin(2 * np.pi * (200 + 150 * np.sin(times * 3 + seed)) * times) + noise
    return samples.astype(np.float32)


def sound_file(samples: Any, rate: int = RATE, format: str = "WAV", subtype: str | None = None) -> bytes:
    """``[samples]`` or ``[samples, channels]`` as a file."""
    file = BytesIO()
    soundfile.write(file, samples, rate, subtype, format=format)
    return file.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file, for files that say what they do not hold."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def image_file(width: int = 40, height: int = 30, seed: int = 0, format: str = "PNG", mode: str = "RGB") -> bytes:
    """An image of random pixels as a file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, format)
    return file.getvalue()


def _save(
    folder: Path, model: Any, settings: Any, *parts: Any, config: dict[str, Any] | None = None, generation: Any = None
) -> Path:
    """Random weights and whatever belongs to them, as ``save_pretrained`` writes them."""
    torch.manual_seed(5)
    made = model(settings).eval()
    if generation is not None:
        made.generation_config = generation
    made.save_pretrained(folder)
    for part in parts:
        part.save_pretrained(folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder
