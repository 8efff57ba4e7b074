"""Structured output: masks the tokens that a grammar does not allow, with llguidance (an optional package)."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from time import thread_time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.backends.batching.decoder import Logits
from conch.backends.generation.engine import EngineSpec
from conch.checkpoints.tokenizers.fast import TokenBytes, token_bytes
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError, invalid, unsupported
from conch.core.sampling.structures import Structure
from conch.machine import extras

_logger = logging.getLogger(__name__)

#: Processor time (s): the limit per mask of a sequence, and the total excess allowed for all of its masks. Masks delay
#: the other sequences of the batch.
USUAL_SECONDS: Final = 0.02
OVERTIME_SECONDS: Final = 2.0


def grammar_compiler(spec: EngineSpec, vocabulary: int) -> GrammarCompiler | None:
    """Return the compiler for a network with ``vocabulary`` logits, or None if structured output is not available.

    Raises UNSUPPORTED if llguidance is installed but cannot be imported.
    """
    tokenizer = spec.tokenizer
    if tokenizer is None or tokenizer.fast is None:
        return None
    if find_spec("llguidance") is None:
        # Logged only: clients learn that a library is missing, but the command contains paths of the server.
        command = extras.command_for("llguidance")
        _logger.info("no structured output for %s without llguidance: %s", spec.source, command)
        return None
    extras.require("structured output", "llguidance")
    try:
        if not spec.eos_ids:
            raise unsupported("no token ends its texts")
        return GrammarCompiler(tokenizer, token_bytes(tokenizer), vocabulary, spec.eos_ids)
    except ConchError as error:
        _logger.warning("no structured output for %s: %s", spec.source, error.message)
        return None


class GrammarCompiler:
    """Compiles structures for a tokenizer with these ``tokens``.

    llguidance copies ``tokens`` when the first structure is compiled. Without them it would guess the text of tokens
    from the tokenizer's decoder type, often wrongly.
    """

    def __init__(self, tokenizer: TextTokenizer, tokens: TokenBytes, vocabulary: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._tokens, self._vocabulary, self._eos_ids = tokenizer, tokens, vocabulary, eos_ids
        self._known: Any = None

    def compile(self, structure: Structure) -> Any:
        """Compile a structure to a matcher in its initial state, which is copied for each sequence.

        May be called from any thread, one call at a time. Raises INVALID_ARG for a structure that does not compile.
        """
        import llguidance

        matchers = llguidance.LLMatcher
        try:
            grammar = _grammar(matchers, structure)
        except Exception as error:  # converting a grammar raises errors of many types
            raise _refusal(structure, str(error)) from None
        if self._known is None:
            self._known = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), eos_token=list(self._eos_ids))
        matcher = matchers(self._known, grammar, log_level=0)
        if matcher.is_error():
            raise _refusal(structure, matcher.get_error())
        return matcher

    # The tokenizer interface of llguidance: these attributes, and a call that converts a text to ids.

    @property
    def tokens(self) -> list[bytes]:
        return [*self._tokens.tokens, *[b""] * (self._vocabulary - len(self._tokens.tokens))]

    @property
    def special_token_ids(self) -> list[int]:
        return sorted(self._tokens.special_ids)

    @property
    def eos_token_id(self) -> int:
        return self._eos_ids[0]

    @property
    def bos_token_id(self) -> int | None:
        return None

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special_tokens=False)


class Matcher:
    """The position of a sequence in its structure, and the excess processor time of its masks in seconds."""

    def __init__(self, compiled: Any) -> None:
        self._matcher = compiled.deep_copy()
        self._overtime = 0.0

    def mask(self) -> npt.NDArray[np.uint8]:
        """Return a bit per token, lowest first; 0 if the token is not allowed next."""
        before = thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._overtime += max(0.0, thread_time() - before - USUAL_SECONDS)
        return bits

    def accept(self, token: int) -> ConchError | None:
        """Advance by the chosen token.

        Returns an error if the token is not allowed, if no token is, or if masks have taken too long.
        """
        if self._overtime > OVERTIME_SECONDS:
            return invalid(
                "the structured output cannot be continued: finding the tokens that its structure allows takes too "
                "much processor time"
            )
        # A failed matcher allows the end of the text as if the structure were complete, so check for errors first.
        if not self._matcher.is_error() and self._matcher.consume_token(token):
            return None
        return invalid(f"the structured output cannot be continued: {_line(self._matcher.get_error())}")


#: The upper bounds of the logits of eight tokens for each byte of a mask.
_BOUNDS: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)


def restrict(logits: Logits, matchers: Sequence[Matcher | None]) -> None:
    """Mask the logits ``[rows, vocabulary]`` in place with the matchers of the rows (None: no structure)."""
    for scores, matcher in zip(logits, matchers, strict=True):
        if matcher is not None:
            bounds = _BOUNDS.take(matcher.mask(), axis=0).ravel()[: len(scores)]
            allowed = scores[: len(bounds)]
            np.minimum(allowed, bounds, out=allowed)
            scores[len(bounds) :] = -np.inf


def _grammar(matchers: Any, structure: Structure) -> str:
    grammar: str
    match structure.kind:
        case "json":
            grammar = matchers.grammar_from_json_schema(structure.text)
        case "regex":
            grammar = matchers.grammar_from_regex(structure.text)
        case "choice":
            rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(structure.text))
            grammar = matchers.grammar_from_lark(f"start: {rule}")
        case _:
            from llguidance.gbnf_to_lark import any_to_lark

            grammar = matchers.grammar_from_lark(any_to_lark(structure.text))
    return grammar


def _refusal(structure: Structure, reason: str) -> ConchError:
    return invalid(f"structured_outputs: this {structure.kind} does not compile: {_line(reason)}")


def _line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
