"""How a translation model is told its languages: by tokens of its tokenizer, or by words before the text.

Used by the text-to-text task; the tables come from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from conch.errors import ConchError, invalid

#: Keys of a checkpoint's ``task_specific_params`` that are not for ``generate``.
_NOT_GENERATION = frozenset({"prefix"})


class Languages(Protocol):
    """Translates the inputs ``src_lang`` and ``tgt_lang`` of a request."""

    def choose(self, source: str | None, target: str | None) -> tuple[str, Mapping[str, Any]]:
        """The words before the text, and arguments of ``generate``.  Raises INVALID_ARG for an unknown language.

        The caller holds the tokenizer's lock until the text is tokenised.
        """


class TaskParameters:
    """``task_specific_params`` of a checkpoint, as T5 and Bart have them: a prefix and parameters by task.

    ``translation_en_to_de`` stands there for one pair of languages.
    """

    def __init__(self, config: Mapping[str, Any], task: str) -> None:
        table = config.get("task_specific_params") or {}
        self._pairs = {
            tuple(name.removeprefix("translation_").split("_to_", 1)): parameters
            for name, parameters in table.items()
            if name.startswith("translation_") and "_to_" in name
        }
        self._default = table.get(task) or {}

    def choose(self, source: str | None, target: str | None) -> tuple[str, Mapping[str, Any]]:
        parameters = self._default
        if source is not None or target is not None:
            known = [pair for pair in self._pairs if pair[0] == (source or pair[0]) and pair[1] == (target or pair[1])]
            if len(known) != 1:
                pairs = ", ".join(f"{one} to {other}" for one, other in self._pairs) or "none"
                raise invalid(
                    f"inputs 'src_lang' and 'tgt_lang' are '{source or ''}' and '{target or ''}'; "
                    f"the pairs that this model names are: {pairs}"
                )
            parameters = self._pairs[known[0]]
        generation = {name: value for name, value in parameters.items() if name not in _NOT_GENERATION}
        return parameters.get("prefix") or "", generation


class LanguageTokens:
    """Tokenizers with a token for each language: mBART, M2M100, NLLB and their kin."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        codes = getattr(tokenizer, "lang_code_to_id", None) or getattr(tokenizer, "fairseq_language_codes", None)
        self._codes = sorted(codes or ())
        self._source = self._own(tokenizer.src_lang)
        self._target = self._own(getattr(tokenizer, "tgt_lang", None))

    @staticmethod
    def fits(tokenizer: Any) -> bool:
        """Whether the tokenizer has such tokens."""
        return hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "set_src_lang_special_tokens")

    def choose(self, source: str | None, target: str | None) -> tuple[str, Mapping[str, Any]]:
        source, target = source or self._source, target or self._target
        forced = {} if target is None else {"forced_bos_token_id": self._token(target, "tgt_lang")}
        if source is not None:
            self._token(source, "src_lang")
            if self._tokenizer.src_lang != source:
                self._tokenizer.src_lang = source
        return "", forced

    def _own(self, language: str | None) -> str | None:
        """A language of the tokenizer's class, None where the vocabulary does not have it."""
        if language is None:
            return None
        try:
            self._token(language, "tgt_lang")
        except ConchError:
            return None
        return language

    def _token(self, language: str, name: str) -> int:
        if self._codes and language not in self._codes:
            raise self._unknown(language, name)
        if hasattr(self._tokenizer, "get_lang_id"):
            return int(self._tokenizer.get_lang_id(language))
        token = self._tokenizer.convert_tokens_to_ids(language)
        if token is None or token == self._tokenizer.unk_token_id:
            raise self._unknown(language, name)
        return int(token)

    def _unknown(self, language: str, name: str) -> Exception:
        some = ", ".join(self._codes[:20]) + (" ..." if len(self._codes) > 20 else "")
        return invalid(
            f"input '{name}' is '{language}', which this model does not know" + (f"; some: {some}" if some else "")
        )


def languages_of(tokenizer: Any, config: Mapping[str, Any], task: str) -> Languages:
    """The way in which a checkpoint is told its languages."""
    if LanguageTokens.fits(tokenizer):
        return LanguageTokens(tokenizer)
    return TaskParameters(config, task)
