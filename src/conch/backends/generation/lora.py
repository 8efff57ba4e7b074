"""Reads the files of LoRA adapters: the matrices of each layer, for engines that add them to their own networks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from conch.checkpoints.tensor_files import read_safetensors
from conch.core.errors import ConchError, invalid

Floats = npt.NDArray[np.float32]

#: The files of an adapter in its folder, as peft writes them.
ADAPTER_FILE: Final = "adapter_model.safetensors"
CONFIG_FILE: Final = "adapter_config.json"
_NAME: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")
_UNSUPPORTED: Final = ("use_dora", "modules_to_save", "layer_replication", "target_parameters")


@dataclass(slots=True)
class LoraWeights:
    """The matrices ``A`` ``[rank, in]`` and ``B`` ``[out, rank]`` by layer; ``B`` contains the scale."""

    path: Path = Path()
    layers: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)
    #: Identifies the content of the files: another version has other numbers.
    version: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path) -> LoraWeights:
        """Read a folder or file saved by PEFT. Raises INVALID_ARG for an adapter that cannot be added to a layer."""
        file = path / ADAPTER_FILE if path.is_dir() else path
        if not file.is_file():
            raise invalid(f"LoRA adapter {path} has no {ADAPTER_FILE}")
        version = _version(file)
        scales = _Scales.read(file)
        pairs: dict[str, dict[str, Floats]] = {}
        for name, values in _tensors(file).items():
            match = _NAME.fullmatch(name)
            if match is None or values.ndim != 2:
                raise cls(file).misfit(name)
            pairs.setdefault(match[1], {})[match[2]] = values
        layers = {}
        for layer, pair in pairs.items():
            if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
                raise invalid(f"LoRA adapter {path}: the matrices of '{layer}' do not match")
            layers[layer] = pair["A"], pair["B"] * np.float32(scales.of(layer, len(pair["A"])))
        return cls(file, layers, version)

    @property
    def rank(self) -> int:
        """The highest rank of a layer."""
        return max((len(down) for down, _ in self.layers.values()), default=0)

    @property
    def size(self) -> int:
        """The size of the matrices (bytes)."""
        return sum(down.nbytes + up.nbytes for down, up in self.layers.values())

    def misfit(self, weights: str) -> ConchError:
        """Return the error for weights that the network has no place for."""
        return invalid(f"LoRA adapter {self.path.parent} has weights '{weights}' that cannot be added to the model")

    def check_layer(self, layer: str, columns: int, rows: int) -> None:
        """Raise INVALID_ARG for matrices that do not fit a layer of ``rows`` outputs and ``columns`` inputs."""
        down, up = self.layers[layer]
        if (down.shape[1], up.shape[0]) != (columns, rows):
            raise self.wrong_size(layer)

    def wrong_size(self, layer: str) -> ConchError:
        """Return the error for matrices that do not fit a layer of the network."""
        return invalid(f"LoRA adapter {self.path.parent}: the matrices of '{layer}' have a different size")


def _version(file: Path) -> tuple[int, ...]:
    """Return numbers that differ for other files, or after a change."""
    numbers: list[int] = []
    for path in (file, file.with_name(CONFIG_FILE)):
        if path.is_file():
            facts = path.stat()
            numbers += (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return tuple(numbers)


@dataclass(frozen=True, slots=True)
class _Scales:
    """The factors of an adapter's layers: alpha / rank, or 1 without adapter_config.json.

    With rsLoRA the divisor is the square root of the rank. ``alphas`` override ``alpha`` for layers whose names end
    with a pattern.
    """

    alpha: float | None = None
    root: bool = False
    alphas: Mapping[re.Pattern[str], float] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> _Scales:
        """Read adapter_config.json next to ``file``. Raises INVALID_ARG for unsupported options."""
        beside = file.with_name(CONFIG_FILE)
        if not beside.is_file():
            return cls()
        try:
            config = json.loads(beside.read_text())
            patterns = (config.get("alpha_pattern") or {}).items()
            alphas = {re.compile(rf"(?:.*\.)?{name}"): float(alpha) for name, alpha in patterns}
            scales = cls(float(config["lora_alpha"]), bool(config.get("use_rslora")), alphas)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise invalid(f"LoRA adapter {file.parent}: adapter_config.json must have a number 'lora_alpha'") from None
        except re.error as error:
            raise invalid(f"LoRA adapter {file.parent}: alpha_pattern has an invalid expression: {error}") from None
        for key in _UNSUPPORTED:
            if config.get(key):
                raise invalid(f"LoRA adapter {file.parent}: {key} is not supported")
        return scales

    def of(self, layer: str, rank: int) -> float:
        alpha = next((value for name, value in self.alphas.items() if name.fullmatch(layer)), None)
        alpha = self.alpha if alpha is None else alpha
        return 1.0 if alpha is None else alpha / (math.sqrt(rank) if self.root else rank)


def _tensors(file: Path) -> dict[str, Floats]:
    """Return the tensors of a safetensors file as float32, in memory."""
    refusal = invalid(f"LoRA adapter {file} is not a safetensors file of floating-point numbers")
    try:
        tensors = read_safetensors(file)
    except ConchError:
        raise refusal from None
    if any(values.dtype not in (np.float32, np.float16) for values in tensors.values()):
        raise refusal
    return {name: values.astype(np.float32) for name, values in tensors.items()}
