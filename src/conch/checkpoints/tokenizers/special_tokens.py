"""The special tokens of a tokenizer: their ids, and which of them are added around a text.

Used when a tokenizer is opened. Applies tokenizer_config.json in the same way as transformers, without importing it. As
in transformers, ``add_bos_token`` has no effect with a tokenizer.json, which itself defines the tokens around a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

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


def put_around(fast: Any, bos: str | None, eos: str | None) -> None:
    """Configure ``fast`` to add only ``bos`` before a text and ``eos`` after it; None adds no token."""
    from tokenizers import processors

    fast.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(text, fast.token_to_id(text)) for text in {bos, eos} if text],
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
    """Return the text of a token in a JSON file; empty without one."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
