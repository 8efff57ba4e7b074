"""Refuses structures that OpenVINO GenAI ignores in part, does not compile, or masks too slowly.

``check_structure`` looks at the text of a structure. For example, ``.*a.{20}`` needs an automaton with a million
states: it must track which of the last twenty characters were an ``a``. ``GrammarValidator`` compiles the structure and
measures its masks. An invalid grammar would break the pipeline that runs it; a slow one would delay all other requests.
"""

from __future__ import annotations

import json
import re
import warnings
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from conch.backends.engines.openvino.generation_config import structured_output
from conch.backends.engines.openvino.precision import BLOCK
from conch.backends.generation.compilation import COMPILING, ThreadGroup
from conch.backends.graphs.openvino import reason
from conch.core.errors import invalid, unsupported
from conch.core.sampling.structures import Structure
from conch.machine.temporary import TemporaryFolder

#: The characters that an edge matches: disjoint, sorted pairs of first and last code point.
Ranges = tuple[tuple[int, int], ...]

_LAST: Final = 0x10FFFF
#: The maximum number of steps, about 0.1 s, after which an expression counts as too large.
_MAX_STEPS: Final = 100_000
_CLASSES: Final[dict[str, Ranges]] = {
    "CATEGORY_DIGIT": ((48, 57),),
    "CATEGORY_SPACE": ((9, 13), (32, 32)),
    "CATEGORY_WORD": ((48, 57), (65, 90), (95, 95), (97, 122)),
}


def has_at_most(states: int, expression: str) -> bool:
    """Whether the deterministic automaton of an expression has at most ``states`` states.

    True for an expression that Python cannot parse; the compiler reports the error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree: Any = re._parser.parse(expression)  # type: ignore[attr-defined]
        nfa = _Nfa(8 * states)
        end = nfa.add(tree, 0)
        nfa.accepting = end
        return nfa.determined(states)
    except _TooLarge:
        return False
    except (re.error, OverflowError, RecursionError):
        return True


class _TooLarge(Exception):
    """The automaton has more states than allowed."""


class _Nfa:
    """A nondeterministic automaton with numbered states; 0 is the initial state.

    ``edges`` consume a character, ``jumps`` do not.
    """

    def __init__(self, max_states: int) -> None:
        self.edges: list[list[tuple[Ranges, int]]] = [[]]
        self.jumps: list[list[int]] = [[]]
        self.accepting = 0
        self._max_states = max_states

    def add(self, tree: Any, start: int) -> int:
        """Add the states of an expression that begins in state ``start``; returns its end state."""
        for operation, value in tree:
            start = self._add(str(operation), value, start)
        return start

    def determined(self, max_states: int) -> bool:
        """Whether the deterministic automaton has at most ``most`` states (reachable sets of states)."""
        bounds = sorted({bound for edges in self.edges for ranges, _ in edges for low, high in ranges
                         for bound in (low, high + 1)})  # fmt: skip
        atoms: dict[Ranges, range | list[int]] = {}
        first = self._closed({0})
        seen, left, steps = {first}, [first], 0
        while left:
            reached: dict[int, set[int]] = {}
            for state in left.pop():
                for ranges, target in self.edges[state]:
                    if ranges not in atoms:
                        atoms[ranges] = [
                            atom
                            for low, high in ranges
                            for atom in range(bisect_right(bounds, low), bisect_right(bounds, high) + 1)
                        ]
                    for atom in atoms[ranges]:
                        reached.setdefault(atom, set()).add(target)
                    steps += len(atoms[ranges])
            for states in {frozenset(targets) for targets in reached.values()}:
                closed = self._closed(states)
                steps += len(closed)
                if closed not in seen:
                    seen.add(closed)
                    left.append(closed)
            if len(seen) > max_states or steps > _MAX_STEPS:
                return False
        return True

    def _closed(self, states: Any) -> frozenset[int]:
        closed, left = set(states), list(states)
        while left:
            for target in self.jumps[left.pop()]:
                if target not in closed:
                    closed.add(target)
                    left.append(target)
        return frozenset(closed)

    def _state(self) -> int:
        if len(self.edges) > self._max_states:
            raise _TooLarge
        self.edges.append([])
        self.jumps.append([])
        return len(self.edges) - 1

    def _edge(self, start: int, ranges: Ranges) -> int:
        end = self._state()
        self.edges[start].append((ranges, end))
        return end

    def _add(self, operation: str, value: Any, start: int) -> int:
        match operation:
            case "LITERAL":
                return self._edge(start, ((value, value),))
            case "NOT_LITERAL":
                return self._edge(start, _without(((value, value),)))
            case "ANY":
                return self._edge(start, _without(((10, 10),)))
            case "IN":
                return self._edge(start, _class(value))
            case "SUBPATTERN":
                return self.add(value[-1], start)
            case "ATOMIC_GROUP":
                return self.add(value, start)
            case "BRANCH":
                end = self._state()
                for branch in value[1]:
                    self.jumps[self.add(branch, start)].append(end)
                return end
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                minimum, maximum, tree = value
                return self._repeated(minimum, maximum, tree, start)
        return start  # assertions, such as the beginning of a line

    def _repeated(self, minimum: int, maximum: Any, tree: Any, start: int) -> int:
        for _ in range(minimum):
            start = self.add(tree, start)
        end = self._state()
        self.jumps[start].append(end)
        if str(maximum) == "MAXREPEAT":
            again = self._state()
            self.jumps[start].append(again)
            back = self.add(tree, again)
            self.jumps[back] += [again, end]
            return end
        for _ in range(int(maximum) - minimum):
            start = self.add(tree, start)
            self.jumps[start].append(end)
        return end


def _class(items: Any) -> Ranges:
    ranges: list[tuple[int, int]] = []
    inverted = False
    for operation, value in items:
        match str(operation):
            case "NEGATE":
                inverted = True
            case "LITERAL":
                ranges.append((value, value))
            case "RANGE":
                ranges.append((value[0], value[1]))
            case "CATEGORY":
                name = str(value)
                known = _CLASSES.get(name.replace("_NOT_", "_"), ())
                ranges += _without(known) if "_NOT_" in name else known
    merged = tuple(sorted(ranges))
    return _without(merged) if inverted else merged


def _without(ranges: Ranges) -> Ranges:
    """Return the complement of ``ranges``."""
    rest: list[tuple[int, int]] = []
    low = 0
    for first, last in sorted(ranges):
        if low < first:
            rest.append((low, first - 1))
        low = max(low, last + 1)
    return (*rest, (low, _LAST)) if low <= _LAST else tuple(rest)


#: The maximum number of characters of a structure with repetitions expanded; each takes 1 ms to compile.
MOST_STATES: Final = 2000
#: The maximum sum of string lengths in a JSON schema; each character takes a third of a millisecond to compile.
MOST_LENGTH: Final = 8000
#: The maximum number of optional properties of an object; each pair of them takes 25 µs to compile.
MOST_OPTIONAL: Final = 300
#: The number of automaton states allowed regardless of the expression's length; each takes at most 10 ms to compile.
MOST_EXTRA_STATES: Final = 128
#: The number of characters that a large character class counts as.
_LARGE: Final = 10

#: JSON schema keywords that the compiler ignores; it also ignores all but one of the schemas in ``allOf``.
_IGNORED: Final = (
    "not", "if", "dependentRequired", "dependentSchemas", "multipleOf", "uniqueItems", "contains", "minContains",
    "maxContains",
)  # fmt: skip
#: Keywords that contain schemas: objects of schemas by name (``_BY_NAME``), and lists or single schemas.
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
_WITHIN: Final = (
    "allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties", "unevaluatedProperties",
    "unevaluatedItems", "propertyNames",
)  # fmt: skip
#: Sequences that the compiler of 2026.4 reads as a single character, because its escape of the first character has no
#: fixed length.
_MISSPELT: Final = re.compile(r"(?:[\u0080-\u00ff]|\\u00[89a-fA-F][0-9a-fA-F])[0-9a-fA-F]")
_PIECES: Final = re.compile(
    r"""(?P<open>\()|(?P<close>\))|\{(?P<least>\d*),?(?P<most>\d*)\}|(?P<large>\\[wWDSpP])|\\.|"(?:\\.|[^"\\])*"|"""
    r"""\[(?:\\.|[^\]\\])*\]|.""",
    re.DOTALL,
)


def check_structure(structure: Structure) -> None:
    """Raise UNSUPPORTED for a structure that the compiler would partly ignore, INVALID_ARG for one too large."""
    if structure.kind in ("json", "grammar") and _MISSPELT.search(structure.text):
        raise unsupported(
            "engine 'openvino' does not support structures with a character of U+0080 to U+00FF before a "
            "hexadecimal digit"
        )
    if structure.kind == "json":
        try:
            schema = json.loads(structure.text)
        except ValueError:
            return  # the compiler reports the error
        _check_schema(schema)
    elif structure.kind != "choice":
        _check_states(structure.kind, structure.text)


def _check_schema(schema: Any) -> None:
    length = pairs = 0
    for node in _schemas(schema):
        for keyword in _IGNORED:
            if node.get(keyword) not in (None, False):
                raise unsupported(f"engine 'openvino' does not support JSON schemas with '{keyword}'")
        if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
            raise unsupported("engine 'openvino' does not support JSON schemas with 'allOf' of more than one")
        if isinstance(reference := node.get("$ref"), str) and not reference.startswith("#"):
            raise unsupported("engine 'openvino' does not support JSON schemas with a '$ref' to another document")
        if isinstance(pattern := node.get("pattern"), str):
            _check_states("pattern", pattern)
        pairs += _optional(node) ** 2
        lengths = (node.get("minLength"), node.get("maxLength"))
        length += max(bound if isinstance(bound, int) else 0 for bound in lengths)
    if pairs > MOST_OPTIONAL**2:
        raise invalid(
            f"the JSON schema has objects with more optional properties than engine 'openvino' compiles, which is "
            f"{MOST_OPTIONAL} in one object: name those that are always there in 'required'"
        )
    if length > MOST_LENGTH:
        raise invalid(
            f"the lengths of strings in the JSON schema sum up to {length}; engine 'openvino' compiles at most "
            f"{MOST_LENGTH}"
        )


def _optional(node: Mapping[str, Any]) -> int:
    """Return the number of optional properties of an object."""
    properties, required = node.get("properties"), node.get("required")
    named = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return len(properties.keys() - named) if isinstance(properties, dict) else 0


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all nested schemas."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            yield node
            for keyword in _BY_NAME:
                if isinstance(named := node.get(keyword), dict):
                    left += named.values()
            for keyword in _WITHIN:
                inner = node.get(keyword)
                left += inner if isinstance(inner, list) else [inner]


def _check_states(kind: str, text: str) -> None:
    states = _states(text)
    if states > MOST_STATES:
        raise invalid(
            f"the {kind} has {states} characters with its repetitions; engine 'openvino' compiles at most {MOST_STATES}"
        )
    if kind != "grammar" and not has_at_most(max(MOST_EXTRA_STATES, 2 * states + 2), text):
        raise invalid(
            f"the {kind} makes an automaton that is too large for engine 'openvino', as a long repetition does after "
            "another that may end anywhere"
        )


def _states(text: str) -> int:
    """Return the number of characters of a regular expression or grammar with repetitions expanded."""
    sums, last = [0], 0
    for piece in _PIECES.finditer(text):
        if piece["open"]:
            sums.append(0)
        elif piece["close"]:
            if len(sums) > 1:
                last = sums.pop()
                sums[-1] += last
        elif piece["least"] or piece["most"]:
            repeated = last * int(min(max(float(piece["most"] or 0), float(piece["least"] or 0), 1), 1e9))
            sums[-1] += repeated - last
            last = repeated
        else:
            last = _LARGE if piece["large"] else 1
            sums[-1] += last
    return sum(sums)


#: The number of tokens of each trial, and the processor time (s) allowed per trial and per token.
TRIALS: Final = (16, 64, 256)
FIRST_SECONDS: Final = 0.5
MASK_SECONDS: Final = 0.003
#: The number of valid structures that are cached.
_REMEMBERED: Final = 256


class GrammarValidator:
    """Compiles grammars in a pipeline over a minimal network and generates tokens with them.

    Masks are measured by the processor time of the threads that this pipeline starts (``processor_time``), so that a
    busy machine does not make grammars appear slow. Compiled grammars are stored in the tokenizer, which the model's
    pipeline shares. Only one thread at a time may use the validator; it does not block other threads.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, processor_time: Callable[[], float] | None = None) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._group = ThreadGroup(COMPILING)
        self._processor_time = processor_time or self._group.seconds
        self._pipeline: Any = None
        self._good: OrderedDict[Structure, None] = OrderedDict()

    def check(self, structure: Structure) -> None:
        """Raise INVALID_ARG for a structure that does not compile, or whose masks take too long."""
        if structure in self._good:
            self._good.move_to_end(structure)
            return
        with self._group.joined():
            self._try(structure)
        self._good[structure] = None
        if len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)

    def _try(self, structure: Structure) -> None:
        self._generate(structure, 1)
        for tokens in TRIALS:
            before = self._processor_time()
            self._generate(structure, tokens)
            if self._processor_time() - before > FIRST_SECONDS + tokens * MASK_SECONDS:
                raise invalid(
                    f"the {structure.kind} that output must fit takes too much processor time at each token, as "
                    "repetitions within repetitions do that can be read in several ways"
                )

    def _generate(self, structure: Structure, tokens: int) -> None:
        import openvino
        import openvino_genai

        if self._pipeline is None:
            self._pipeline = self._build()
        config: Any = openvino_genai.GenerationConfig(
            max_new_tokens=tokens,
            eos_token_id=0,
            stop_token_ids={0},
            structured_output_config=structured_output(structure),
        )
        try:
            # Unlike ``step``, this releases the interpreter lock.
            self._pipeline.generate([openvino.Tensor(np.zeros((1, 1), np.int64))], [config])
        except RuntimeError as error:
            self._pipeline = None  # a pipeline keeps a failed request, so build a new one
            raise invalid(f"the {structure.kind} that output must fit is not valid: {reason(error)}") from None

    def _build(self) -> Any:
        import openvino
        import openvino_genai

        scheduler: Any = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = TRIALS[-1] // BLOCK + 2
        with TemporaryFolder() as folder:
            openvino.save_model(_network(self._vocabulary), folder / "openvino_model.xml")
            threads: Any = {"INFERENCE_NUM_THREADS": 1, "sampler_num_threads": 1}
            return openvino_genai.ContinuousBatchingPipeline(folder, self._tokenizer, scheduler, "CPU", **threads)


def _network(vocabulary: int) -> Any:
    """Build the smallest network that GenAI accepts: one attention layer with one head, and zero embeddings."""
    import openvino
    from openvino import opset13 as ops

    size = 8
    parameters: dict[str, Any] = {}
    for name, shape in {"input_ids": [-1, -1], "attention_mask": [-1, -1], "position_ids": [-1, -1]}.items():
        parameters[name] = ops.parameter(shape, openvino.Type.i64, name=name)
    parameters["beam_idx"] = ops.parameter([-1], openvino.Type.i32, name="beam_idx")
    for name, node in parameters.items():
        node.output(0).get_tensor().set_names({name})
    zero = ops.constant(np.int64(0))
    table = ops.constant(np.zeros((vocabulary, size), np.float32))
    hidden = ops.gather(table, parameters["input_ids"], zero)
    heads = ops.unsqueeze(hidden, ops.constant(np.int64(1)))
    batch = ops.gather(ops.shape_of(parameters["input_ids"]), ops.constant(np.array([0], np.int64)), zero)
    empty = ops.broadcast(
        ops.constant(np.float32(0)), ops.concat([batch, ops.constant(np.array([1, 0, size], np.int64))], 0)
    )
    kept, sinks = [], []
    for name in ("key", "value"):
        state = ops.read_value(empty, f"past.{name}", openvino.Type.f32, openvino.PartialShape([-1, 1, -1, size]))
        joined = ops.concat([ops.gather(state, parameters["beam_idx"], zero), heads], 2)
        kept.append(joined)
        sinks.append(ops.assign(joined, f"past.{name}"))
    mask = ops.unsqueeze(ops.unsqueeze(ops.convert(parameters["attention_mask"], "f32"), zero), zero)
    attended = ops.scaled_dot_product_attention(heads, kept[0], kept[1], mask)
    logits = ops.matmul(ops.squeeze(attended, ops.constant(np.int64(1))), table, False, True)
    logits.output(0).get_tensor().set_names({"logits"})
    return openvino.Model([ops.result(logits)], sinks, list(parameters.values()), "nothing")
