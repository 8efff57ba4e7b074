"""Tiny tokenizers: the model's own class, trained on a few lines, or one that works for any model."""

from __future__ import annotations

from typing import Any, Final

TEXTS: Final = (
    "I am going to the market in the morning. How can you be sure that the station is open?",
    "Where is the nearest library? The nearest one is near the station. You can walk there, or take a bus.",
    "A program takes a list of numbers and returns the even ones. I am working on it with a friend, today!",
    "Anna Smith works at the library in Berlin, near the station; she takes bus 42 in the morning.",
)
_SIZE: Final = 200


def make_tokenizer(kind: str, max_length: int) -> Any:
    """Return a tokenizer for models of the ``model_type`` ``kind`` with at most ``most`` tokens."""
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    name = TOKENIZER_MAPPING_NAMES.get(kind)
    if name is not None:
        try:
            made = getattr(transformers, name)().train_new_from_iterator(TEXTS, _SIZE)
            # Some classes cannot be created without files, or read attributes that only other inputs have.
            if len(made) <= max_length and made(TEXTS[0])["input_ids"]:
                return made
        except Exception:
            return _generic()
    return _generic()


def _generic() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=_SIZE, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=100,
        model_input_names=["input_ids", "attention_mask"],
    )
