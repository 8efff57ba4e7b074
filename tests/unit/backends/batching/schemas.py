"""JSON schemas compiled for a tokenizer of bytes, texts that are drawn from them at random, and their judge."""

from __future__ import annotations

import json
import math
import re
import warnings
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import jsonschema
import numpy as np

from conch.backends.batching.grammars import CompiledStructure, GrammarCompiler, Matcher, restrict
from conch.checkpoints.tokenizers.fast import TokenBytes
from conch.core.sampling.structures import structure_of

_WORDS: Final = (
    '",', '": ', '"}', '"]', '","', '":"', '{"', "[{", "[]", "{}", "},", "true", "false", "null", "\n  ", ", ", "00",
    ".0", "e-", "T0", 'Z"', "\\u00", "\\u", '\\"', "\\n", "ab", "é", "漢", "😀",
)  # fmt: skip
#: The vocabulary: every byte, the end of a text, and words that often span the tokens of JSON.
EOS: Final = 256
TOKENS: Final = [*(bytes([byte]) for byte in range(256)), b"<end>", *(word.encode() for word in _WORDS)]
_ENDS: Final = (b'"', b"}", b"]", b'"}', b'"]', b"<end>", b"<|im_end|>")
_SYNTAX: Final = (*_ENDS, b"{", b"[", b",", b":", b'",', b'":')


class _ByteTokenizer:
    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        return list(text.encode())


def compiler() -> GrammarCompiler:
    tokenizer: Any = _ByteTokenizer()
    return GrammarCompiler(tokenizer, TokenBytes(TOKENS, frozenset({EOS})), len(TOKENS), (EOS,))


def compiled(compiler: GrammarCompiler, schema: Any) -> CompiledStructure:
    """Compile a schema as a request's. Raises INVALID_ARG if it is refused."""
    return compiler.compile(structure_of("json", schema, "response_format"))


def _weight(token: bytes) -> float:
    """Return how often to draw a token: the syntax of JSON often, parts of characters rarely."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return 0.3
    return 3.0 if len(text) > 1 or text in '{}[]":,\\-.' else 1.5 if text.isalnum() else 1.0


@lru_cache(1)
def _scores(tokens: tuple[bytes, ...], syntax: float) -> tuple[Any, Any]:
    """Return the scores of tokens, and what is added to those that end something."""
    scores = [math.log(_weight(token)) + syntax * (token.strip() in _SYNTAX) for token in tokens]
    ends = [token in _ENDS for token in tokens]
    return np.array(scores, np.float32), np.where(ends, 4 + syntax, 0).astype(np.float32)


def draw(
    compiled: CompiledStructure,
    random: np.random.Generator,
    *,
    end: int = EOS,
    syntax: float = 0,
    most: int = 400,
    soft: int = 40,
) -> bytes | None:
    """Draw a text at random; None if it is cut at ``most`` tokens. After ``soft`` tokens, prefers to end.

    ``end`` is the token that ends a text; ``syntax`` is added to the scores of JSON's syntax, for a large vocabulary.
    Raises the error of a structure that cannot be continued.
    """
    matcher = Matcher(compiled)
    tokens = tuple(compiled.tokens)
    likely, ending = _scores(tokens, syntax)
    text = b""
    for step in range(most):
        scores = likely + random.gumbel(size=len(tokens)).astype(np.float32) + (ending if step > soft else 0)
        restrict(scores[None], [matcher])
        token = int(scores.argmax())
        while not matcher.admits(token) and scores[token] > -np.inf:
            scores[token] = -np.inf
            token = int(scores.argmax())
        if (error := matcher.accept(token)) is not None:
            raise error
        if token == end:
            return text
        text += tokens[token]
    return None


def _multiple_of(validator: Any, divisor: Any, instance: Any, schema: Any) -> Any:
    """Check exactly: 4.06 is a multiple of 0.01, although it is not in the arithmetic of doubles."""
    if validator.is_type(instance, "number") and math.isfinite(instance):
        quotient = Fraction(Decimal(repr(instance))) / Fraction(Decimal(repr(divisor)))
        if quotient.denominator != 1:
            yield jsonschema.ValidationError(f"{instance} is not a multiple of {divisor}")


def judge(schema: Any) -> Any:
    """Return a validator that checks formats."""
    draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    exact = jsonschema.validators.extend(draft, {"multipleOf": _multiple_of})
    return exact(schema, format_checker=draft.FORMAT_CHECKER)


def fault(validator: Any, text: bytes) -> str:
    """Return why a text is not valid; empty if it is."""
    try:
        value = json.loads(text.decode())
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        return f"{text!r} is no JSON: {error}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # classes with [ in a pattern
        try:
            worst = jsonschema.exceptions.best_match(validator.iter_errors(value))
        except re.error:
            return ""  # a pattern that is valid in ECMAScript but not in Python
    return "" if worst is None else f"{text!r}: {worst.message}"
