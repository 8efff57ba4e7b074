"""The options of a model: declares, validates and parses its ``parameters`` and the defaults in ``model.json``.

Runs in workers and in ``conch convert``; requires only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any, Final

from conch.config.parameters import Parameter, parameter_texts
from conch.core.errors import ConchError, invalid
from conch.core.sampling.parameters import check_adapter_name

#: Engines for tasks with a single forward pass; each loads its own kind of files.
ENGINES: Final = ("torch", "onnxruntime", "openvino")
#: Engines that generate text, with the kind of files that each loads: ``torch`` means a checkpoint's own weights,
#: ``openvino`` for an export, ``gguf`` for a GGUF file. As an engine name, ``torch`` is an alias of ``transformers``
#: for text generation.
TEXT_ENGINES: Final[Mapping[str, str]] = {
    "llamacpp": "gguf", "openvino": "openvino", "transformers": "torch", "vllm": "torch",
}  # fmt: skip

#: The default limit of a text (bytes): ``_TOKEN_BYTES`` per token of the model, far more than natural text has, but at
#: least ``_LEAST_TEXT``.
_LEAST_TEXT: Final = 1 << 20
_TOKEN_BYTES: Final = 32

#: Parameters with a fixed set of values.
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "engine": ("auto", *dict.fromkeys((*ENGINES, *TEXT_ENGINES))),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "truncation": ("auto", "truncate", "refuse"),
    "pooling": ("", "mean", "cls", "max", "last"),
}


def files_for(engine: str) -> str:
    """Return the kind of files that an engine loads, with its name in ``conch.json``; ``auto`` for ``auto``."""
    return TEXT_ENGINES.get(engine, engine)


def extra_of(engine: str) -> str:
    """Return the pip extra with the requirements of an engine."""
    return engine if engine in ("llamacpp", "onnxruntime", "openvino") else "huggingface"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _parameter(default: Any, values: str, shown: str, help: str) -> Any:
    """Declare a parameter field: its default, and its values, default and meaning for the documentation."""
    return field(default=default, metadata={"values": values, "default": shown, "help": help})


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of a model that apply to all tasks; an empty or zero value selects the checkpoint's default.

    ``extra`` has all other parameters as text; tasks and engines read them with the methods below.
    """

    model: str = _parameter(
        "",
        "id on the Hub, or folder",
        "the version directory",
        "the checkpoint; takes precedence over the directory's own files. "
        "A path may begin with `$$TRITON_MODEL_DIRECTORY`",
    )
    revision: str = _parameter("", "branch, tag or commit", "the Hub's default branch", "revision on the Hub")
    task: str = _parameter("", "see [Tasks](#tasks)", "detected from the files", "the task of the model")
    engine: str = _parameter(
        "auto",
        f"{_listed(('auto', *ENGINES))}, for GGUF files `llamacpp`; for text generation {_listed(TEXT_ENGINES)}",
        "`auto`",
        "the engine that runs the network, see [Engines](#engines)",
    )
    variant: str = _parameter("", "a name in `conch.json`", "its `auto`", "variant of a converted model")
    by_shape: bool = _parameter(
        True,
        "`true`, `false`",
        "`true`",
        "load both variants of a converted model whose `conch.json` names a second one for some shapes; "
        "`false`: load only `auto`",
    )
    dtype: str = _parameter(
        "auto",
        "`auto`, `float32`, `bfloat16`, `float16`",
        "`auto`",
        "on PyTorch and for text generation. `auto`: float32 on a CPU, as stored on a GPU",
    )
    max_length: int = _parameter(0, "tokens", "from the checkpoint, otherwise 512", "the longest text")
    max_text_bytes: int = _parameter(
        0,
        "bytes",
        "32 for each token that the model takes, at least 1 MiB",
        "the longest text that is read at all: a longer one is refused before it is tokenised",
    )
    truncation: str = _parameter(
        "auto",
        "`auto`, `truncate`, `refuse`",
        "`auto`",
        "`truncate` or `refuse` longer texts. `auto`: `refuse` for text generation, and if the checkpoint has no "
        "limit; otherwise `truncate`",
    )
    pooling: str = _parameter(
        "",
        "`mean`, `cls`, `max`, `last`",
        "sentence-transformers' modules, else `mean`",
        "how token embeddings become the embedding of a text",
    )
    normalize: bool | None = _parameter(
        None, "`true`, `false`", "sentence-transformers' modules, else `false`", "whether an embedding has length 1"
    )
    max_batch_tokens: int = _parameter(
        0, "tokens with padding", "1024 on a CPU, 16384 on a GPU", "maximum tokens in a run"
    )
    threads: int = _parameter(
        0,
        "cores",
        "those that the process may use; with PyTorch, `OMP_NUM_THREADS` for each instance if it is set",
        "cores shared by the instances",
    )
    trust_remote_code: bool = _parameter(False, "`true`, `false`", "`false`", "run Python code from the checkpoint")
    cache_dir: str = _parameter("", "folder", "the Hub's cache", "where the model's files are downloaded to")
    offline: bool = _parameter(False, "`true`, `false`", "`false`", "download nothing")
    verify_on_load: bool = _parameter(
        True,
        "`true`, `false`",
        "`true`",
        "compare the result of an example with that of transformers, which needs PyTorch weights, or with the weights "
        "of a GGUF file, and refuse the model if they differ",
    )
    top_k: int = _parameter(0, "1 or more", "the task's", "number of results if the request does not specify it")
    extra: Mapping[str, str] = field(default_factory=dict)
    #: The names of all parameters in the configuration, including those with the default value.
    explicit: frozenset[str] = field(default=frozenset(), compare=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Options:
        """Parse the ``parameters`` of a configuration (JSON). Raises INVALID_ARG, naming the parameter."""
        return cls.from_values(parameter_texts(config))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Options:
        """Parse ``values``, which are texts or JSON. Raises INVALID_ARG, naming the parameter."""
        texts = {name: _text(name, value) for name, value in values.items() if value is not None}
        typed = {name: _PARSERS[name](name, text) for name, text in texts.items() if name in _PARSERS}
        extra = {name: text for name, text in texts.items() if name not in _PARSERS}
        return cls(**typed, extra=extra, explicit=frozenset(texts))

    def over(self, values: Mapping[str, Any]) -> Options:
        """Return these options with ``values`` (the content of a ``model.json``) as defaults."""
        below = Options.from_values(values)
        unsaid = [
            declared.name
            for declared in fields(self)
            if declared.name in below.explicit
            and declared.name not in self.explicit
            and getattr(self, declared.name) == declared.default
        ]
        return replace(
            self,
            **{name: getattr(below, name) for name in unsaid},
            extra={**below.extra, **self.extra},
            explicit=self.explicit | below.explicit,
        )

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of LoRA adapters by name, parameter ``lora_modules``. Raises INVALID_ARG, naming it."""
        text = self.text("lora_modules") or "{}"
        try:
            document = json.loads(text)
        except ValueError as error:
            raise invalid(f"parameter 'lora_modules' is not valid JSON: {error}") from None
        if not isinstance(document, dict) or not all(isinstance(path, str) for path in document.values()):
            raise invalid("parameter 'lora_modules' must be a JSON object of folders by the adapter's name")
        for name in document:
            check_adapter_name(name, "lora_modules")
        return document

    @property
    def adapter_folders(self) -> list[str]:
        """Folders from which clients may load LoRA adapters (``lora_folders``). Raises INVALID_ARG, naming it."""
        try:
            document = json.loads(self.text("lora_folders") or "[]")
        except ValueError:
            document = None
        if not isinstance(document, list) or not all(isinstance(path, str) and path for path in document):
            raise invalid("parameter 'lora_folders' must be a JSON list of folders")
        return document

    def text_limit(self, tokens: int) -> int:
        """Return the maximum length of a text in bytes for a model that accepts ``tokens`` tokens.

        The limit does not follow from the vocabulary, because a single token may represent an unknown word of any
        length.
        """
        return self.max_text_bytes or max(_LEAST_TEXT, _TOKEN_BYTES * tokens)

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter of ``extra`` as text."""
        return self.extra.get(name, default)

    def integer(self, name: str, default: int = 0) -> int:
        """Return a parameter of ``extra`` as a non-negative integer. Raises INVALID_ARG, naming it."""
        return _integer(name, self.extra[name]) if name in self.extra else default

    def positive(self, name: str, default: int) -> int:
        """Return a parameter of ``extra`` as an integer above 0. Raises INVALID_ARG, naming it."""
        value = self.integer(name, default)
        if not value:
            raise invalid(f"parameter '{name}' is 0; it must be at least 1")
        return value

    def number(self, name: str, default: float = 0.0) -> float:
        """Return a parameter of ``extra`` as a finite number. Raises INVALID_ARG, naming it."""
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
        """Return a parameter of ``extra`` as a boolean. Raises INVALID_ARG, naming it."""
        return _boolean(name, self.extra[name]) if name in self.extra else default


def _wrong(name: str, text: str, expected: str) -> ConchError:
    return invalid(f"parameter '{name}' is '{text}'; it must be {expected}")


def _text(name: str, value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return str(value).strip()
        case dict() | list() if name not in _PARSERS:
            return json.dumps(value)  # config.pbtxt has only text values
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
    for declared in fields(Options):
        if declared.name in _CHOICES:
            yield declared.name, _choice
        elif str(declared.type) in by_type:
            yield declared.name, by_type[str(declared.type)]


#: The parser of each declared parameter.
_PARSERS: Final[Mapping[str, Callable[[str, str], Any]]] = dict(_parsers())

#: The parameters that apply to all tasks.
CHECKPOINT_PARAMETERS: Final = tuple(
    Parameter(declared.name, declared.metadata["values"], declared.metadata["default"], declared.metadata["help"])
    for declared in fields(Options)
    if declared.metadata
)
