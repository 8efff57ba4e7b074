"""What a model's configuration asks of the backend: its ``parameters``, over the values of ``model.json``.

Runs in workers and in ``conch convert``; needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any, Final

from conch.errors import ConchError, invalid

ENGINES: Final = ("torch", "onnxruntime", "openvino")
#: Engines that generate text; ``torch`` is another name for ``transformers`` there.
TEXT_ENGINES: Final = ("openvino", "transformers", "vllm")

#: The values that a parameter may have, where they are few.
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "engine": ("auto", *dict.fromkeys((*ENGINES, *TEXT_ENGINES))),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "truncation": ("truncate", "refuse"),
    "pooling": ("", "mean", "cls", "max", "last"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of a model, typed; an empty or zero value means what the checkpoint says.

    ``model`` is a Hub id or a folder and goes before the version directory's own files.  ``max_length`` is in
    tokens, ``max_batch_tokens`` in tokens with padding, ``threads`` the intra-op threads of all instances together.
    ``extra`` are the parameters that are not declared here, which a task may read with the methods below.
    """

    model: str = ""
    revision: str = ""
    task: str = ""
    engine: str = "auto"
    variant: str = ""
    dtype: str = "auto"
    max_length: int = 0
    truncation: str = "truncate"
    pooling: str = ""
    normalize: bool | None = None
    max_batch_tokens: int = 0
    threads: int = 0
    trust_remote_code: bool = False
    cache_dir: str = ""
    offline: bool = False
    top_k: int = 0
    extra: Mapping[str, str] = field(default_factory=dict)
    #: The names that a configuration gives, also those whose value is the default.
    given: frozenset[str] = field(default=frozenset(), compare=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Options:
        """The options in the ``parameters`` of a configuration as JSON.  Raises INVALID_ARG, naming the parameter."""
        parameters = config.get("parameters") or {}
        return cls.from_values({name: value.get("string_value", "") for name, value in parameters.items()})

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Options:
        """The options that ``values``, texts or JSON scalars, ask for.  Raises INVALID_ARG, naming the parameter."""
        texts = {name: _text(name, value) for name, value in values.items() if value is not None}
        typed = {name: _PARSERS[name](name, text) for name, text in texts.items() if name in _PARSERS}
        extra = {name: text for name, text in texts.items() if name not in _PARSERS}
        return cls(**typed, extra=extra, given=frozenset(texts))

    def over(self, values: Mapping[str, Any]) -> Options:
        """These options, and where they say nothing, those of ``values`` (the content of a ``model.json``)."""
        below = Options.from_values(values)
        unsaid = [
            one.name
            for one in fields(self)
            if one.name in below.given and one.name not in self.given and getattr(self, one.name) == one.default
        ]
        return replace(
            self,
            **{name: getattr(below, name) for name in unsaid},
            extra={**below.extra, **self.extra},
            given=self.given | below.given,
        )

    def text(self, name: str, default: str = "") -> str:
        """An undeclared parameter as text."""
        return self.extra.get(name, default)

    def integer(self, name: str, default: int = 0) -> int:
        """An undeclared parameter as a number that is not negative.  Raises INVALID_ARG, naming it."""
        return _integer(name, self.extra[name]) if name in self.extra else default

    def number(self, name: str, default: float = 0.0) -> float:
        """An undeclared parameter as a finite number.  Raises INVALID_ARG, naming it."""
        if name not in self.extra:
            return default
        try:
            value = float(self.extra[name])
        except ValueError:
            value = float("nan")
        if not isfinite(value):
            raise _wrong(name, self.extra[name], "a number")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """An undeclared parameter as a truth value.  Raises INVALID_ARG, naming it."""
        return _boolean(name, self.extra[name]) if name in self.extra else default


def _wrong(name: str, text: str, wanted: str) -> ConchError:
    return invalid(f"parameter '{name}' is '{text}'; it must be {wanted}")


def _text(name: str, value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return str(value).strip()
    raise invalid(f"parameter '{name}' must be a text, a number or a truth value, not {type(value).__name__}")


def _string(name: str, text: str) -> str:
    return text


def _choice(name: str, text: str) -> str:
    choices = _CHOICES[name]
    if text.lower() not in choices:
        raise _wrong(name, text, f"one of {', '.join(choice for choice in choices if choice)}")
    return text.lower()


def _integer(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _wrong(name, text, "a whole number that is not negative")
    return int(text)


def _boolean(name: str, text: str) -> bool:
    match text.lower():
        case "true" | "1" | "yes" | "on":
            return True
        case "false" | "0" | "no" | "off":
            return False
    raise _wrong(name, text, "true or false")


def _parsers() -> Iterator[tuple[str, Callable[[str, str], Any]]]:
    by_type = {"int": _integer, "bool": _boolean, "bool | None": _boolean, "str": _string}
    for one in fields(Options):
        if one.name in _CHOICES:
            yield one.name, _choice
        elif str(one.type) in by_type:
            yield one.name, by_type[str(one.type)]


#: How the text of each declared parameter is read.
_PARSERS: Final[Mapping[str, Callable[[str, str], Any]]] = dict(_parsers())
