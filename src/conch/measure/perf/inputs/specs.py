"""The inputs and outputs of a model as the server declares them, and the shapes of requests.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from conch.core.errors import invalid, not_found
from conch.core.inference import TensorSpec
from conch.core.tensors import CONFIG_NAME, format_shape

#: The parameter in which conch shows the maximum length of a checkpoint's model.
_MAX_LENGTH: Final = "conch.max_length"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The properties of a model that requests depend on; ``max_batch_size`` is 0 without a batch dimension.

    ``stateful`` is whether requests belong to sequences. ``max_length`` is the maximum length of a text (tokens, 0 if
    the server does not provide it).
    """

    name: str
    version: str
    inputs: Mapping[str, TensorSpec]
    max_batch_size: int
    decoupled: bool
    outputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    stateful: bool = False
    max_length: int = 0

    def shape_of(self, shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
        """Return the dims of an input without data: its own, or those of the command line (``shapes``).

        Raises INVALID_ARG if variable dims are not given, or if the given ones do not fit.
        """
        spec = self.inputs[name]
        dims = shapes.get(name)
        if dims is None:
            if -1 in spec.dims:
                example = ",".join(str(16 if dim == -1 else dim) for dim in spec.dims)
                raise invalid(
                    f"input '{name}' of model '{self.name}' has the variable shape {format_shape(spec.dims)}:"
                    f" set it for the requests, as in --shape {name}:{example}, or provide data with --input-data"
                )
            return spec.dims
        fits = (
            len(dims) == len(spec.dims)
            and min(dims, default=0) >= 0
            and all(want in (-1, have) for want, have in zip(spec.dims, dims, strict=True))
        )
        if not fits:
            raise invalid(
                f"--shape {name}:{','.join(map(str, dims))} does not fit input '{name}', whose shape is"
                f" {format_shape(spec.dims)}{' (without the batch dimension)' if self.max_batch_size else ''}"
            )
        return dims


def read_model(metadata: Mapping[str, Any], config: Mapping[str, Any], version: str) -> ModelSpec:
    """Return the model that the server's metadata and configuration describe; the configuration may be empty."""
    max_batch_size = int(config.get("max_batch_size", 0))
    optional = {tensor["name"] for tensor in config.get("input", ()) if tensor.get("optional")}
    inputs, outputs = (
        {
            tensor["name"]: _spec(tensor, max_batch_size > 0, tensor["name"] in optional)
            for tensor in metadata.get(kind, ())
        }
        for kind in ("inputs", "outputs")
    )
    for spec in inputs.values():
        if spec.datatype not in CONFIG_NAME:
            raise invalid(f"input '{spec.name}' has the datatype '{spec.datatype}', for which data cannot be generated")
    decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
    longest = config.get("parameters", {}).get(_MAX_LENGTH, {}).get("string_value", "")
    return ModelSpec(
        str(metadata["name"]), version, inputs, max_batch_size, decoupled, outputs, "sequence_batching" in config,
        int(longest) if longest.isdecimal() else 0,
    )  # fmt: skip


def _spec(tensor: Mapping[str, Any], batches: bool, optional: bool) -> TensorSpec:
    shape = tuple(int(dim) for dim in tensor.get("shape", ()))
    return TensorSpec(tensor["name"], tensor["datatype"], shape[1:] if batches else shape, optional=optional)


def check_shapes(model: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise NOT_FOUND if a ``--shape`` names an input that the model does not have."""
    for name in shapes:
        if name not in model.inputs:
            raise not_found(f"--shape names '{name}', but model '{model.name}' has the inputs {_listed(model.inputs)}")


def check_batch_size(model: ModelSpec, batch_size: int, option: str) -> None:
    """Raise INVALID_ARG for a batch that the model does not accept; ``option`` is the user's option."""
    if batch_size > 1 and batch_size > model.max_batch_size:
        limit = f"at most {model.max_batch_size}" if model.max_batch_size else "no batches (max_batch_size is 0)"
        raise invalid(f"{option}: model '{model.name}' takes {limit}")


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


# A server's metadata does not show whether a BYTES input is text for a tokenizer or an image file. The names are
# those of ``conch serve`` for the tasks of checkpoints, of Triton's backends for language models, and of tutorials.


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


def inputs_of(model: ModelSpec, named: Iterable[str]) -> list[TensorSpec]:
    """The inputs that get data: required ones, those ``named`` by the user, and one that carries the request.

    The meaning of the other optional inputs is unknown.
    """
    inputs = model.inputs
    chosen = [spec for spec in inputs.values() if not spec.optional or spec.name in named]
    if all(_kind_of(spec) == "labels" for spec in chosen):
        chosen += [inputs[name] for name in _CARRIERS if name in inputs][:1]
    return chosen


def kinds_of(specs: Iterable[TensorSpec]) -> dict[str, Kind]:
    """The kind of each input of a request; a BYTES input with an unknown name is a text."""
    kinds = {spec.name: _kind_of(spec) for spec in specs}
    if "text" not in kinds.values():  # there is no first text
        kinds = {name: "text" if kind == "second text" else kind for name, kind in kinds.items()}
    return kinds


def _kind_of(spec: TensorSpec) -> Kind:
    if spec.datatype != "BYTES":
        return "numbers"
    words = set(re.findall(r"[a-z]+", spec.name.lower()))
    return next((kind for kind, known in _WORDS.items() if words & known), "text")
