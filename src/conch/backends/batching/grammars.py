"""Structured output: masks the tokens that a grammar does not allow, with llguidance (an optional package)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.backends.batching.decoder import Logits
from conch.backends.batching.json_schemas import rewrite
from conch.backends.batching.unique_items import UNIQUE, UniqueItems
from conch.backends.generation.engine import EngineSpec
from conch.checkpoints.tokenizers.fast import TokenBytes, token_bytes
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError, invalid, unsupported
from conch.core.sampling.parameters import ReasoningTokens
from conch.core.sampling.structures import TOOL_CALL, Structure
from conch.machine import extras
from conch.machine.facts import usable_cores

_logger = logging.getLogger(__name__)

#: Limits of the work per token: parser states at a position, and those that a mask makes. They and llguidance's default
#: limits end a sequence whose structure is too complex, within 0.1 s and independently of the machine's load.
MAX_STATES: Final = 10_000
MAX_MASK_STATES: Final = 20_000
#: The number of tokens that are drawn when a structure is compiled, to refuse one that exceeds these limits at once.
_TRIAL_TOKENS: Final = 16
#: White space between the tokens of JSON: a space, or a line break with an indentation. Without a limit, models write
#: line breaks until ``max_tokens``.
_WHITE_SPACE: Final = r"\x20|\r?\n[\x20\t]{0,32}"
#: Escapes in JSON texts. With ``\u``, a property could have a second spelling, which its schema would not apply to.
_ESCAPES: Final = 'nrbtf\\"'
_JSON_OPTIONS: Final = {"whitespace_pattern": _WHITE_SPACE, "json_allowed_escapes": _ESCAPES}
_NO_TEXT: Final = "no text fits its structure"
#: Explanations of llguidance's errors, by a part of them.
_REASONS: Final = {
    "NoExtension": _NO_TEXT,
    "Current row has": "its structure is too complex: too many of its parts can follow at one position",
    "Too many items": "its structure is too complex: too many of its parts can follow at one position",
    "too many expressions": "its structure is too complex: a regular expression in it has repetitions of repetitions",
    "lexer error": "its structure is too complex: a regular expression in it has too many states",
    "oneOf constraints": "keyword 'oneOf' is supported only if its branches exclude each other, for example by types",
}


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


@dataclass(frozen=True, slots=True)
class CompiledStructure:
    """A structure in its initial state: llguidance's ``matcher``, which is copied for each sequence.

    ``schema`` is its JSON schema if it has arrays with unique items; ``tokens`` are the bytes of tokens by id, and
    ``eos_ids`` the ids that end a text. ``start`` is the mark that begins the structure within a text, any number of
    times; None if the structure is the whole text.
    """

    matcher: Any
    schema: Any
    tokens: Sequence[bytes]
    eos_ids: tuple[int, ...]
    start: StartMark | None = None


class GrammarCompiler:
    """Compiles structures for a tokenizer with these ``tokens``.

    llguidance copies ``tokens`` when the first structure is compiled. Without them it would guess the text of tokens
    from the tokenizer's decoder type, often wrongly.
    """

    def __init__(self, tokenizer: TextTokenizer, tokens: TokenBytes, vocabulary: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._tokens, self._vocabulary, self._eos_ids = tokenizer, tokens, vocabulary, eos_ids
        #: llguidance's tokenizers for JSON and for other structures.
        self._known: dict[bool, Any] = {}
        self._marks: dict[str, StartMark] = {}

    def compile(self, structure: Structure) -> CompiledStructure:
        """Compile a structure, for any number of sequences.

        May be called from any thread, one call at a time. Raises INVALID_ARG for a structure that does not compile.
        """
        import llguidance

        matchers = llguidance.LLMatcher
        if not self._known:
            known = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), eos_token=list(self._eos_ids))
            # Masks are cached for parts of the vocabulary; in JSON, for others than elsewhere.
            self._known = {True: known.with_slices(known.json_slices()), False: known}
        limits = llguidance.LLParserLimits(
            max_items_in_row=MAX_STATES, step_max_items=MAX_MASK_STATES, verbose_errors=False
        )
        calls = json.loads(structure.text) if structure.kind == TOOL_CALL else None
        try:
            schema = rewrite(json.loads(structure.text)) if structure.kind == "json" else None
            if calls is not None:
                grammar = call_grammar(calls, self._tokens, _JSON_OPTIONS)
            else:
                grammar = _grammar(matchers, structure, schema)
            of_json = schema is not None or calls is not None
            matcher = matchers(self._known[of_json], grammar, log_level=0, limits=limits)
            reason = _try_tokens(matcher.deep_copy())
        except ConchError as error:
            reason = error.message
        except Exception as error:  # llguidance raises errors of many types
            reason = str(error) or type(error).__name__
        if reason:
            raise invalid(f"structured_outputs: this {structure.kind} does not compile: {_line(reason)}")
        ends = tuple(id for id in self._eos_ids if 0 <= id < self._vocabulary)
        unique = schema is not None and UNIQUE in json.dumps(schema)
        start = None if calls is None else self._start_mark(calls["mark"])
        return CompiledStructure(matcher, schema if unique else None, self._tokens.tokens, ends, start)

    def _start_mark(self, mark: str) -> StartMark:
        """Return the mark that begins calls, which takes a pass over the vocabulary once."""
        if mark not in self._marks:
            self._marks[mark] = StartMark(mark, self._tokens, self._vocabulary)
        return self._marks[mark]

    # The tokenizer interface of llguidance: these attributes, and a call that converts a text to ids.

    @property
    def tokens(self) -> list[bytes]:
        tokens = self._tokens.tokens[: self._vocabulary]
        return [*tokens, *[b""] * (self._vocabulary - len(tokens))]

    @property
    def special_token_ids(self) -> list[int]:
        return sorted(id for id in self._tokens.special_ids if id < self._vocabulary)

    @property
    def eos_token_id(self) -> int:
        return self._eos_ids[0]

    @property
    def bos_token_id(self) -> int | None:
        return None

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special_tokens=False)


class Matcher:
    """The position of a sequence in its structure, or in free text: reasoning, and the text around tool calls.

    The ``reasoning`` before a structure that is the whole text must end.
    """

    def __init__(self, compiled: CompiledStructure, reasoning: ReasoningTokens | None = None) -> None:
        self._compiled = compiled
        self._start = compiled.start
        #: llguidance's state; None in the text before a mark that begins the structure.
        self._matcher = None if self._start is not None else compiled.matcher.deep_copy()
        self._unique = None if compiled.schema is None else UniqueItems(compiled.schema, compiled.tokens)
        self._reasoning = reasoning
        #: The token that ends the reasoning; None outside of it.
        self._close = reasoning.close if reasoning is not None and reasoning.begun else None
        #: Whether reasoning may begin: no other text has begun since the last reasoning or structure.
        self._fresh = reasoning is not None and (not reasoning.begun or self._start is not None)
        #: The end of the text before a mark.
        self._tail = b""

    @property
    def is_free(self) -> bool:
        """Whether the sequence is in free text."""
        return self._close is not None or self._matcher is None

    def restrict_free(self, scores: Logits) -> None:
        """Exclude tokens after which the structure could no longer begin."""
        if self._start is None:
            scores[list(self._compiled.eos_ids)] = -np.inf
        elif self._close is None:
            scores[self._start.crossing(self._tail)] = -np.inf

    @property
    def opens(self) -> int | None:
        """The token that may begin reasoning instead of the structure."""
        return self._reasoning.open if self._reasoning is not None and self._fresh and self._start is None else None

    @property
    def state(self) -> Any:
        """llguidance's state, from which masks are computed."""
        return self._matcher

    def admits(self, token: int) -> bool:
        """Whether a token that the mask allows keeps the items of arrays distinct."""
        return self._unique is None or self.is_free or token == self.opens or self._unique.admits(token)

    def accept(self, token: int) -> ConchError | None:
        """Advance by the chosen token. Returns an error if the token is not allowed, or if no token is."""
        if self._close is not None:
            if token == self._close:
                self._close = None
            return None
        if self._fresh and self._reasoning is not None and token == self._reasoning.open:
            self._close, self._tail = self._reasoning.close, b""
            # Reasoning comes once before a structure that is the whole text, and again after a call.
            self._fresh = self._start is not None
            return None
        if self._matcher is None:
            self._read_free(token)
            return None
        self._fresh = False
        if self._unique is not None and not self._unique.advance(token):
            return invalid("the structured output cannot be continued: no unique item is left")
        # A failed matcher allows the end of the text as if the structure were complete, so check for errors first.
        if self._matcher.is_error() or not self._matcher.consume_token(token):
            return invalid(f"the structured output cannot be continued: {_reason(self._matcher)}")
        if self._start is not None and self._matcher.is_stopped():
            self._matcher, self._fresh = None, True
        return None

    def _read_free(self, token: int) -> None:
        """Read a token of the text before a mark; at the end of the mark, begin the structure."""
        assert self._start is not None
        piece = self._start.piece(token)
        self._tail = (self._tail + piece)[-len(self._start.text) :]
        self._fresh = self._fresh and not piece.strip()
        if self._tail == self._start.text:
            self._matcher, self._tail, self._fresh = self._compiled.matcher.deep_copy(), b"", False


#: The upper bounds of the logits of eight tokens for each byte of a mask.
_BOUNDS: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)


@cache
def _executor() -> Any:
    """Return the threads that compute masks."""
    import llguidance

    return llguidance.LLExecutor(usable_cores())


def masks(matchers: Sequence[Matcher], vocabulary: int) -> Sequence[npt.NDArray[np.uint8]]:
    """Return the tokens of ``vocabulary`` allowed next by each matcher: a bit per token, lowest first.

    Uses all cores.
    """
    if not matchers:
        return ()
    # Whole words of 32 bits; ``compute_bitmask`` returns one more word if the vocabulary fills the last one.
    size = -(-vocabulary // 32) * 4
    first = np.frombuffer(matchers[0].state.compute_bitmask(), np.uint8)[:size]
    others = np.empty((len(matchers) - 1, size), np.uint8)
    if len(others):
        states = [(matcher.state, index) for index, matcher in enumerate(matchers[1:])]
        _executor().unsafe_compute_mask_ptr(states, others.ctypes.data, size, len(others))
    return [first, *others]


def restrict(logits: Logits, matchers: Sequence[Matcher | None]) -> None:
    """Mask the logits ``[rows, vocabulary]`` in place with the matchers of the rows (None: no structure)."""
    structured = [(row, matcher) for row, matcher in enumerate(matchers) if matcher is not None and not matcher.is_free]
    for row, matcher in enumerate(matchers):
        if matcher is not None and matcher.is_free:
            matcher.restrict_free(logits[row])
    computed = masks([matcher for _, matcher in structured], logits.shape[1])
    for (row, matcher), mask in zip(structured, computed, strict=True):
        scores = logits[row]
        opens = matcher.opens
        score = None if opens is None else scores[opens]
        bounds = _BOUNDS.take(mask, axis=0).ravel()[: len(scores)]
        allowed = scores[: len(bounds)]
        np.minimum(allowed, bounds, out=allowed)
        scores[len(bounds) :] = -np.inf
        if opens is not None:
            scores[opens] = score


def _grammar(matchers: Any, structure: Structure, schema: Any) -> str:
    grammar: str
    match structure.kind:
        case "json":
            # A schema that is true or false has no place for options.
            schema = {"allOf": [schema]} if isinstance(schema, bool) else schema
            grammar = matchers.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
        case "regex":
            grammar = matchers.grammar_from_regex(structure.text)
        case "choice":
            rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(structure.text))
            grammar = matchers.grammar_from_lark(f"start: {rule}")
        case _:
            from llguidance.gbnf_to_lark import any_to_lark

            grammar = matchers.grammar_from_lark(any_to_lark(structure.text))
    return grammar


def _try_tokens(matcher: Any) -> str:
    """Draw the first tokens of a text. Returns why that fails; empty if it does not."""
    random = np.random.default_rng(0)
    for _ in range(_TRIAL_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if not len(allowed):
            return _reason(matcher) if matcher.is_error() else _NO_TEXT
        matcher.consume_token(int(random.choice(allowed)))
    return _reason(matcher) if matcher.is_error() else ""


def _reason(matcher: Any) -> str:
    """Return why a matcher failed."""
    text = matcher.get_error()
    error = _line(text)
    if error.startswith("regex parse error"):
        # The lines in between show the expression.
        return f"regex parse error: {text.rpartition('error: ')[2].strip()}"
    return next((reason for part, reason in _REASONS.items() if part in error), error)


def _line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


#: A mark, or a place for something else, in the expressions of a format's grammar.
_PLACE: Final = re.compile(r"~([^~]+)~|\b(CALL|OBJECT|NAME|ARGUMENTS)\b")
#: A call in the form of a JSON object.
_OBJECT: Final = (
    r'/[ \n]{0,8}\{[ \n]{0,8}"name" ?: ?"/ NAME /",[ \n]{0,8}"arguments" ?: ?/ ARGUMENTS /[ \n]{0,8}\}[ \n]{0,8}/'
)


def call_grammar(calls: Mapping[str, Any], tokens: TokenBytes, options: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of the text after the mark that begins calls.

    ``calls`` are the members of a structure (``call_structure``), and ``options`` those of llguidance for JSON. Raises
    INVALID_ARG for a JSON schema that is not supported.
    """
    special = {tokens.tokens[id].decode(): id for id in tokens.special_ids if id < len(tokens.tokens)}
    rules = [f"start: {_expanded(calls['block'], special, {'CALL': 'call', 'OBJECT': 'object'})}"]
    for place, form in (("CALL", calls["call"]), ("OBJECT", _OBJECT)):
        if place not in (match[2] for match in _PLACE.finditer(calls["block"])):
            continue
        rule, count = place.lower(), len(calls["schemas"])
        rules.append(f"{rule}: {' | '.join(f'{rule}_{index}' for index in range(count))}")
        for index, name in enumerate(calls["schemas"]):
            places = {"NAME": json.dumps(name), "ARGUMENTS": f"@arguments_{index}"}
            rules.append(f"{rule}_{index}: {_expanded(form, special, places)}")
    grammars: list[dict[str, Any]] = [{"name": "calls", "lark_grammar": "\n".join(rules)}]
    for index, schema in enumerate(calls["schemas"].values()):
        grammars.append({"name": f"arguments_{index}", "json_schema": {**rewrite(schema), "x-guidance": options}})
    return json.dumps({"grammars": grammars})


def _expanded(expression: str, special: Mapping[str, int], places: Mapping[str, str]) -> str:
    """Return an expression with ``places``, and with marks as ``special`` tokens (ids by name) or as texts."""

    def part(match: re.Match[str]) -> str:
        mark = match[1]
        if mark is None:
            return places[match[2]]
        return f"<[{special[mark]}]>" if mark in special else json.dumps(mark, ensure_ascii=False)

    return _PLACE.sub(part, expression)


class StartMark:
    """The mark that begins a structure in a text, written as a special token or as any tokens with its bytes."""

    def __init__(self, mark: str, tokens: TokenBytes, vocabulary: int) -> None:
        self.text = mark.encode()
        self._tokens = tokens.tokens
        known = range(len(self._tokens))
        #: Special tokens, which add no text, except for the mark itself.
        self._hidden = frozenset(id for id in tokens.special_ids if id not in known or self._tokens[id] != self.text)
        #: The tokens that end the mark and add more text, by the number of bytes of the mark before them.
        self._crossing: list[list[int]] = [[] for _ in self.text]
        for id, piece in enumerate(self._tokens[:vocabulary]):
            before = piece[:-1]
            if self.text[-1] in before and id not in self._hidden:
                for length, ids in enumerate(self._crossing):
                    rest = self.text[length:]
                    if before.startswith(rest) if length else rest in before:
                        ids.append(id)

    def piece(self, token: int) -> bytes:
        """Return the text that a token adds."""
        return b"" if token in self._hidden else b"".join(self._tokens[token : token + 1])

    def crossing(self, tail: bytes) -> list[int]:
        """Return the tokens that end the mark after the text ``tail`` and add more, which the structure would miss."""
        return [id for length, ids in enumerate(self._crossing) if tail.endswith(self.text[:length]) for id in ids]
