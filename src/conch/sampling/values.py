"""Types of sampling parameters: each reads a value from JSON, from text or from a tensor, and refuses what is wrong.

Pure.  ``read`` gets the name under which a value was given and a label for it, such as ``input 'beam_width'``; it
raises INVALID_ARG, naming either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Final, Protocol

from conch.errors import ConchError, invalid
from conch.sampling.structures import json_of

INT32: Final = 2**31 - 1
#: The limits of OpenAI's API for the bias of a token.
_BIAS: Final = 100
_MAX_BIASES: Final = 1024
MAX_STOP_TOKENS: Final = 128


class ValueType(Protocol):
    """``wanted`` describes the values in errors and documents; ``datatype`` and ``dims`` are those of a tensor."""

    @property
    def wanted(self) -> str: ...

    @property
    def datatype(self) -> str: ...

    @property
    def dims(self) -> tuple[int, ...]: ...

    def read(self, name: str, value: Any, label: str) -> Any:
        """The value in its type.  Raises INVALID_ARG."""


def _wrong(label: str, value: Any, wanted: str) -> ConchError:
    return invalid(f"{label} is {json.dumps(value)[:80]}; it must be {wanted}")


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number; values below ``clamp`` are accepted and mean the same as ``clamp``."""

    low: int
    high: int = INT32
    clamp: int | None = None
    dims: ClassVar = (1,)

    @property
    def wanted(self) -> str:
        return f"a whole number of at least {self.low}" + ("" if self.high == INT32 else f" and at most {self.high}")

    @property
    def datatype(self) -> str:
        return "INT32" if self.high <= INT32 else "UINT64"

    def read(self, name: str, value: Any, label: str) -> int:
        number: int | None = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, float) and value.is_integer():
            number = int(value)
        elif isinstance(value, str):
            try:
                number = int(value)
            except ValueError:
                number = None
        if number is None or not self.low <= number <= self.high:
            raise _wrong(label, value, self.wanted)
        return number if self.clamp is None else max(number, self.clamp)


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from ``low`` (excluded where ``above``) to ``high``."""

    low: float
    high: float
    wanted: str
    above: bool = False
    datatype: ClassVar = "FP32"
    dims: ClassVar = (1,)

    def read(self, name: str, value: Any, label: str) -> float:
        try:
            number = float(value) if not isinstance(value, bool) else float("nan")
        except (OverflowError, TypeError, ValueError):
            number = float("nan")
        if not isfinite(number) or not self.low <= number <= self.high or (self.above and number == self.low):
            raise _wrong(label, value, self.wanted)
        return number


class Flag:
    """True or false, also as a text or as 0 and 1."""

    wanted: ClassVar = "true or false"
    datatype: ClassVar = "BOOL"
    dims: ClassVar = (1,)

    def read(self, name: str, value: Any, label: str) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value in (0, 1):
            return bool(value)
        raise _wrong(label, value, self.wanted)


class Text:
    """A text."""

    wanted: ClassVar = "a text"
    datatype: ClassVar = "BYTES"
    dims: ClassVar = (1,)

    def read(self, name: str, value: Any, label: str) -> str:
        if not isinstance(value, str):
            raise _wrong(label, value, self.wanted)
        return value


@dataclass(frozen=True, slots=True)
class TextList:
    """A text or at most ``most`` of them, each of at most ``length`` characters (0: any); empty ones are left out."""

    noun: str
    most: int
    length: int = 0
    wanted: ClassVar = "a text or a list of texts"
    datatype: ClassVar = "BYTES"
    dims: ClassVar = (-1,)

    def read(self, name: str, value: Any, label: str) -> tuple[str, ...]:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise _wrong(label, value, self.wanted)
        texts = tuple(text for text in listed if text)
        if len(texts) > self.most:
            raise invalid(f"'{name}' has {len(texts)} {self.noun}s; at most {self.most} are allowed")
        for text in texts:
            if self.length and len(text) > self.length:
                raise invalid(
                    f"'{name}' has a {self.noun} of {len(text)} characters; at most {self.length} are allowed"
                )
        return texts


class TokenIds:
    """A list of token ids."""

    wanted: ClassVar = "a list of token ids"
    datatype: ClassVar = "INT32"
    dims: ClassVar = (-1,)

    def read(self, name: str, value: Any, label: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(
            isinstance(id, int) and not isinstance(id, bool) and 0 <= id <= INT32 for id in value
        ):
            raise _wrong(label, value, self.wanted)
        if len(value) > MAX_STOP_TOKENS:
            raise invalid(f"'{name}' has {len(value)} token ids; at most {MAX_STOP_TOKENS} are allowed")
        return tuple(value)


class Biases:
    """What is added to logits, by token id; a JSON object or the text of one."""

    wanted: ClassVar = f"an object of biases, -{_BIAS} to {_BIAS}, by token id"
    datatype: ClassVar = "BYTES"
    dims: ClassVar = (1,)

    def read(self, name: str, value: Any, label: str) -> dict[int, float]:
        document = json_of(name, value)
        if isinstance(document, dict) and len(document) > _MAX_BIASES:
            raise invalid(f"'{name}' has {len(document)} token ids; at most {_MAX_BIASES} are allowed")
        try:
            biases = {int(token): float(bias) for token, bias in document.items()}
        except (AttributeError, OverflowError, TypeError, ValueError):
            raise _wrong(label, value, "an object of biases by token id") from None
        if not all(isfinite(bias) and -_BIAS <= bias <= _BIAS for bias in biases.values()):
            raise _wrong(label, value, self.wanted)
        return biases


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON value, or the text of one, that ``reader`` (of name and value) makes sense of."""

    wanted: str
    reader: Callable[[str, Any], Any]
    datatype: ClassVar = "BYTES"
    dims: ClassVar = (1,)

    def read(self, name: str, value: Any, label: str) -> Any:
        return self.reader(name, value)
