"""Opens the tokenizer of a checkpoint: from tokenizer.json, from a GGUF file, or else through transformers.

Used by workers when a model is loaded, and by ``conch convert``. ``tokenizers`` and transformers are imported only if a
checkpoint needs them. A GGUF file contains the vocabulary and the merges, but only the name of the rule that splits
text before merging. The rules are defined in llama.cpp (``src/llama-vocab.cpp``), the source of the expressions and
flags below. docs/decisions/0009 explains why transformers' reader is not used.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf import GgufFile
from conch.checkpoints.tokenizers.chat import SECONDS, ChatTemplate, read_file, templates_of
from conch.checkpoints.tokenizers.fast import FastTokenizer
from conch.checkpoints.tokenizers.stream import TextStream, decoder_of, open_stream
from conch.checkpoints.tokenizers.tokenizer import (
    ROLES,
    Side,
    SpecialTokens,
    TextTokenizer,
    Tokens,
    Truncation,
    add_missing,
    put_around,
    refused,
    texts_by_role,
)
from conch.core.errors import ConchError, invalid, one_line, unsupported
from conch.machine import extras

#: Token types in GGUF.
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
#: GGUF's names of the roles of tokens.
_ROLES: Final[Mapping[str, str]] = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # spelt so in GGUF
    "cls_token": "cls",
    "mask_token": "mask",
}
#: The ids of roles in a WordPiece vocabulary whose file does not have them.
_WORDPIECE_IDS: Final[Mapping[str, int]] = {
    "bos_token": 101, "sep_token": 102, "unk_token": 100, "pad_token": 0, "mask_token": 103,
}  # fmt: skip
#: GGUF's names of the tokens that end a text, a turn, and a message to a tool.
_ENDS: Final = ("eos", "eot", "eom")
_TEMPLATE: Final = "tokenizer.chat_template"
#: The greatest sum of squared lengths of tokens (characters) for which merges are derived from scores; it limits the
#: time to about 10 s. Vocabularies of 256,000 tokens have 20 million.
_MOST_CUTS: Final = 1 << 30

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?"
_CODE_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN: Final = f"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\\p{{N}}{_CODE_TAIL}"
_GPT4O: Final = f"{_WORD}{_UPPER}*{_LOWER}+{_ENDING}|{_WORD}{_UPPER}+{_LOWER}*{_ENDING}|\\p{{N}}{{1,3}}{_CODE_TAIL}"
_LLAMA3_NAMES: Final = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
)  # fmt: skip
#: The expressions that split text before merging, applied in order, by ``tokenizer.ggml.pre``.
_SPLITS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0",
            "mellum", "exaone4", "modern-bert", "jina-v1-en", "roberta-bpe",
        ),
        (_GPT2,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)
    ),
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "kormo", "f2llmv2"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie"), (_GPT4O,)),
}  # fmt: skip
#: Rules of models that use a piece of text as one token if the vocabulary has it, without applying merges. By default,
#: their texts begin with a BOS token.
_LIKE_LLAMA3: Final = frozenset({*_LLAMA3_NAMES, "tekken"})
#: Rules of models that first normalise text to NFC.
_COMPOSED: Final = frozenset({"qwen2", "deepseek-r1-qwen"})
#: Rules of models that put two tokens between the texts of a pair.
_LIKE_ROBERTA: Final = frozenset({"jina-v1-en", "roberta-bpe"})


def open_gguf(file: GgufFile, templates: Mapping[str, str] | None = None, *, extra: str = "") -> FastTokenizer:
    """Open the tokenizer of a GGUF file; ``templates`` replaces its chat templates.

    ``extra`` is the pip extra of the engine. Raises INVALID_ARG for a file that cannot be read, UNSUPPORTED if
    ``tokenizers`` is not installed.
    """
    path = file.path
    tokens = file.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise invalid(f"{path} has no tokenizer: tokenizer.ggml.tokens is missing")
    kinds = file.numbers("tokenizer.ggml.token_type")
    if kinds and len(kinds) != len(tokens):
        raise invalid(f"{path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    model = file.text("tokenizer.ggml.model")
    build = _BUILDERS.get(model)
    if build is None:
        *others, last = _BUILDERS
        known = f"{', '.join(others)} and {last}"
        raise invalid(f"{path} has a tokenizer of kind '{model}'; those of kind {known} are read")
    ids = {role: id for role, name in _ROLES.items() if (id := file.token(name)) is not None}
    if model == "bert":
        ids = {role: id for role, id in _WORDPIECE_IDS.items() if id < len(tokens)} | ids
        ids["eos_token"] = ids.get("sep_token", len(tokens) - 1)
    roles = {role: tokens[id] for role, id in ids.items()}
    extras.require(str(path), "tokenizers", extra=extra)
    from tokenizers import AddedToken

    marked = [(text, kind) for text, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    special = [AddedToken(text, special=True, normalized=False) for text, kind in marked if kind == _CONTROL]
    framed = model == "bert"  # always
    begins = framed or file.flag("tokenizer.ggml.add_bos_token", model == "llama" or _division(file) in _LIKE_LLAMA3)
    ends = framed or file.flag("tokenizer.ggml.add_eos_token", model == "t5")
    double = not framed and file.flag("tokenizer.ggml.add_sep_token", model == "t5" or _division(file) in _LIKE_ROBERTA)
    try:
        fast = build(file, tokens, roles)
        fast.add_special_tokens(
            [*special, *(AddedToken(text, special=True, normalized=False) for text in roles.values())]
        )
        fast.add_tokens([AddedToken(text, normalized=False) for text, kind in marked if kind == _USER_DEFINED])
        eos = roles.get("eos_token") if ends else None
        between = [token for token in (eos, roles.get("sep_token", eos) if double else None) if token]
        put_around(fast, roles.get("bos_token") if begins else None, eos, between)
    except (ConchError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        raise invalid(f"the tokenizer in {path} cannot be read: {one_line(error)}") from None
    special_ids = (id for id, token in fast.get_added_tokens_decoder().items() if token.special)
    eos_ids = dict.fromkeys(id for name in _ENDS if (id := file.token(name)) is not None)
    # Not by looking up texts, because a vocabulary may contain the same text twice.
    by_text = {roles[role]: id for role, id in ids.items()}
    return FastTokenizer(
        fast,
        SpecialTokens.of(roles, by_text.get, special_ids, eos_ids=eos_ids),
        ChatTemplate(_templates(file) if templates is None else templates, roles, str(path)),
    )


def _templates(file: GgufFile) -> dict[str, str]:
    named = {key.removeprefix(f"{_TEMPLATE}."): key for key in file.metadata if key.startswith(f"{_TEMPLATE}.")}
    templates = {name: file.text(key) for name, key in named.items()}
    return ({"default": main} if (main := file.text(_TEMPLATE)) else {}) | templates


def _division(file: GgufFile) -> str:
    """Return the name of the rule that splits text; old GPT-2 files have no name and use GPT-2's rule."""
    name = file.text("tokenizer.ggml.pre", "default")
    return "gpt-2" if name == "default" and file.text("general.architecture") == "gpt2" else name


def _byte_level(file: GgufFile, tokens: Sequence[str], roles: Mapping[str, str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    division = _division(file)
    splits = _SPLITS.get(division)
    if splits is None:
        raise invalid(
            f"{file.path} does not name its pre-tokenizer (tokenizer.ggml.pre): serve the original checkpoint"
            if division == "default"
            else f"{file.path} divides text by '{division}', which is not known here: serve the original checkpoint"
        )
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = _merges(file, vocabulary)
    if not merges:
        raise invalid(f"{file.path} has no tokenizer: tokenizer.ggml.merges is missing")
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=division in _LIKE_LLAMA3))
    if division in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: Sequence[str], roles: Mapping[str, str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = _scores(file, tokens)
    # Gemma's runs of spaces are stored unescaped.
    respelled = [token.replace(" ", "▁") if token.isspace() and " " in token else token for token in tokens]
    vocabulary = {token: id for id, token in enumerate(respelled)}
    ranks = scores
    if file.text("general.architecture").startswith("gemma"):
        ranks = [-id for id in range(len(tokens))]  # its scores do not rank its merges
    merges = _merges(file, vocabulary)
    if not merges and sum(len(token) ** 2 for token in tokens) > _MOST_CUTS:
        raise invalid(f"{file.path}: the texts in tokenizer.ggml.tokens are longer than those of any model")
    unknown = roles.get("unk_token")
    tokenizer: Any = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges or merges_of(vocabulary, ranks),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaced = file.flag("tokenizer.ggml.add_space_prefix", True)
    if spaced and file.text("general.architecture") == "phi3":
        # Phi-3 prepends a space even to a text that begins with one; no metadata key specifies this.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first" if spaced else "never", split=False)
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if spaced else chain)
    return tokenizer


def _wordpiece(file: GgufFile, tokens: Sequence[str], roles: Mapping[str, str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    kinds = file.numbers("tokenizer.ggml.token_type")
    special = {token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL} | set(roles.values())
    vocabulary = {_spelled(token, special): id for id, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=roles.get("unk_token", "[UNK]")))
    lower = file.flag("tokenizer.ggml.normalizer.lowercase", True)
    accents = file.flag("tokenizer.ggml.normalizer.strip_accents", lower)
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=accents, lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _spelled(token: str, special: Collection[str]) -> str:
    """Return a token of a WordPiece vocabulary as BERT spells it; llama.cpp marks the beginnings of words instead."""
    if token in special:
        return token
    return token[1:] if token.startswith("▁") else f"##{token}"


def _unigram(file: GgufFile, tokens: Sequence[str], roles: Mapping[str, str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = file.token("unknown")
    if unknown is None:
        raise invalid(f"{file.path}: tokenizer.ggml.unknown_token_id is missing")
    tokenizer: Any = Tokenizer(models.Unigram(list(zip(tokens, _scores(file, tokens), strict=True)), unknown))
    if charsmap := bytes(number & 255 for number in file.numbers("tokenizer.ggml.precompiled_charsmap")):
        tokenizer.normalizer = normalizers.Precompiled(charsmap)
    spaced = file.flag("tokenizer.ggml.add_space_prefix", True)
    marks = pre_tokenizers.Metaspace("▁", "always" if spaced else "never")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    tokenizer.decoder = decoders.Metaspace("▁", "always" if spaced else "never")
    return tokenizer


def _scores(file: GgufFile, tokens: Sequence[str]) -> list[float]:
    """Return the scores of all tokens. Raises INVALID_ARG for other tokens, and for scores that are not numbers."""
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise invalid(f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    if any(map(math.isnan, scores)):
        raise invalid(f"{file.path}: tokenizer.ggml.scores must be numbers, and some are NaN")
    return scores


#: Builders of tokenizers by ``tokenizer.ggml.model``.
_BUILDERS: Final = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _wordpiece, "t5": _unigram}


def merges_of(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary: all pairs of tokens that form a token, best scores first."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, id in vocabulary.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in vocabulary and second in vocabulary:
                merges.append((-scores[id], vocabulary[first], vocabulary[second], first, second))
    merges.sort()
    return [(first, second) for *_, first, second in merges]


def _merges(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges in a file. Raises INVALID_ARG for one whose parts or result are not in the vocabulary."""
    merges: list[tuple[str, str]] = []
    for number, merge in enumerate(file.texts("tokenizer.ggml.merges")):
        first, _, second = merge.partition(" ")
        unknown = next((text for text in (first, second, first + second) if text not in vocabulary), None)
        if unknown is not None:
            raise invalid(
                f"{file.path}: merge {number} in tokenizer.ggml.merges, {merge[:100]!r}, needs the token "
                f"{unknown[:100]!r}, which tokenizer.ggml.tokens lacks"
            )
        merges.append((first, second))
    return merges


class SlowTokenizer(TextTokenizer):
    """A tokenizer written in Python: ``slow`` is a ``PreTrainedTokenizer`` of transformers."""

    fast = None

    def __init__(self, slow: Any, special: SpecialTokens, template: ChatTemplate, *, types: bool = False) -> None:
        self._slow = slow
        self._lock = Lock()
        self.special = special
        self.template = template
        self.vocabulary = len(slow)
        self.types = types
        self.side = slow.truncation_side

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._encoded("the text", text, add_special_tokens=special_tokens)["input_ids"]
        return ids

    def encode_texts(
        self,
        texts: Sequence[str],
        limit: int,
        *,
        types: bool = False,
        offsets: bool = False,
        name: str = "the text",
        side: Side | None = None,
    ) -> Iterator[Tokens]:
        self._check_side(side)
        for text in texts:
            yield self._tokens(name, text, None, limit, types, "longest")

    def encode_pairs(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str],
        limit: int,
        *,
        types: bool = False,
        truncation: Truncation = "longest",
        names: tuple[str, str] = ("the text", "the text"),
        side: Side | None = None,
    ) -> Iterator[Tokens]:
        self._check_side(side)
        for first, second in zip(firsts, seconds, strict=True):
            yield self._tokens(names[0], first, second, limit, types, truncation)

    def special_token_count(self, *, pair: bool) -> int:
        return int(self._slow.num_special_tokens_to_add(pair))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, clean_up: bool = False) -> str:
        with self._lock:
            return str(
                self._slow.decode(
                    list(ids),
                    skip_special_tokens=skip_special_tokens,
                    clean_up_tokenization_spaces=None if clean_up else False,  # None: use the tokenizer's setting
                )
            )

    def token(self, id: int) -> str:
        with self._lock:
            return str(self._slow.convert_ids_to_tokens(id))

    def join(self, tokens: Sequence[str]) -> str:
        with self._lock:
            return str(self._slow.convert_tokens_to_string(list(tokens)))

    def piece(self, id: int) -> str:
        return self.decode([id], skip_special_tokens=False)

    def stream(
        self, *, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset(), after: Sequence[int] = ()
    ) -> TextStream:
        decode = decoder_of(self.decode, self.special.all_ids, skip=skip_special_tokens, kept=kept)
        return open_stream(None, decode, after)

    def _check_side(self, side: Side | None) -> None:
        """Raise UNSUPPORTED for the other side than the tokenizer's own, which threads share."""
        if side not in (None, self.side):
            raise unsupported(f"this tokenizer truncates texts on the {self.side} only")

    def _tokens(
        self, name: str, text: str, pair: str | None, limit: int, types: bool, truncation: Truncation
    ) -> Tokens:
        encoded = self._encoded(name, text, pair, truncation=False)
        length = len(encoded["input_ids"])
        if length > limit:
            strategy = "only_first" if truncation == "first" else "longest_first"
            encoded = self._encoded(name, text, pair, truncation=strategy, max_length=limit)
        type_ids = encoded.get("token_type_ids") if types else None
        return Tokens(
            np.array(encoded["input_ids"], np.int64), None if type_ids is None else np.array(type_ids, np.int64), length
        )

    def _encoded(self, name: str, *texts: str | None, **settings: Any) -> dict[str, Any]:
        try:
            with self._lock:
                return dict(self._slow(*texts, verbose=False, **settings))
        except BaseException as error:
            raise refused(error, name) from None


#: The name of token types in tokenizers; ``model_input_names`` has it if the network gets them.
TYPES: Final = "token_type_ids"


def open_tokenizer(checkpoint: Checkpoint, *, chat_template: Path | None = None) -> TextTokenizer:
    """Open the tokenizer of a checkpoint; ``chat_template`` is a file that replaces its own template.

    Raises INVALID_ARG for files that cannot be read, UNSUPPORTED if a library is missing.
    """
    tokenizer = _opened(checkpoint, read_file(chat_template) if chat_template is not None else None)
    tokenizer.template.seconds = _template_seconds(checkpoint)
    tokenizer.template.replaced = chat_template is not None
    return tokenizer


def _template_seconds(checkpoint: Checkpoint) -> float:
    seconds = checkpoint.options.number("chat_template_timeout", SECONDS)
    if seconds <= 0:
        raise invalid(f"parameter 'chat_template_timeout' is {seconds:g}; it must be more than 0")
    return seconds


def _opened(checkpoint: Checkpoint, replaced: dict[str, str] | None) -> TextTokenizer:
    """Open the tokenizer with the chat templates in ``replaced``, or with those of the checkpoint if it is None."""
    if checkpoint.gguf is not None:
        return open_gguf(checkpoint.gguf, replaced, extra=checkpoint.extra)
    settings = checkpoint.json("tokenizer_config.json") or {}
    templates = templates_of(checkpoint.directory, settings) if replaced is None else replaced
    settings = {**(checkpoint.json("special_tokens_map.json") or {}), **settings}
    # transformers makes SigLIP2's tokenizer convert texts to lower case, regardless of tokenizer.json.
    if checkpoint.has("tokenizer.json") and checkpoint.config.get("model_type") != "siglip2":
        return _of_json(checkpoint, settings, templates)
    return _with_transformers(checkpoint, settings, templates)


def _of_json(checkpoint: Checkpoint, settings: dict[str, Any], templates: dict[str, str]) -> TextTokenizer:
    path = checkpoint.directory / "tokenizer.json"
    extras.require(str(path), "tokenizers", extra=checkpoint.extra)
    from tokenizers import Tokenizer

    try:
        fast: Any = Tokenizer.from_file(str(path))
    except Exception as error:
        raise invalid(f"the tokenizer of '{checkpoint.source}' cannot be read: {path}: {one_line(error)}") from None
    special_ids = add_missing(fast, settings)
    types = TYPES in settings.get("model_input_names", [TYPES])
    return _fast(checkpoint, fast, settings, templates, texts_by_role(settings), special_ids, types)


def original_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return the tokenizer loaded by transformers' ``AutoTokenizer``, or None if it cannot be loaded."""
    try:
        return _load(checkpoint)
    except ConchError:
        return None


def _load(checkpoint: Checkpoint) -> Any:
    """Load the tokenizer through transformers.

    Raises INVALID_ARG if it cannot be loaded, UNSUPPORTED if transformers is not installed.
    """
    extras.require(f"'{checkpoint.source}' has no tokenizer.json, and its tokenizer", "transformers")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(checkpoint.directory),
            trust_remote_code=checkpoint.options.trust_remote_code,
            local_files_only=True,
        )
    except Exception as error:
        raise invalid(f"'{checkpoint.source}' has no tokenizer that transformers can load: {one_line(error)}") from None


def _with_transformers(checkpoint: Checkpoint, settings: dict[str, Any], templates: dict[str, str]) -> TextTokenizer:
    loaded = _load(checkpoint)
    texts = texts_by_role(settings) | {role: str(own) for role in ROLES if (own := getattr(loaded, role, None))}
    special_ids = frozenset(int(id) for id in loaded.all_special_ids)
    types = TYPES in loaded.model_input_names
    if getattr(loaded, "is_fast", False):
        return _fast(checkpoint, loaded.backend_tokenizer, settings, templates, texts, special_ids, types)
    special = _special(checkpoint, texts, loaded.convert_tokens_to_ids, special_ids)
    return SlowTokenizer(loaded, special, ChatTemplate(templates, texts, str(checkpoint.directory)), types=types)


def _fast(
    checkpoint: Checkpoint,
    fast: Any,
    settings: dict[str, Any],
    templates: dict[str, str],
    texts: dict[str, str],
    special_ids: frozenset[int],
    types: bool,
) -> FastTokenizer:
    padding, truncation = fast.padding or {}, fast.truncation or {}
    return FastTokenizer(
        fast,
        _special(checkpoint, texts, fast.token_to_id, special_ids, padding.get("pad_id")),
        ChatTemplate(templates, texts, str(checkpoint.directory)),
        types=types,
        side=settings.get("truncation_side") or truncation.get("direction") or "right",
        clean_up=bool(settings.get("clean_up_tokenization_spaces")),
    )


def _special(
    checkpoint: Checkpoint, texts: dict[str, str], id_of: Any, special_ids: frozenset[int], pad_id: int | None = None
) -> SpecialTokens:
    config = checkpoint.json("config.json") or {}
    return SpecialTokens.of(
        texts, id_of, special_ids, eos_ids=_eos_ids(checkpoint), pad_ids=(config.get("pad_token_id"), pad_id)
    )


def _eos_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the end-of-sequence ids from generation_config.json, or else from config.json."""
    for name in ("generation_config.json", "config.json"):
        document = checkpoint.json(name) or {}
        inner = document.get("text_config")
        for config in (document, inner if isinstance(inner, dict) else {}):
            value = config.get("eos_token_id")
            ids = tuple(id for id in (value if isinstance(value, list) else [value]) if type(id) is int and id >= 0)
            if ids:
                return ids
    return ()
