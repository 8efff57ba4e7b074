"""Determines the task of a checkpoint from the content of its files.

Pure functions, used by folder.py. Task names are those of transformers' pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from conch.core.errors import did_you_mean
from conch.core.sampling import TEXT_GENERATION

#: Canonical task names by alias.
ALIASES: Final[Mapping[str, str]] = {
    "embedding": "feature-extraction",
    "embeddings": "feature-extraction",
    "sentence-embedding": "feature-extraction",
    "sentence-embeddings": "feature-extraction",
    "sentence-similarity": "feature-extraction",
    "sentiment-analysis": "text-classification",
    "zero-shot": "zero-shot-classification",
    "ner": "token-classification",
    "rerank": "text-ranking",
    "reranking": "text-ranking",
    "cross-encoder": "text-ranking",
    "asr": "automatic-speech-recognition",
    "speech-recognition": "automatic-speech-recognition",
    "text2text": "text2text-generation",
    "text-to-speech": "text-to-audio",
}

#: Tasks with only text inputs; they require a tokenizer.
TEXT_TASKS: Final = frozenset({
    "feature-extraction", "text-classification", "zero-shot-classification", "text-ranking", "token-classification",
    "question-answering", "fill-mask", "summarization", "translation", "text2text-generation", TEXT_GENERATION,
})  # fmt: skip

#: Tasks with an image, video or audio input; they require a processor.
MEDIA_TASKS: Final = frozenset({
    "image-classification", "image-segmentation", "image-feature-extraction", "image-to-image", "object-detection",
    "depth-estimation", "mask-generation", "keypoint-matching", "zero-shot-image-classification",
    "zero-shot-object-detection", "video-classification", "image-text-to-text", "automatic-speech-recognition",
    "audio-classification", "zero-shot-audio-classification",
})  # fmt: skip

#: Suffixes of architecture names, with their task and other tasks that a model card may specify instead.
_HEADS: Final[Sequence[tuple[str, str, frozenset[str]]]] = (
    ("ForTokenClassification", "token-classification", frozenset()),
    ("ForTableQuestionAnswering", "table-question-answering", frozenset()),
    ("ForDocumentQuestionAnswering", "document-question-answering", frozenset()),
    ("ForVisualQuestionAnswering", "visual-question-answering", frozenset()),
    ("ForQuestionAnswering", "question-answering", frozenset({"document-question-answering"})),
    ("ForQuestionAnsweringSimple", "question-answering", frozenset()),
    ("ForMaskedLM", "fill-mask", frozenset()),
    ("ForImageClassificationWithTeacher", "image-classification", frozenset()),
    ("ForImageClassification", "image-classification", frozenset()),
    ("ForVideoClassification", "video-classification", frozenset()),
    ("ForAudioClassification", "audio-classification", frozenset()),
    ("ForSpeechSeq2Seq", "automatic-speech-recognition", frozenset()),
    ("ForCTC", "automatic-speech-recognition", frozenset()),
    ("ForZeroShotObjectDetection", "zero-shot-object-detection", frozenset()),
    ("ForObjectDetection", "object-detection", frozenset({"zero-shot-object-detection"})),
    ("ForSemanticSegmentation", "image-segmentation", frozenset()),
    ("ForInstanceSegmentation", "image-segmentation", frozenset()),
    ("ForUniversalSegmentation", "image-segmentation", frozenset()),
    ("ForImageSegmentation", "image-segmentation", frozenset()),
    ("ForDepthEstimation", "depth-estimation", frozenset()),
    ("ForRetrieval", "feature-extraction", frozenset()),
    ("ForCausalLM", TEXT_GENERATION, frozenset()),
    ("LMHeadModel", TEXT_GENERATION, frozenset()),
    ("ModelWithLMHead", TEXT_GENERATION, frozenset()),
    ("GenerationDecoder", TEXT_GENERATION, frozenset()),
)

#: Suffixes of architecture names that generate text from another input.
_WRITERS: Final = ("ForConditionalGeneration", "MTModel", "ForSeq2SeqLM", "T5WithLMHeadModel", "ForTextToText")
_TEXT_TO_TEXT: Final = frozenset({"summarization", "translation", "text2text-generation"})
_SPEECH: Final = frozenset({"whisper", "speech_to_text", "speech-encoder-decoder", "moonshine", "speecht5"})
_AUDIO: Final = frozenset({
    "wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "hubert", "wavlm", "unispeech", "unispeech-sat", "sew", "sew-d",
    "data2vec-audio", "whisper",
})  # fmt: skip
_ALWAYS_TRANSLATES: Final = frozenset({"marian", "m2m_100", "nllb-moe", "fsmt"})
#: Model types of networks that embed texts and images into one space.
CONTRASTIVE: Final = frozenset({"clip", "siglip", "siglip2", "align", "altclip", "chinese_clip", "metaclip_2"})

#: Model types that chat about images or sound, with a language model that reads their features like tokens.
CONVERSATIONAL: Final = frozenset({
    "aria", "aya_vision", "cohere2_vision", "gemma3", "gemma3n", "gemma4", "glm4v", "glm4v_moe", "glmasr", "idefics3",
    "internvl", "lfm2_vl", "llava", "llava_next", "llava_onevision", "mistral3", "ovis2", "paligemma", "qwen2_audio",
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "vipllava", "voxtral",
})  # fmt: skip
#: The names of tasks in model cards.
_CHATS: Final = frozenset({"", "transformers", "image-text-to-text", "audio-text-to-text", "any-to-any"})

#: The class of sentence-transformers for pairs of texts, and the architecture in folders of Stanford's ColBERT.
CROSS_ENCODER: Final = "CrossEncoder"
COLBERT: Final = "HF_ColBERT"

#: Parts of architecture names with the head of a task, for tasks that require that head.
_ARCHITECTURES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("text-classification", "zero-shot-classification"), ("ForSequenceClassification",)),
    "text-ranking": ("ForSequenceClassification", "ForCausalLM", "LMHeadModel"),
    "token-classification": ("ForTokenClassification",),
    "question-answering": ("ForQuestionAnswering",),
    "fill-mask": ("ForMaskedLM", "ForPreTraining", "WithLMHeadModel", "ForConditionalGeneration"),
    "image-classification": ("ForImageClassification",),
    "object-detection": ("ForObjectDetection",),
    **dict.fromkeys(
        ("summarization", "translation", "text2text-generation"),
        (
            "ForConditionalGeneration",
            "MTModel",
            "ForSeq2SeqLM",
            "ForTextToText",
            "WithLMHeadModel",
            "EncoderDecoderModel",
        ),
    ),
    TEXT_GENERATION: ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ModelWithLMHead", "GenerationDecoder"),
}

#: All known task names, including aliases.
TASK_NAMES: Final = TEXT_TASKS | MEDIA_TASKS | _ARCHITECTURES.keys() | ALIASES.keys() | {task for _, task, _ in _HEADS}


def misfit(task: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts of architecture names that ``task`` requires, if the checkpoint has none of them.

    Empty if it has one, if its configuration names no architecture, or if it has its own code.
    """
    architectures = config.get("architectures") or ()
    suffixes = _ARCHITECTURES.get("translation" if task.startswith("translation_") else task, ())
    if not suffixes or not architectures or config.get("auto_map"):
        return ()
    return () if any(part in str(name) for name in architectures for part in suffixes) else suffixes


def suggested_task(task: str) -> str:
    """Return a suggestion of the task name that ``task`` misspells; empty for a known name or one similar to none."""
    name = canonical(task)
    if not name or name in TASK_NAMES or name.startswith("translation_"):
        return ""
    return did_you_mean(name, TASK_NAMES, likeness=0.85)


def canonical(task: str) -> str:
    """Return the canonical name of a task; unknown names are only normalised."""
    lower = task.strip().lower().replace("_", "-") if not task.startswith("translation_") else task.strip()
    return ALIASES.get(lower, lower)


def takes_sound(kind: str) -> bool:
    """Whether networks of this ``model_type`` read only audio."""
    return kind in _AUDIO


def task_of(
    config: Mapping[str, Any],
    *,
    labels: int | None = None,
    modules: Sequence[Mapping[str, Any]] | None = None,
    family: str = "",
    card: str = "",
    images: bool = False,
) -> str:
    """Return the task of a checkpoint; empty if it cannot be determined.

    ``config`` is its config.json, ``labels`` the number of classes, ``modules`` the sentence-transformers modules and
    ``family`` the class of sentence-transformers that saved them, ``card`` the README's ``pipeline_tag``; ``images`` is
    true if it has an image preprocessor.
    """
    card = canonical(card)
    # All families but cross-encoders embed texts; a module that is not served is refused by its name.
    if (modules and family != CROSS_ENCODER) or COLBERT in (config.get("architectures") or ()):
        return "feature-extraction"
    if family == CROSS_ENCODER or _is_old_cross_encoder(config):
        return card if card == "zero-shot-classification" else "text-ranking"
    kind = str(config.get("model_type", ""))
    for architecture in config.get("architectures") or ():
        task = _task_of_architecture(str(architecture), kind, config, labels, card, images)
        if task:
            return task
    return card


def _is_old_cross_encoder(config: Mapping[str, Any]) -> bool:
    """Whether sentence-transformers before version 6 saved a CrossEncoder, which only config.json tells."""
    settings = config.get("sentence_transformers")
    saved = isinstance(settings, Mapping) and "activation_fn" in settings
    return saved or bool(config.get("sbert_ce_default_activation_function"))


def _task_of_architecture(
    architecture: str, kind: str, config: Mapping[str, Any], labels: int | None, card: str, images: bool
) -> str:
    if architecture.endswith("ForSequenceClassification"):
        return _classification(kind, labels, card)
    if card == "text-ranking" and architecture.endswith("ForCausalLM"):
        return card
    if kind == "encoder-decoder" or architecture.endswith(_WRITERS):
        return _generation(architecture, kind, config, card)
    for ending, task, others in _HEADS:
        if architecture.endswith(ending):
            return card if card in others else task
    if card in ("", "transformers") and architecture.endswith(("Model", "Encoder")):
        if kind in CONTRASTIVE:
            return "zero-shot-image-classification"
        return "image-feature-extraction" if images else "feature-extraction"
    return ""


def _classification(kind: str, labels: int | None, card: str) -> str:
    if kind in _AUDIO:
        return "audio-classification"
    if labels == 1:
        return "text-ranking"
    return card if card in ("zero-shot-classification", "text-ranking") else "text-classification"


def _generation(architecture: str, kind: str, config: Mapping[str, Any], card: str) -> str:
    if kind in _SPEECH or architecture.startswith("Whisper"):
        return card if card == "text-to-audio" else "automatic-speech-recognition"
    if kind in CONVERSATIONAL and card in _CHATS:
        return TEXT_GENERATION
    if config.get("vision_config") or config.get("audio_config"):
        return card or ("image-text-to-text" if config.get("vision_config") else "")
    if card in _TEXT_TO_TEXT:
        return card
    if kind in _ALWAYS_TRANSLATES:
        return "translation"
    tasks = {
        "translation" if name.startswith("translation") else name for name in config.get("task_specific_params") or ()
    }
    named = tasks & _TEXT_TO_TEXT
    return named.pop() if len(named) == 1 else "text2text-generation"


def pipeline_tag(readme: str) -> str:
    """Return the ``pipeline_tag`` in the front matter of a model card; empty if none."""
    lines = readme.lstrip("\ufeff").splitlines()
    if not lines or lines[0].strip() != "---":
        return ""
    for line in lines[1:]:
        if line.strip() == "---":
            break
        name, colon, value = line.partition(":")
        if colon and name == "pipeline_tag":
            return value.split("#")[0].strip().strip("\"'")
    return ""
