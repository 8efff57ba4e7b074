"""Value types of sampling parameters: parse and validate values from JSON, text or tensors.

Pure functions. ``read`` gets the name of the parameter and a label for messages, such as ``input 'beam_width'``; it
raises INVALID_ARG with one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Final, Protocol

from conch.core.errors import ConchError, invalid
from conch.core.sampling.structures import json_of

INT32: Final = 2**31 - 1
#: The maximum absolute value of a bias, as in OpenAI's API.
_BIAS: Final = 100
_MAX_BIASES: Final = 1024
MAX_STOP_TOKENS: Final = 128


class ValueType(Protocol):
    """The interface of a value type.

    ``wanted`` describes the values in errors and in the documentation; ``datatype`` and ``dims`` are those of a tensor.
    """

    @property
    def wanted(self) -> str: ...

    @property
    def datatype(self) -> str: ...

    @property
    def dims(self) -> tuple[int, ...]: ...

    def read(self, name: str, value: Any, label: str) -> Any:
        """Convert ``value`` to its type. Raises INVALID_ARG for an invalid value."""


def _wrong(label: str, value: Any, expected: str) -> ConchError:
    return invalid(f"{label} is {json.dumps(value)[:80]}; it must be {expected}")


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer from ``low`` to ``high``; values below ``clamp`` are replaced by ``clamp``."""

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
    """A finite number from ``low`` (excluded if ``above`` is true) to ``high``."""

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
    """A boolean, also as the text "true" or "false" or the number 0 or 1."""

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


@dataclass(frozen=True, slots=True)
class Text:
    """A text; with a ``length``, one of 1 to ``length`` characters."""

    length: int = 0
    wanted: ClassVar = "a text"
    datatype: ClassVar = "BYTES"
    dims: ClassVar = (1,)

    def read(self, name: str, value: Any, label: str) -> str:
        if not isinstance(value, str):
            raise _wrong(label, value, self.wanted)
        if self.length and not 0 < len(value) <= self.length:
            raise invalid(f"'{name}' has {len(value)} characters; it must have 1 to {self.length}")
        return value


@dataclass(frozen=True, slots=True)
class TextList:
    """A text or a list of at most ``most`` texts, each of at most ``length`` characters (0: any); drops empty texts."""

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
    """Biases of logits by token id, as a JSON object or its text."""

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
    """A JSON value or its text, parsed by ``reader``, a function of name and value."""

    wanted: str
    reader: Callable[[str, Any], Any]
    datatype: ClassVar = "BYTES"
    dims: ClassVar = (1,)

    def read(self, name: str, value: Any, label: str) -> Any:
        return self.reader(name, value)
