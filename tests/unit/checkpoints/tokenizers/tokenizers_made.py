"""Small tokenizers of the kinds that generating models have, made on the spot."""

from __future__ import annotations

from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS: Final = (
    "hello world, how are you?  I am    well.",
    "日本語のテキスト 🙂🙃 naïve café",
    "def f(x):\n    return x ** 2  # 1234",
)


def byte_level() -> Tokenizer:
    """Like GPT-2's, Llama 3's and Qwen's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    made.add_tokens(["<日 think>"])
    return made


def _sentencepiece_vocabulary() -> dict[str, int]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁▁", "a", "b", "ab", "▁a", "▁ab", "é", "日", "a▁b", "▁▁a", "<0xZZ>", "h", "e", "l", "o", "<", ">"]
    return {token: id for id, token in enumerate(tokens)}


def metaspace(*, strip: bool = True, metaspace_decoder: bool = False) -> Tokenizer:
    """Like Llama 2's (``strip``) and Gemma's: characters without a token are spelled in bytes."""
    merges = [("▁", "▁"), ("a", "b"), ("▁", "a"), ("▁", "ab"), ("▁▁", "a")]
    made = Tokenizer(
        models.BPE(
            vocab=_sentencepiece_vocabulary(), merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    chain: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metaspace_decoder:
        chain = [decoders.ByteFallback(), decoders.Metaspace("▁", "first", split=False)]
    elif strip:
        chain.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(chain)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def unigram() -> Tokenizer:
    """Like XGLM's."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁hello", -2.0), ("▁▁a", -3.0), ("b▁c", -3.0), ("x", -2.0), ("é", -3.0)]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.normalizer = normalizers.Replace("\t", " ")
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<unk>"])
    return made


def wordpiece() -> Tokenizer:
    vocabulary = {token: id for id, token in enumerate(["[UNK]", "a", "##b", ".", "n't", "'", "[SEP]"])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[UNK]", "[SEP]"])
    return made
