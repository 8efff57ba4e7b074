"""The special tokens of a tokenizer: which ones there are, and which are put around a text.

Used while a tokenizer is opened; what transformers would do with tokenizer_config.json, without transformers.  As
there, ``add_bos_token`` has no effect beside a tokenizer.json, which says itself what is put around a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

#: The tokens with a role of their own, as tokenizer_config.json names them.
ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE: Final = ("additional_special_tokens", "extra_special_tokens")


_TRAITS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def complete_special(fast: Any, settings: Mapping[str, Any], tokens: Mapping[str, str]) -> frozenset[int]:
    """Add the tokens that tokenizer_config.json has and tokenizer.json has not; the ids of all special ones."""
    from tokenizers import AddedToken

    known = {token.content for token in fast.get_added_tokens_decoder().values()}
    added = settings.get("added_tokens_decoder")
    for _, token in sorted((added if isinstance(added, dict) else {}).items(), key=lambda item: int(item[0])):
        if isinstance(token, dict) and (text := content(token)) and text not in known:
            traits = {name: token[name] for name in _TRAITS if name in token}
            fast.add_tokens([AddedToken(text, **traits)])
    named = list(dict.fromkeys([*tokens.values(), *_more(settings)]))
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in named])
    special = {id for id, token in fast.get_added_tokens_decoder().items() if token.special}
    return frozenset(special | {id for text in named if (id := fast.token_to_id(text)) is not None})


def frame(fast: Any, bos: str | None, eos: str | None) -> None:
    """Put tokens around a text, and nothing else."""
    from tokenizers import processors

    fast.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(text, fast.token_to_id(text)) for text in {bos, eos} if text],
    )


def _more(settings: Mapping[str, Any]) -> Iterator[str]:
    for name in _MORE:
        value = settings.get(name)
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            if text := content(one):
                yield text


def content(token: Any) -> str:
    """The text of a token in a JSON file, empty without one."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
