"""The task that the files of a checkpoint tell."""

from __future__ import annotations

from typing import Any

import pytest

from conch.checkpoints.task import canonical, misfit, pipeline_tag, suggested_task, task_of


def told(architecture: str, kind: str = "bert", **others: Any) -> str:
    inner = others.pop("config", {})
    return task_of({"architectures": [architecture], "model_type": kind, **inner}, **others)


@pytest.mark.parametrize(
    ("architecture", "kind", "task"),
    [
        ("BertModel", "bert", "feature-extraction"),
        ("BertForMaskedLM", "bert", "fill-mask"),
        ("BertForTokenClassification", "bert", "token-classification"),
        ("BertForQuestionAnswering", "bert", "question-answering"),
        ("XLMForQuestionAnsweringSimple", "xlm", "question-answering"),
        ("BertForSequenceClassification", "bert", "text-classification"),
        ("ViTForImageClassification", "vit", "image-classification"),
        ("WhisperForConditionalGeneration", "whisper", "automatic-speech-recognition"),
        ("Wav2Vec2ForCTC", "wav2vec2", "automatic-speech-recognition"),
        ("Wav2Vec2ForSequenceClassification", "wav2vec2", "audio-classification"),
        ("MarianMTModel", "marian", "translation"),
        ("T5ForConditionalGeneration", "t5", "text2text-generation"),
        ("Qwen2ForCausalLM", "qwen2", "text-generation"),
        ("GPT2LMHeadModel", "gpt2", "text-generation"),
        ("BertGenerationDecoder", "bert-generation", "text-generation"),
        ("ReformerModelWithLMHead", "reformer", "text-generation"),
        ("EncoderDecoderModel", "encoder-decoder", "text2text-generation"),
        ("T5WithLMHeadModel", "t5", "text2text-generation"),
        ("SeamlessM4TForTextToText", "seamless_m4t", "text2text-generation"),
        ("CLIPModel", "clip", "zero-shot-image-classification"),
        ("DetrForObjectDetection", "detr", "object-detection"),
    ],
)
def test_architecture_tells_the_task(architecture: str, kind: str, task: str) -> None:
    assert told(architecture, kind) == task


def test_classifier_of_one_class_ranks() -> None:
    assert told("BertForSequenceClassification", labels=1) == "text-ranking"
    assert told("BertForSequenceClassification", labels=1, card="text-classification") == "text-ranking"
    assert told("BertForSequenceClassification", labels=3) == "text-classification"


@pytest.mark.parametrize(
    "saved",
    [
        {"family": "CrossEncoder"},
        {"config": {"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid", "version": "5.0.0"}}},
        {"config": {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}},
    ],
)
def test_a_cross_encoder_of_sentence_transformers_ranks(saved: dict[str, Any]) -> None:
    classifier = "BertForSequenceClassification"
    # sentence-transformers writes this card for several classes.
    assert told(classifier, labels=3, card="text-classification", **saved) == "text-ranking"
    assert told(classifier, labels=3, card="zero-shot-classification", **saved) == "zero-shot-classification"
    assert told("Qwen3ForCausalLM", "qwen3", **saved) == "text-ranking"


def test_a_language_model_ranks_if_its_card_tells() -> None:
    assert told("Qwen3ForCausalLM", "qwen3", card="text-ranking") == "text-ranking"
    assert told("Qwen3ForCausalLM", "qwen3") == "text-generation"


def test_model_card_tells_a_classifier_for_any_label() -> None:
    task = told("BartForSequenceClassification", "bart", labels=3, card="zero-shot-classification")
    assert task == "zero-shot-classification"


def test_model_card_does_not_turn_one_head_into_another() -> None:
    assert told("BertForTokenClassification", card="text-classification") == "token-classification"


@pytest.mark.parametrize(
    ("card", "params", "task"),
    [
        ("summarization", {"translation_en_to_de": {}}, "summarization"),
        ("", {"summarization": {}}, "summarization"),
        ("", {"translation_en_to_de": {}, "translation_en_to_fr": {}}, "translation"),
        ("", {"summarization": {}, "translation_en_to_de": {}}, "text2text-generation"),
        ("", None, "text2text-generation"),
    ],
)
def test_model_card_goes_before_parameters_of_tasks(card: str, params: Any, task: str) -> None:
    assert told("T5ForConditionalGeneration", "t5", card=card, config={"task_specific_params": params}) == task


def test_sentence_transformers_with_pooling_embed() -> None:
    modules = [
        {"type": "sentence_transformers.models.Transformer"},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ]
    assert told("BertForMaskedLM", modules=modules) == "feature-extraction"


def test_encoder_of_images_extracts_features_of_images() -> None:
    assert told("ViTModel", "vit", images=True) == "image-feature-extraction"


def test_model_card_tells_where_the_architecture_does_not() -> None:
    assert task_of({}, card="sentence-similarity") == "feature-extraction"
    assert told("VitsModel", "vits", card="text-to-speech") == "text-to-audio"
    assert told("SomethingNew", card="") == ""


@pytest.mark.parametrize(
    ("name", "task"),
    [("NER", "token-classification"), ("rerank", "text-ranking"), ("translation_en_to_de", "translation_en_to_de")],
)
def test_task_has_other_names_too(name: str, task: str) -> None:
    assert canonical(name) == task


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("text-clasification", "text-classification"),
        ("fill_masks", "fill-mask"),
        ("text-classification", ""),
        ("reranking", ""),
        ("translation_en_to_de", ""),
        ("a-task-of-tomorrow", ""),
        ("", ""),
    ],
)
def test_a_misspelt_task_is_distinguished_from_one_that_is_not_known(name: str, meant: str) -> None:
    assert suggested_task(name) == (f"did you mean '{meant}'?" if meant else "")


@pytest.mark.parametrize(
    ("task", "config", "fits"),
    [
        ("text-classification", {"architectures": ["BertForSequenceClassification"]}, True),
        ("zero-shot-classification", {"architectures": ["BertForSequenceClassification"]}, True),
        ("text-classification", {"architectures": ["BertForMaskedLM"]}, False),
        ("text-classification", {"architectures": ["MyModel"], "auto_map": {"AutoModel": "m.MyModel"}}, True),
        ("text-classification", {}, True),
        ("feature-extraction", {"architectures": ["BertForMaskedLM"]}, True),
        ("translation_en_to_de", {"architectures": ["T5ForConditionalGeneration"]}, True),
        ("text-generation", {"architectures": ["BertModel"]}, False),
    ],
)
def test_a_task_fits_where_an_architecture_has_its_head(task: str, config: dict[str, Any], fits: bool) -> None:
    assert (misfit(task, config) == ()) == fits


@pytest.mark.extras
def test_architectures_of_transformers_fit_their_tasks() -> None:
    from transformers.models.auto import modeling_auto

    mappings = {
        "text-classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "token-classification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "question-answering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
        "fill-mask": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "image-classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "object-detection": modeling_auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES,
        "text2text-generation": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "text-generation": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    assert {
        (task, str(names))
        for task, mapping in mappings.items()
        for names in mapping.values()
        for name in ([names] if isinstance(names, str) else names)
        if misfit(task, {"architectures": [name]})
    } == set()


@pytest.mark.parametrize(
    ("readme", "tag"),
    [
        ("---\nlicense: mit\npipeline_tag: fill-mask # comment\n---\n", "fill-mask"),
        ('---\r\npipeline_tag: "translation"\r\n---\r\n', "translation"),
        ("---\nlicense: mit\n---\npipeline_tag: fill-mask\n", ""),
        ("pipeline_tag: fill-mask", ""),
        ("", ""),
    ],
)
def test_pipeline_tag_is_in_the_front_matter(readme: str, tag: str) -> None:
    assert pipeline_tag(readme) == tag
