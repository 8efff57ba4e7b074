"""Rewrites JSON schemas so that llguidance compiles them to grammars that allow only valid texts.

``rewrite`` returns a schema of draft 2020-12 with the keywords that llguidance implements exactly. Keywords that it
lacks are expressed by others where possible (``dependentRequired``, ``propertyNames``, ``uniqueItems`` over a few
values, keywords of earlier drafts). What cannot be expressed is refused by name. A rewritten schema may allow less than
the original, but never more.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import permutations
from typing import Any, Final
from urllib.parse import unquote

from conch.backends.batching.patterns import escaped, is_writable, translate
from conch.backends.batching.unique_items import UNIQUE
from conch.core.errors import invalid

#: Keywords that change which values are valid, and that neither llguidance nor ``rewrite`` supports.
_UNSUPPORTED: Final = (
    "not", "if", "contains", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "extends",
    "disallow", "divisibleBy",
)  # fmt: skip
#: The identifiers of the drafts before 2019-09.
_OLD_DRAFT: Final = re.compile(r"http://json-schema\.org/draft-0[3-7]/(?:hyper-)?schema#?")
#: Keywords whose values are counts, which are passed on.
_COUNTS: Final = frozenset({"minItems", "maxItems", "minLength", "maxLength"})
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
#: The types, without integer, which is a number.
_TYPES: Final = frozenset({"null", "boolean", "number", "string", "array", "object"})
#: The largest number of sequences that ``uniqueItems`` is expanded to.
_SEQUENCES: Final = 400
#: The largest integer that a double represents with all smaller ones, and the largest double below 2**63.
_EXACT: Final = 2**53
_LARGEST: Final = 2**63 - 1024
#: The numbers of references, and of nested schemas, that are followed to find the values and types of a schema; and of
#: nested schemas that are compared, each of which may compare several.
_DEPTH: Final = 16
_DISJOINT_DEPTH: Final = 3
#: The number of steps in which the branches of ``oneOf`` and the items of ``uniqueItems`` are compared, and how many
#: constants or names are copied or compared in a step.
_MAX_STEPS: Final = 100_000
_STEP_ITEMS: Final = 32

_DATE: Final = (
    r"(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|"
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL: Final = "[a-z0-9]+(?:-[a-z0-9]+)*"
_PATH: Final = r"(?:[A-Za-z0-9._~!$&'()*+,;=@/-]|%[0-9A-Fa-f]{2})"
#: Schemas of the formats that llguidance lacks or for which it allows invalid texts (2023-02-30).
_FORMATS: Final[Mapping[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "hostname": {"format": "hostname", "maxLength": 253},
    "idn-hostname": {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", "maxLength": 63},
    "uri-reference": {"anyOf": [{"format": "uri"}, {"pattern": f"^{_PATH}*(?:#{_PATH}*)?$"}]},
    "json-pointer": {"pattern": "^(?:/(?:[^~/]|~[01])*)*$"},
    "relative-json-pointer": {"pattern": "^[1-9]{0,3}[0-9](?:#|(?:/(?:[^~/]|~[01])*)*)$"},
    "uri-template": {"pattern": f"^(?:{_PATH}|\\{{[A-Za-z][A-Za-z0-9_]*\\}})*$"},
}
#: Formats for which only ASCII texts are written.
_SAME_FORMATS: Final = {
    "idn-email": "email",
    "iri": "uri",
    "iri-reference": "uri-reference",
}
_NATIVE_FORMATS: Final = frozenset({"duration", "email", "ipv4", "ipv6", "uuid", "uri"})


def rewrite(schema: Any) -> Any:
    """Rewrite a JSON schema (see the module). Raises INVALID_ARG, naming the keyword."""
    try:
        return _Rewriter(schema).document()
    except RecursionError:
        raise invalid("the JSON schema is nested too deeply") from None


class _TooManyStepsError(Exception):
    """Comparing schemas takes more than ``_MAX_STEPS`` steps."""


@dataclass(frozen=True, slots=True)
class _Constants:
    """Distinct values by their keys (``_key``), and their types."""

    values: Mapping[str, Any]
    types: frozenset[str]


class _Rewriter:
    """Rewrites one document. References are rewritten to ``$defs`` of its root with numbers for names."""

    def __init__(self, root: Any) -> None:
        self._root = root
        draft = root.get("$schema") if isinstance(root, dict) else None
        #: Whether a ``$ref`` hides its siblings, as before draft 2019-09. Other spellings of a draft's identifier, with
        #: ``https`` for example, name none, so that validators use the newest one.
        self._old = isinstance(draft, str) and _OLD_DRAFT.fullmatch(draft) is not None
        self._id = str(root.get("$id") or root.get("id") or "").rstrip("#") if isinstance(root, dict) else ""
        #: The targets of references, and their names in ``$defs``.
        self._targets: dict[str, Any] = {}
        self._numbers: dict[str, str] = {}
        #: The parts that references name by ``$anchor``, or by an identifier that begins with ``#``.
        self._anchors: dict[str, Any] = {}
        for node in _nodes(root):
            for name in (node.get("$id"), node.get("id"), f"#{node.get('$anchor')}"):
                if isinstance(name, str) and name.startswith("#"):
                    self._anchors.setdefault(name, node)
        self._steps = 0
        #: The constants of parts that list them, by the identity of the part.
        self._constants: dict[int, _Constants] = {}
        divisors = {_decimal(node["multipleOf"]) for node in _nodes(root) if _is_number(node.get("multipleOf"))}
        places = max([0, *(-int(divisor.as_tuple().exponent) for divisor in divisors)])
        #: Whether the divisors have a common multiple in 32 bits, in which llguidance computes it.
        self._divisible = len(divisors) < 2 or math.prod(divisor.scaleb(places) for divisor in divisors) < 2**32

    def document(self) -> Any:
        rewritten = self._schema(self._root)
        definitions: dict[str, Any] = {}
        while left := [reference for reference, name in self._numbers.items() if name not in definitions]:
            for reference in left:
                definitions[self._numbers[reference]] = self._schema(self._targets[reference])
        if definitions:
            rewritten["$defs"] = definitions
        return rewritten

    def _schema(self, node: Any) -> Any:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise invalid("a JSON schema must be an object or true or false")
        identified = node is not self._root and any(_is_identifier(node.get(key)) for key in ("$id", "id"))
        if identified and any("$ref" in inner for inner in _nodes(node)):
            # References in such a schema are relative to it.
            raise invalid("keyword '$id' is not supported for a part of a JSON schema with '$ref'")
        if self._old and isinstance(node.get("$ref"), str):
            return {"$ref": self._reference(node["$ref"])}
        for keyword in _UNSUPPORTED:
            if keyword in node:
                raise invalid(f"keyword '{keyword}' is not supported in JSON schemas")
        result: dict[str, Any] = {}
        others: list[Any] = []
        for keyword, value in node.items():
            self._keyword(keyword, value, node, result, others)
        if node.get("uniqueItems") is True:
            with _comparing("uniqueItems"):
                self._unique(node, result, others)
        if others:
            result["allOf"] = [*result.get("allOf", []), *others]
        return result

    def _keyword(self, keyword: str, value: Any, node: Any, result: dict[str, Any], others: list[Any]) -> None:
        """Rewrite a keyword of ``node`` into ``result``, or into a schema of ``others`` that must hold too."""
        match keyword:
            case _ if keyword in _COUNTS:
                result[keyword] = _count(keyword, value)
            case "type":
                result[keyword] = _names(keyword, value) if isinstance(value, list) else _text(keyword, value)
            case "required":
                result[keyword] = _names(keyword, value)
            case _ if keyword in _BOUNDS:
                _bound(keyword, value, node, result)
            case "$ref":
                result[keyword] = self._reference(value)
            case "const" | "enum":
                _check_value(value if keyword == "const" else _enum(value))
                result[keyword] = value
            case "multipleOf":
                if not _is_number(value) or value <= 0:
                    raise invalid("keyword 'multipleOf' must be a number above 0")
                if not self._divisible:
                    raise invalid(f"keyword 'multipleOf' of {value} is not supported in combination with the others")
                result[keyword] = value
            case "pattern":
                result[keyword] = translate(_text(keyword, value))
            case "format":
                if (known := _format(value)) is not None:
                    others.append(known)
            case "anyOf" | "allOf" | "prefixItems":
                result[keyword] = [self._schema(branch) for branch in _list(keyword, value)]
            case "oneOf":
                with _comparing(keyword):
                    others.append(self._one_of(_list(keyword, value), self._types(node)))
            case "items" if isinstance(value, list):  # until draft 2019-09
                result["prefixItems"] = [self._schema(item) for item in value]
                if "additionalItems" in node:
                    result["items"] = self._schema(node["additionalItems"])
            case "items" | "additionalProperties":
                result[keyword] = self._schema(value)
            case "properties":
                result[keyword] = {name: self._schema(inner) for name, inner in _object(keyword, value).items()}
            case "patternProperties":
                result[keyword] = {
                    translate(pattern): self._schema(inner) for pattern, inner in _object(keyword, value).items()
                }
            case "propertyNames":
                others += self._property_names(value)
            case "minProperties":
                # llguidance counts a name that is written twice as two.
                if _count(keyword, value) == 1:
                    result[keyword] = 1
                elif value > len(set(_names("required", node.get("required", [])))):
                    raise invalid("keyword 'minProperties' above 1 requires the same number of names in 'required'")
            case "maxProperties":
                closed = node.get("additionalProperties") is False and not node.get("patternProperties")
                most = _count(keyword, value)
                if not closed or len(_object("properties", node.get("properties", {}))) > most:
                    result[keyword] = most
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                for name, inner in _object(keyword, value).items():
                    then = {"required": _names(keyword, inner)} if isinstance(inner, list) else self._schema(inner)
                    others.append({"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, then]}]})

    def _reference(self, reference: Any) -> str:
        """Return the rewritten reference to a part of this document."""
        local = self._local(_text("$ref", reference))
        self._numbers.setdefault(local, str(len(self._numbers)))
        return f"#/$defs/{self._numbers[local]}"

    def _local(self, reference: str) -> str:
        """Return a reference within the document, whose target is in ``_targets``."""
        local = reference.removeprefix(self._id) if self._id else reference
        if local and not local.startswith("#"):
            raise invalid(f"keyword '$ref' to another document, '{reference[:80]}', is not supported")
        if local not in self._targets:
            self._targets[local] = self._target(local)
        return local

    def _target(self, local: str) -> Any:
        path = unquote(local[1:])
        node = self._root
        if path and not path.startswith("/"):
            if local in self._anchors:
                return self._anchors[local]
            path = f"/{path}"
        for step in path.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isascii() and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, dict) and key in node:
                node = node[key]
            else:
                raise invalid(f"keyword '$ref' refers to '{local[:80]}', which does not exist")
        return node

    def _one_of(self, branches: list[Any], types: frozenset[str]) -> Any:
        """Return the schema that replaces ``oneOf`` for values of these types."""
        constants = [self._values(branch) for branch in branches]
        keys = [found.values.keys() for found in constants if found is not None]
        self._step(sum(map(len, keys)) // _STEP_ITEMS)
        if len(keys) == len(branches) and sum(map(len, keys)) == len(set().union(*keys)):
            return {"anyOf": [self._schema(branch) for branch in branches]}
        rewritten = []
        for branch in branches:
            parts = [self._schema(branch)]
            for other in branches:
                if other is not branch and not self._disjoint(branch, other, types):
                    exclusion = self._exclusion(branch, other, types)
                    if exclusion is None:
                        return {"oneOf": [self._schema(branch) for branch in branches]}
                    parts.append(exclusion)
            rewritten.append({"allOf": parts} if len(parts) > 1 else parts[0])
        return {"anyOf": rewritten}

    def _exclusion(self, branch: Any, other: Any, types: frozenset[str]) -> Any:
        """Return a schema of objects that are not valid for ``other``; None if ``branch`` cannot have it."""
        branch, other = self._followed(branch), self._followed(other)
        if types & self._types(branch) & self._types(other) != {"object"} or True in (branch, other):
            return None
        required = set(self._required(branch))
        for name in self._required(other):
            if name not in required:
                return {"properties": {name: False}}
        if other.get("additionalProperties") is False and not other.get("patternProperties"):
            names = _object("properties", branch.get("properties", {}))
            self._step(len(names) // _STEP_ITEMS)
            for name in names:
                if name not in _object("properties", other.get("properties", {})):
                    return {"required": [name]}
        return None

    def _property_names(self, value: Any) -> list[Any]:
        """Return the schemas that replace ``propertyNames`` of an object."""
        limits = value.keys() - {"type", "title", "description", "$comment"} if isinstance(value, dict) else None
        if value is True or (limits == set() and value.get("type", "string") == "string"):
            return []
        if limits == {"pattern"}:
            pattern = translate(_text("pattern", value["pattern"]))
        elif limits in ({"enum"}, {"const"}):
            _check_value(value)
            constants = _enum(value["enum"]) if "enum" in value else [value["const"]]
            allowed = [name for name in constants if isinstance(name, str)]
            pattern = f"^(?:{'|'.join(''.join(map(escaped, name)) for name in allowed)})$"
        else:
            raise invalid("keyword 'propertyNames' is supported only with one of pattern, enum or const")
        return [{"patternProperties": {pattern: True}, "additionalProperties": False}]

    def _unique(self, node: Any, result: dict[str, Any], others: list[Any]) -> None:
        """Rewrite ``uniqueItems``: as a mark for ``UniqueItems`` if the items are texts, otherwise as constants."""
        least, most, items = result.get("minItems", 0), result.get("maxItems"), node.get("items", True)
        if "array" not in self._types(node) or (most is not None and most <= 1):
            return
        constants = None
        if "prefixItems" not in node and not isinstance(items, list):
            if self._is_any_text(items):
                result[UNIQUE] = True
                return
            constants = self._values(items)
        if constants is None:
            raise invalid("keyword 'uniqueItems' is supported only for arrays of constants, or of texts without limits")
        distinct = list(constants.values.values())
        _check_value(distinct)
        if all(isinstance(value, str) for value in distinct):
            if least > len(distinct):
                raise invalid(f"keyword 'minItems' requires {least} of {len(distinct)} unique constants")
            result[UNIQUE] = distinct
            return
        longest = len(distinct) if most is None else min(most, len(distinct))
        lengths = range(least, longest + 1)
        if not _are_few(len(distinct), lengths):
            raise invalid(
                f"keyword 'uniqueItems' is supported for at most {_SEQUENCES} sequences, and an array of these "
                f"{len(distinct)} constants has more"
            )
        arrays = [list(array) for length in lengths for array in permutations(distinct, length)]
        rest = self._types(node) - {"array"}
        others.append({"anyOf": [{"enum": arrays}, *({"type": name} for name in sorted(rest))]})
        if isinstance(items, dict) and items.keys() <= {"enum", "const"}:
            del result["items"]  # which the arrays fit

    def _is_any_text(self, node: Any) -> bool:
        """Whether the values of a schema are texts that can all be made longer."""
        node = self._followed(node)
        limits = {"enum", "const", "maxLength", "pattern", "format", "allOf", "anyOf", "oneOf"}
        return isinstance(node, dict) and node.get("type") in ("string", ["string"]) and not limits & node.keys()

    # Properties of schemas. Some keywords are ignored: the schemas may allow less, but not more.

    def _step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > _MAX_STEPS:
            raise _TooManyStepsError

    def _required(self, node: Mapping[str, Any]) -> list[str]:
        names = _names("required", node.get("required", []))
        self._step(len(names) // _STEP_ITEMS)
        return names

    def _followed(self, node: Any) -> Any:
        self._step()
        for _ in range(_DEPTH):
            if not isinstance(node, dict) or not isinstance(node.get("$ref"), str):
                return node if isinstance(node, dict | bool) else True
            node = self._targets[self._local(node["$ref"])]
        return True

    def _values(self, node: Any, depth: int = 0) -> _Constants | None:
        """Return constants that include all valid values; None if there are no such constants."""
        node = self._followed(node)
        if node is True or depth > _DEPTH:
            return None
        if node is False or "const" in node or "enum" in node or node.get("type") in ("boolean", "null"):
            if id(node) not in self._constants:
                self._constants[id(node)] = _constants(node)
            return self._constants[id(node)]
        for keyword in ("anyOf", "oneOf"):
            parts = [self._values(branch, depth + 1) for branch in _entries(node, keyword)]
            known = [part for part in parts if part is not None]
            if known and len(known) == len(parts):
                self._step(sum(len(part.values) for part in known) // _STEP_ITEMS)
                values = {key: value for part in known for key, value in part.values.items()}
                return _Constants(values, frozenset().union(*(part.types for part in known)))
        return None

    def _types(self, node: Any, depth: int = 0) -> frozenset[str]:
        """Return a set that includes the types of all valid values; an integer is a number."""
        node = self._followed(node)
        if node is False:
            return frozenset()
        if node is True or depth > _DEPTH:
            return _TYPES
        types = _TYPES
        if (constants := self._values(node, depth)) is not None:
            types &= constants.types
        if "type" in node:
            named = _entries(node, "type") or [node["type"]]
            types &= {"number" if name == "integer" else str(name) for name in named}
        for keyword in ("anyOf", "oneOf"):
            if branches := _entries(node, keyword):
                types &= frozenset().union(*(self._types(branch, depth + 1) for branch in branches))
        for branch in _entries(node, "allOf"):
            types &= self._types(branch, depth + 1)
        return types

    def _disjoint(self, first: Any, second: Any, types: frozenset[str] = _TYPES, depth: int = 0) -> bool:
        """Whether no value of these types is valid for both schemas. False if that is not certain."""
        first, second = self._followed(first), self._followed(second)
        common = types & self._types(first) & self._types(second)
        if not common:
            return True
        if isinstance(first, bool) or isinstance(second, bool) or depth > _DISJOINT_DEPTH:
            return False
        constants, others = self._values(first), self._values(second)
        if constants is not None and others is not None:
            self._step(min(len(constants.values), len(others.values)) // _STEP_ITEMS)
            return constants.values.keys().isdisjoint(others.values.keys())
        for one, other in ((first, second), (second, first)):
            for keyword in ("anyOf", "oneOf"):
                branches = _entries(one, keyword)
                if branches and all(self._disjoint(branch, other, types, depth + 1) for branch in branches):
                    return True
            if any(self._disjoint(branch, other, types, depth + 1) for branch in _entries(one, "allOf")):
                return True
        return all(self._disjoint_in(name, first, second, depth) for name in common)

    def _disjoint_in(self, name: str, first: Any, second: Any, depth: int) -> bool:
        """Whether no value of one type is valid for both schemas."""
        for one, other in ((first, second), (second, first)):
            if name == "object" and any(
                self._disjoint(_property(one, key), _property(other, key), depth=depth + 1)
                for key in self._required(one)
            ):
                return True
            if name in _SIZES:
                most, least = one.get(_SIZES[name][0]), other.get(_SIZES[name][1])
                if _is_number(most) and _is_number(least) and most < least:
                    return True
        return False


#: The keywords of the largest and the least size, by type.
_SIZES: Final = {
    "string": ("maxLength", "minLength"),
    "array": ("maxItems", "minItems"),
    "number": ("maximum", "minimum"),
}


@contextmanager
def _comparing(keyword: str) -> Iterator[None]:
    try:
        yield
    except _TooManyStepsError:
        raise invalid(f"keyword '{keyword}' has too many branches, or too large ones, to compare them") from None


def _constants(node: Any) -> _Constants:
    """Return the values that a schema lists, or those of a type of few values."""
    if node is False:
        values = []
    elif "const" in node:
        values = [node["const"]]
    elif "enum" in node:
        values = _enum(node["enum"])
    else:
        values = [None] if node["type"] == "null" else [False, True]
    return _Constants({_key(value): value for value in values}, frozenset(map(_type_of, values)))


def _are_few(count: int, lengths: range) -> bool:
    """Whether ``count`` values have at most ``_SEQUENCES`` sequences of these lengths, none longer than ``count``."""
    total, sequences = 0, 1
    for length in range(lengths.stop if lengths else 0):
        # Longer sequences are never fewer.
        sequences *= count - length + 1 if length else 1
        total += sequences if length in lengths else 0
        if max(total, sequences) > _SEQUENCES:
            return False
    return True


def _property(node: Any, name: Any) -> Any:
    """Return a schema of the property of an object."""
    properties = node.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if node.get("patternProperties") else node.get("additionalProperties", True)


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _key(value: Any) -> str:
    """Return a text that is equal for values that JSON Schema calls equal, such as 1 and 1.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(_key(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{_key(item)}' for name, item in sorted(value.items()))}}}"
    return json.dumps(value)


def _is_identifier(value: Any) -> bool:
    return isinstance(value, str) and not value.startswith("#")


def _nodes(document: Any) -> Iterator[Any]:
    """Yield all objects of a document."""
    left = [document]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            yield node
            left += node.values()
        elif isinstance(node, list):
            left += node


def _entries(node: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return a list in a schema, empty if it is missing or not a list."""
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def _is_number(value: Any) -> bool:
    """Whether a value is a number of JSON, which are finite."""
    # isfinite raises an error for integers beyond the range of doubles.
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    )


def _decimal(number: float) -> Decimal:
    return Decimal(repr(number)).normalize()


def _text(keyword: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(f"keyword '{keyword}' must be a text")
    return value


def _count(keyword: str, value: Any) -> int:
    if not _is_number(value) or value < 0 or value != int(value):
        raise invalid(f"keyword '{keyword}' must be an integer of at least 0")
    return int(value)


def _names(keyword: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise invalid(f"keyword '{keyword}' must be a list of names")
    return value


def _enum(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise invalid("keyword 'enum' must be a list of values")
    return value


def _list(keyword: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise invalid(f"keyword '{keyword}' must be a list of JSON schemas")
    return value


def _object(keyword: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(f"keyword '{keyword}' must be an object")
    return value


def _check_value(value: Any) -> None:
    """Raise INVALID_ARG for a constant that llguidance would write as another value."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list):
            left += item
        elif isinstance(item, str):
            character = next((character for character in item if not is_writable(character)), None)
            if character is not None:
                raise invalid(f"a constant has a control character, U+{ord(character):04X}")
        elif isinstance(item, int | float) and not isinstance(item, bool) and not _is_exact(item):
            raise invalid(f"the constant {str(item)[:40]} is outside of the range of exact integers")


def _is_exact(number: int | float) -> bool:
    """Whether llguidance writes a number with all of its digits."""
    if abs(number) <= _EXACT:
        return True
    try:
        value = float(number)
    except OverflowError:
        return False
    # Integers of 64 bits are written as such, others with the digits that tell a double from its neighbours.
    written = value if isinstance(number, int) and abs(number) < 2**63 else _decimal(value)
    return math.isfinite(value) and written == number


def _format(name: Any) -> Any:
    """Return the schema of a format; None if it is not one of JSON Schema's, so that validators ignore it."""
    name = _SAME_FORMATS.get(name, name) if isinstance(name, str) else ""
    if name == "regex":
        raise invalid("format 'regex' is not supported")
    return {"format": name} if name in _NATIVE_FORMATS else _FORMATS.get(name)


def _bound(keyword: str, value: Any, node: Any, result: dict[str, Any]) -> None:
    """Rewrite the bound of a number. Beyond the range of llguidance, bounds are moved inwards."""
    if isinstance(value, bool) and keyword.startswith("exclusive"):
        # Draft 4: whether the other keyword's bound is exclusive.
        value = node.get(keyword.removeprefix("exclusive").lower()) if value else None
        if value is None:
            return
    if not _is_number(value):
        raise invalid(f"keyword '{keyword}' must be a number")
    lower = keyword.endswith("inimum")
    if (value > _EXACT) if lower else (value < -_EXACT):
        raise invalid(f"keyword '{keyword}' of {value} is outside of the range of exact integers")
    if abs(value) >= _LARGEST:
        value = -_LARGEST if lower else _LARGEST
    elif abs(value) > _EXACT and float(value) != value:
        nearest = float(value)
        inwards = nearest >= value if lower else nearest <= value
        value = int(nearest if inwards else math.nextafter(nearest, 0.0))
    result[keyword] = value
