"""Random JSON that is valid by the types of a client library: typed dictionaries, unions, literals and lists."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from typing_extensions import TypeAliasType

_TEXTS = ("", "a", "Hello there", "{}", '{"a": 1}', "auto", "ä\u2028\U0001f600", "<tool_call>", "x" * 300)
#: How likely an optional member is given, and an item is added to a list.
_GIVEN, _MORE = 0.25, 0.5
#: Below this depth, optional members are left out and lists are empty.
_DEEP = 7


class RandomValues:
    """Makes values of types, with the numbers of ``chance``."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def members(self, kind: Any, depth: int = 0) -> dict[str, Any]:
        """Return the members of a typed dictionary: the required ones and some others."""
        given: dict[str, Any] = {}
        for name, hint in get_type_hints(kind, include_extras=True).items():
            required = get_origin(hint) is Required or (
                name in kind.__required_keys__ and get_origin(hint) is not NotRequired
            )
            if required or (depth < _DEEP and self._chance.random() < _GIVEN):
                given[name] = self.value(hint, depth + 1)
        return given

    def value(self, kind: Any, depth: int = 0) -> Any:
        """Return a value of a type."""
        chance, origin, arguments = self._chance, get_origin(kind), get_args(kind)
        if isinstance(kind, TypeAliasType):
            return self.value(kind.__value__, depth)
        if origin in (Required, NotRequired, Annotated):
            return self.value(arguments[0], depth)
        if origin is Literal:
            return chance.choice(arguments)
        if origin in (Union, UnionType):
            return self.value(chance.choice(arguments), depth)
        if is_typeddict(kind):
            return self.members(kind, depth)
        if origin is dict:
            return {chance.choice(_TEXTS): self.value(arguments[1], depth + 1) for _ in range(self._length(depth))}
        if kind is str or isinstance(kind, ForwardRef):
            return chance.choice(_TEXTS)
        if origin is not None and isinstance(origin, type) and issubclass(origin, Iterable):
            return [self.value(arguments[0], depth + 1) for _ in range(self._length(depth))]
        if kind is bool:
            return chance.random() < 0.5
        if kind is int:
            return chance.choice((0, 1, 2, 20, 1024, -1, 2**31, 2**70))
        if kind is float:
            return chance.choice((0, 0.0, 0.5, 1, 1.5, 2, -1e300))
        if kind is NoneType or kind is None:
            return None
        return chance.choice((None, True, 1.5, "a", [], {"type": "string"}))

    def _length(self, depth: int) -> int:
        length = 0
        while depth < _DEEP and self._chance.random() < _MORE:
            length += 1
        return length
