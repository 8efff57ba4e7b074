"""Guesses the kind of each input from its name.

A server's metadata does not show whether a BYTES input is text for a tokenizer or an image file. The names are those of
``conch serve`` for the tasks of checkpoints, of Triton's backends for language models, and of tutorials. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from conch.measure.perf.inputs.specs import InputSpec, ModelSpec

Kind = Literal["text", "second text", "labels", "table", "picture", "sound", "video", "numbers"]

#: Words in the names of inputs, by kind; the first kind with a match is used.
_WORDS: Final[Mapping[Kind, frozenset[str]]] = {
    "labels": frozenset({"labels"}),
    "table": frozenset({"table"}),
    "second text": frozenset({"pair", "context", "passage", "document", "hypothesis"}),
    "text": frozenset({"text", "prompt", "query", "question", "sentence", "caption"}),
    "picture": frozenset({"image", "images", "picture", "photo", "img"}),
    "sound": frozenset({"audio", "sound", "speech", "wav", "recording"}),
    "video": frozenset({"video"}),
}
#: For a model with optional inputs only, the first of these that it has is sent.
_CARRIERS: Final = ("text_input", "audio", "image")


def inputs_of(model: ModelSpec, named: Iterable[str]) -> list[InputSpec]:
    """The inputs that get data: required ones, those ``named`` by the user, and one that carries the request.

    The meaning of the other optional inputs is unknown.
    """
    inputs = model.inputs
    chosen = [spec for spec in inputs.values() if not spec.optional or spec.name in named]
    if all(_kind_of(spec) == "labels" for spec in chosen):
        chosen += [inputs[name] for name in _CARRIERS if name in inputs][:1]
    return chosen


def kinds_of(specs: Iterable[InputSpec]) -> dict[str, Kind]:
    """The kind of each input of a request; a BYTES input with an unknown name is a text."""
    kinds = {spec.name: _kind_of(spec) for spec in specs}
    if "text" not in kinds.values():  # there is no first text
        kinds = {name: "text" if kind == "second text" else kind for name, kind in kinds.items()}
    return kinds


def _kind_of(spec: InputSpec) -> Kind:
    if spec.datatype != "BYTES":
        return "numbers"
    words = set(re.findall(r"[a-z]+", spec.name.lower()))
    return next((kind for kind, known in _WORDS.items() if words & known), "text")
