"""Writes one model of the backend ``huggingface``: the checkpoint's files and all variants that may serve."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import SMALL_FILES
from conch.convert.variant import BuiltVariant

#: The instance kind on which variants are measured and judged.
INSTANCE_KIND: Final = "KIND_CPU"
#: Modules of sentence-transformers are in their own folders.
_MODULES: Final = "[0-9]*_*/*"
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")
_EXCLUDED: Final = ("conch.json", "model.json")


def write_huggingface(
    model: Path, checkpoint: Checkpoint, variants: Sequence[BuiltVariant], built: Path, parameters: Mapping[str, str]
) -> None:
    """Write the model directory ``model``; files of ``variants`` are moved there from the folder ``built``.

    Copies weights if torch is among the variants, and Python code if ``parameters`` trust it.
    """
    version = model / "1"
    version.mkdir(parents=True)
    weights = any(variant.path is None for variant in variants)
    copy(checkpoint, checkpoint_files(checkpoint, weights=weights, code="trust_remote_code" in parameters), version)
    for path in {file for variant in variants for file in variant.files}:
        place = version / path.relative_to(built)
        place.parent.mkdir(exist_ok=True)
        path.rename(place)
    (model / "config.pbtxt").write_text(huggingface_config(parameters), encoding="utf-8")


def checkpoint_files(checkpoint: Checkpoint, *, weights: bool, code: bool = False) -> list[Path]:
    """Return the files to copy, relative to the checkpoint: tokenizer, configuration, modules and, optionally, weights.

    Weights are safetensors, or pickled ones if the checkpoint has no others.
    """
    folder = checkpoint.directory
    patterns = [*SMALL_FILES, "LICENSE*", _MODULES, *(["*.py"] if code else [])]
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    if weights:
        paths |= set(next((matches for pattern in _WEIGHTS if (matches := list(folder.glob(pattern)))), []))
    else:
        paths -= set(folder.glob("*.index.json"))
    names = (path.relative_to(folder) for path in paths if path.is_file())
    return sorted(name for name in names if name.name not in _EXCLUDED)


def copy(checkpoint: Checkpoint, names: Sequence[Path], target: Path) -> None:
    """Copy files of the checkpoint, following links, because the Hub's cache consists of links."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.directory / name, target / name)


def huggingface_config(parameters: Mapping[str, str]) -> str:
    """Return ``config.pbtxt`` of the model; the rest is completed from the checkpoint at load."""
    return (
        "# Written by conch convert; tensors and batching follow from the checkpoint.  The variant that serves is\n"
        '# "auto" of 1/conch.json; the parameter "variant" chooses another one of those that passed.\n'
        f'backend: "huggingface"\ninstance_group {{ count: 1 kind: {INSTANCE_KIND} }}\n{parameter_lines(parameters)}'
    )


def parameter_lines(parameters: Mapping[str, str]) -> str:
    """Return the model parameters of a ``config.pbtxt``."""
    return "".join(
        f"parameters {{ key: {quoted(name)} value {{ string_value: {quoted(value)} }} }}\n"
        for name, value in parameters.items()
    )


def quoted(text: str) -> str:
    """Return a string in protobuf's text format."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
