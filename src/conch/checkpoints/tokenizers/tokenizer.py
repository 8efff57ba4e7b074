"""The tokenizer interface for tasks, language models and ``conch convert``, and the special tokens of a tokenizer.

In a worker, one thread encodes requests while other threads decode. An open tokenizer therefore never changes:
truncation and padding are off, and callers request truncation in each call.

Special tokens follow tokenizer_config.json in the same way as in transformers, without importing it. As in
transformers, ``add_bos_token`` has no effect with a tokenizer.json, which itself defines the tokens around a text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.stream import TextStream
from conch.core.errors import ConchError, invalid, one_line

#: The roles of special tokens in tokenizer_config.json.
ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_WITHOUT_ROLE: Final = ("additional_special_tokens", "extra_special_tokens")
#: Flags of a token, with the same names in the JSON files and in ``tokenizers``.
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens by role; an id is None if the tokenizer has no such token.

    ``texts`` has the texts by role; ``all_ids`` has the ids of all special tokens, with or without a role; ``eos_ids``
    are the ids that end a text.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    all_ids: frozenset[int] = frozenset()
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    unk_id: int | None = None
    mask_id: int | None = None
    cls_id: int | None = None

    @classmethod
    def of(
        cls,
        texts: Mapping[str, str],
        id_of: Callable[[str], int | None],
        all_ids: Iterable[int],
        *,
        eos_ids: Iterable[int] = (),
        pad_ids: Iterable[Any] = (),
    ) -> SpecialTokens:
        """Create special tokens from their ``texts``; ``id_of`` returns the id of a text.

        ``eos_ids`` replace the id of ``eos_token``. Without a ``pad_token``, the first valid id in ``pad_ids`` is the
        padding token.
        """
        ids = {role: id for role, text in texts.items() if (id := id_of(text)) is not None}
        padding = (id for id in (ids.get("pad_token"), *pad_ids) if isinstance(id, int) and id >= 0)
        return cls(
            texts=texts,
            all_ids=frozenset(all_ids),
            eos_ids=tuple(eos_ids) or ((ids["eos_token"],) if "eos_token" in ids else ()),
            bos_id=ids.get("bos_token"),
            pad_id=next(padding, None),
            unk_id=ids.get("unk_token"),
            mask_id=ids.get("mask_token"),
            cls_id=ids.get("cls_token"),
        )


def texts_by_role(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by role; ``settings`` is the content of tokenizer_config.json."""
    return {role: text for role in ROLES if (text := _content(settings.get(role)))}


def add_missing(fast: Any, settings: Mapping[str, Any]) -> frozenset[int]:
    """Add the tokens of tokenizer_config.json that tokenizer.json lacks; returns the ids of all special tokens.

    ``fast`` is a tokenizer of ``tokenizers``; its existing tokens keep their flags, unless they become special.
    """
    from tokenizers import AddedToken

    known = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    added = settings.get("added_tokens_decoder")
    for _, token in sorted((added if isinstance(added, dict) else {}).items(), key=lambda item: int(item[0])):
        if (text := _content(token)) and isinstance(token, dict) and text not in known:
            known[text] = AddedToken(text, **_flags(token))
            fast.add_tokens([known[text]])
    named = {text: token for token in _special(settings) if (text := _content(token))}
    for text, token in named.items():
        if text not in known or not known[text].special:
            flags = {"normalized": False, **(_flags(token) if isinstance(token, dict) else {}), "special": True}
            fast.add_special_tokens([AddedToken(text, **flags)])
    special = {id for id, token in fast.get_added_tokens_decoder().items() if token.special}
    return frozenset(special | {id for text in named if (id := fast.token_to_id(text)) is not None})


def put_around(fast: Any, bos: str | None, eos: str | None, between: Sequence[str] = ()) -> None:
    """Configure ``fast`` to add only ``bos`` before a text and ``eos`` after it; None adds no token.

    ``between`` are the tokens between the two texts of a pair.
    """
    from tokenizers import processors

    # Separate names, because the texts of tokens may have another meaning in a template, such as "$A".
    around = {name: text for name, text in (("bos", bos), ("eos", eos)) if text}
    around |= {f"between{index}": text for index, text in enumerate(between)}
    names = ("bos", "$A", *(name for name in around if name.startswith("between")), "$B", "eos")
    pair = [name for name in names if name.startswith("$") or name in around]
    fast.post_processor = processors.TemplateProcessing(
        single=[name for name in ("bos", "$A", "eos") if name == "$A" or name in around],
        pair=pair,
        special_tokens=[
            {"id": name, "ids": [fast.token_to_id(text)], "tokens": [text]} for name, text in around.items()
        ],
    )


def _special(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the special tokens in tokenizer_config.json, each a text or an object with ``content``."""
    yield from (settings[role] for role in ROLES if role in settings)
    for name in _WITHOUT_ROLE:
        tokens = settings.get(name)
        yield from tokens.values() if isinstance(tokens, dict) else tokens if isinstance(tokens, list) else ()


def _flags(token: Mapping[str, Any]) -> dict[str, Any]:
    return {name: token[name] for name in _FLAGS if name in token}


def _content(token: Any) -> str:
    """Return the text of a token in a JSON file; empty if none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


#: Texts per tokenizer call; limits memory, because the encodings of a call are freed before the next call.
CHUNK: Final = 1024
#: Which text of a pair is truncated: the longer one, or the first.
Truncation = Literal["longest", "first"]
#: The side on which a text is cut off.
Side = Literal["left", "right"]
#: INT64 ``[length]``.
Ids = npt.NDArray[np.int64]


class Tokens:
    """A token sequence for a network: INT64 ``ids`` and ``types`` of the same length.

    ``types`` is None if all are 0. ``length`` is the length before truncation. ``mask`` is 0 for tokens that the
    network does not attend to, None if there are none. If requested, ``offsets`` has the
    character range (start, end) of each token, and ``special`` is 1 for tokens that are not part of the text.
    """

    __slots__ = ("ids", "length", "mask", "offsets", "special", "types")

    def __init__(self, ids: Ids, types: Ids | None = None, length: int = -1) -> None:
        self.ids = ids
        self.types = types
        self.length = len(ids) if length < 0 else length
        self.mask: Ids | None = None
        self.offsets: list[tuple[int, int]] = []
        self.special: list[int] = []

    @property
    def count(self) -> int:
        """The number of tokens that the network reads for this sequence."""
        return len(self.ids)


class TextTokenizer(ABC):
    """Converts texts and conversations to token ids, and token ids to text.

    ``vocabulary`` is the number of tokens, including added tokens. ``types`` is true if the network gets token types
    (``token_type_ids``). ``side`` is the side on which texts are truncated by default. ``fast`` is the
    tokenizer of ``tokenizers``; None for a tokenizer written in Python, which does not support offsets.
    """

    special: SpecialTokens
    template: ChatTemplate
    vocabulary: int
    types: bool
    side: Side
    fast: Any

    def reread(self) -> None:
        """Adapt to changes of ``fast``, before any text is encoded by another thread."""
        return None

    @abstractmethod
    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Encode a text, by default with the model's special tokens around it.

        Raises INVALID_ARG for a text that cannot be tokenised.
        """

    @abstractmethod
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
        """Encode each text with special tokens, truncated to ``limit`` tokens on ``side`` (None: the tokenizer's own).

        Raises INVALID_ARG, naming ``name``.
        """

    @abstractmethod
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
        """Encode each pair with special tokens, truncated to ``limit`` tokens.

        A pair is not truncated if only the first text may be and the second alone is too long. Raises INVALID_ARG for a
        text that cannot be tokenised, naming it from ``names``.
        """

    @abstractmethod
    def special_token_count(self, *, pair: bool) -> int:
        """Return the number of special tokens that are added to a text or a pair of texts."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, clean_up: bool = False) -> str:
        """Decode ids to text; unknown ids are ignored.

        ``clean_up`` removes spaces if tokenizer_config.json requests it, as transformers does by default.
        """

    @abstractmethod
    def token(self, id: int) -> str:
        """Return a token as written in the vocabulary."""

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that alone has this text, or None."""
        ids = self.encode(text, special_tokens=False)
        return ids[0] if len(ids) == 1 and text in (self.token(ids[0]), self.piece(ids[0])) else None

    @abstractmethod
    def join(self, tokens: Sequence[str]) -> str:
        """Convert tokens as written in the vocabulary to text."""

    @abstractmethod
    def piece(self, id: int) -> str:
        """Return the text of a token in the middle of a text; includes special tokens."""

    @abstractmethod
    def stream(
        self, *, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset(), after: Sequence[int] = ()
    ) -> TextStream:
        """Open a stream that converts ids to text as they arrive; ``after`` are preceding ids, whose text is omitted.

        ``kept`` are special tokens that are not skipped.

        Without ``after`` the ids begin a text; SentencePiece then drops the space before the first word.
        """

    def chat(self, messages: Any, *, tools: Any = None, optional_tools: bool = False, **variables: Any) -> str:
        """Render a conversation to a prompt; see :meth:`ChatTemplate.render`.

        The prompt includes special tokens, so encode it with ``special_tokens=False``.
        """
        return self.template.render(messages, tools, optional_tools=optional_tools, **variables)


def refused(error: BaseException, name: str) -> ConchError:
    """Return INVALID_ARG for a text that cannot be tokenised; ``name`` is the text's name in the message.

    Callers catch BaseException, because a Rust panic is not an Exception and must fail only one request.
    KeyboardInterrupt and SystemExit are raised again.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return invalid(f"{name} cannot be tokenised: {one_line(error)}")
