"""GGUF files: reads their metadata and tensor locations, converts the metadata to a config.json, decodes matrices.

Files are untrusted: all sizes are checked against the size of the file before memory is allocated, and the header is
limited. ``gguf_consistency.py`` compares the tensors with the metadata. Sources: ggml's docs/gguf.md for the layout of
files, its ggml-common.h for that of quantised matrices, llama.cpp's gguf-split.cpp for files in several parts.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.config.reading import gguf_stem, open_regular
from conch.core.errors import ConchError, invalid

_MAGIC: Final = b"GGUF"
_LFS_POINTER: Final = b"version https://git-lfs"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_FLOAT32: Final = 6
#: Formats of ``struct`` by value type.
_SCALARS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", _FLOAT32: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
#: ggml's tensor types: the name, the numbers per block and the bytes per block.
_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
_UNQUANTISED: Final = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
#: Limits that no model reaches, so that a malicious file takes seconds to read and not hours, and little memory: for
#: the entries of the header, the items of all lists, and the bytes of the header.
_MOST_ENTRIES: Final = 100_000
_MOST_ITEMS: Final = 8_000_000
MOST_HEADER_BYTES: Final = 256 << 20
_MOST_DIMENSIONS: Final = 4
_GREATEST_ALIGNMENT: Final = 1 << 20
_MOST_PARTS: Final = 1_000
#: The greatest size of a model's dimension.
_GREATEST_SIZE: Final = 2**31 - 1
_DEFAULT_ALIGNMENT: Final = 32

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The location of a tensor: ``shape`` in numpy's order; ``offset`` in the file and ``size`` in bytes.

    ``part`` is the index of the file in those of a split.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    size: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file: its ``metadata``, with lists of numbers as numpy arrays, and its ``tensors`` by name.

    For a model that is split into several files, ``path`` is the first of them, with all metadata, and ``others`` are
    the rest in order.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    others: tuple[Path, ...] = ()

    @property
    def parts(self) -> tuple[Path, ...]:
        """The files of the model."""
        return (self.path, *self.others)

    @property
    def quantised(self) -> bool:
        """Whether the file has a matrix of a type with blocks."""
        return any(
            type_name(tensor.type) not in _UNQUANTISED for tensor in self.tensors.values() if len(tensor.shape) > 1
        )

    def text(self, key: str, default: str = "") -> str:
        """Return a text in the metadata. Raises INVALID_ARG, naming the key, for another type."""
        value: str = self._typed(key, default, str, "a text")
        return value

    def integer(self, key: str, default: int = -1) -> int:
        """Return an integer in the metadata. Raises INVALID_ARG, naming the key, for another type."""
        value: int = self._typed(key, default, int, "a whole number")
        return value

    def number(self, key: str, default: float = 0.0) -> float:
        """Return a number in the metadata. Raises INVALID_ARG, naming the key, unless it is a finite number."""
        value = self.metadata.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise invalid(f"{self.path}: {key} must be a finite number")
        return float(value)

    def sizes(self, key: str) -> list[int]:
        """Return a size in the metadata, or the sizes for each layer; empty if none.

        Raises INVALID_ARG, naming the key, unless they are whole numbers from 0 to 2147483647.
        """
        value = self.metadata.get(key, [])
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            value = value.tolist()
        sizes = value if isinstance(value, list) else [value]
        if not all(type(size) is int and 0 <= size <= _GREATEST_SIZE for size in sizes):
            raise invalid(f"{self.path}: {key} must be a whole number from 0 to {_GREATEST_SIZE}, or a list of them")
        return sizes

    def token(self, role: str) -> int | None:
        """Return the id of a token with a role such as ``bos``, or None.

        Raises INVALID_ARG, naming the key, for an id outside the vocabulary.
        """
        key = f"tokenizer.ggml.{role}_token_id"
        id, tokens = self.integer(key), self.texts("tokenizer.ggml.tokens")
        if id < -1 or (tokens and id >= len(tokens)):
            raise invalid(f"{self.path}: {key} is {id}, and there are {len(tokens)} tokens")
        return id if id >= 0 else None

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean in the metadata. Raises INVALID_ARG, naming the key, for another type."""
        value: bool = self._typed(key, default, bool, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts in the metadata, empty if none. Raises INVALID_ARG for another type."""
        value: list[str] = self._typed(key, [], list, "a list of texts")
        if value and not isinstance(value[0], str):
            raise invalid(f"{self.path}: {key} must be a list of texts")
        return value

    def numbers(self, key: str) -> list[Any]:
        """Return a list of numbers in the metadata, empty if none. Raises INVALID_ARG for another type."""
        value = self.metadata.get(key)
        if value is None:
            return []
        if not isinstance(value, np.ndarray):
            raise invalid(f"{self.path}: {key} must be a list of numbers")
        return list(value.tolist())

    def _typed(self, key: str, default: Any, kind: type, expected: str) -> Any:
        value = self.metadata.get(key, default)
        if type(value) is not kind:
            raise invalid(f"{self.path}: {key} must be {expected}")
        return value


def type_name(kind: int) -> str:
    """Return ggml's name for a tensor type."""
    return _TYPES[kind][0]


def block_bytes(kind: int) -> int:
    """Return the size of a block of a tensor type (bytes)."""
    return _TYPES[kind][2]


class TensorData:
    """The content of a file's tensors, mapped into memory."""

    def __init__(self, file: GgufFile) -> None:
        self._parts = [np.memmap(path, np.uint8, "r") for path in file.parts]

    def of(self, tensor: TensorInfo) -> Bytes:
        """Return the bytes of a tensor."""
        return self._parts[tensor.part][tensor.offset : tensor.offset + tensor.size]


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and tensor locations of a model; ``path`` is its only file, or the first of several.

    Raises INVALID_ARG for a file that is invalid or truncated, and for a part that is missing or of another model.
    """
    file, size = _read(path, MOST_HEADER_BYTES)
    count = _require_part(file, 0)
    if count == 1:
        return file
    names = [f"{gguf_stem(path)}{_part_suffix(index, count)}" for index in range(count)]
    if missing := [name for name in names if not path.with_name(name).exists()]:
        raise invalid(f"{path} is one of {count} files of a model, and {', '.join(missing[:3])} is missing beside it")
    tensors, total = dict(file.tensors), file.integer("split.tensors.count")
    for index in range(1, count):
        part, read = _read(path.with_name(names[index]), MOST_HEADER_BYTES - size)
        size += read
        for key in ("split.count", "split.tensors.count", "general.architecture"):
            if part.metadata.get(key, file.metadata.get(key)) != file.metadata.get(key):
                raise invalid(f"{part.path} is of another model than {path}: {key} differs")
        _require_part(part, index)
        if common := tensors.keys() & part.tensors.keys():
            raise invalid(f"{part.path}: tensor {min(common)[:100]!r} is also in another part of the model")
        if len(tensors) + len(part.tensors) > total:
            break
        tensors |= {name: replace(tensor, part=index) for name, tensor in part.tensors.items()}
    else:
        if len(tensors) == total:
            return replace(file, tensors=tensors, others=tuple(path.with_name(name) for name in names[1:]))
    raise invalid(f"the {count} parts of {path} do not have {total} tensors, as split.tensors.count says")


def _require_part(file: GgufFile, index: int) -> int:
    """Return the number of parts of a split model; 1 for a whole one.

    Raises INVALID_ARG unless the file's metadata and its name tell that it is part ``index``.
    """
    count, number = file.integer("split.count", 1), file.integer("split.no", 0)
    if count <= 1 and not index:
        return 1
    if count > _MOST_PARTS:
        raise invalid(f"{file.path}: split.count is {count}; at most {_MOST_PARTS} are read")
    if not 0 <= number < count or not file.path.name.endswith(_part_suffix(number, count)):
        raise invalid(
            f"{file.path} is part {number + 1} of {count} of a model, by split.no and split.count, so its name must "
            f"end with {_part_suffix(number, count)}"
        )
    if number != index:
        raise invalid(
            f"{file.path} is part {number + 1} of {count} of a model: use the first part, "
            f"{gguf_stem(file.path)}{_part_suffix(0, count)}"
        )
    return count


def _part_suffix(index: int, count: int) -> str:
    return f"-{index + 1:05}-of-{count:05}.gguf"


def _read(path: Path, most_bytes: int) -> tuple[GgufFile, int]:
    """Return a file by itself, and the size of its header, which has at most ``most_bytes``."""
    try:
        return _opened(path, most_bytes)
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror or error}") from None


def _opened(path: Path, most_bytes: int) -> tuple[GgufFile, int]:
    with open_regular(path) as file:
        beginning = file.read(len(_LFS_POINTER))
        if beginning == _LFS_POINTER:
            raise invalid(f"{path} is a Git LFS pointer, not the weights: run 'git lfs pull' there")
        if not beginning.startswith(_MAGIC):
            raise invalid(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            reader = _Reader(path, content, most_bytes)
            return reader.read(), reader.position


class _Reader:
    """Reads a file sequentially from its beginning."""

    def __init__(self, path: Path, content: mmap.mmap, most_bytes: int) -> None:
        self._path = path
        self._content = content
        self._most_bytes = most_bytes
        self._size = len(content)
        self.position = len(_MAGIC)
        self._items = 0
        #: The part that is being read, for messages.
        self._field = "the header"

    def read(self) -> GgufFile:
        version = self._unpack("I")
        if version not in _VERSIONS:
            kind = f"version {version}" if version & 0xFFFF else "big-endian numbers"
            raise invalid(f"{self._path} is a GGUF file with {kind}; versions 2 and 3, little-endian, are read")
        tensors, entries = self._count("Q", 24), self._count("Q", 12)
        if max(tensors, entries) > _MOST_ENTRIES:
            raise self._wrong(f"it claims {tensors} tensors and {entries} values")
        metadata: dict[str, Any] = {}
        for number in range(entries):
            self._field = f"key {number}"
            key = self._text()
            self._field = f"the value of {key[:100]!r}"
            if key in metadata:
                raise self._wrong("the key occurs twice")
            metadata[key] = self._value(self._unpack("I"))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= _GREATEST_ALIGNMENT or alignment & (alignment - 1):
            raise invalid(f"{self._path}: general.alignment must be a power of two up to {_GREATEST_ALIGNMENT}")
        infos: dict[str, TensorInfo] = {}
        for number in range(tensors):
            self._field = f"tensor {number}"
            info = self._tensor()
            if info.name in infos:
                raise self._wrong("two tensors have the same name")
            infos[info.name] = info
        start = -(-self.position // alignment) * alignment
        return GgufFile(self._path, version, metadata, self._placed(infos, start, alignment))

    def _placed(self, infos: Mapping[str, TensorInfo], start: int, alignment: int) -> dict[str, TensorInfo]:
        """Return tensors with their offsets in the file, whose data begin at ``start``."""
        placed = {
            name: TensorInfo(name, info.shape, info.type, start + info.offset, info.size)
            for name, info in infos.items()
        }
        by_offset = sorted(placed.values(), key=lambda tensor: tensor.offset)
        for tensor in by_offset:
            if infos[tensor.name].offset % alignment:
                raise invalid(
                    f"{self._path}: the offset of tensor {tensor.name[:100]!r} is not a multiple of {alignment}"
                )
            if tensor.offset + tensor.size > self._size:
                raise invalid(
                    f"{self._path} was cut off: it has {self._size} bytes, and tensor {tensor.name[:100]!r} ends at "
                    f"{tensor.offset + tensor.size}"
                )
        for tensor, following in pairwise(by_offset):
            if tensor.offset + tensor.size > following.offset:
                raise invalid(
                    f"{self._path}: tensors {tensor.name[:100]!r} and {following.name[:100]!r} overlap in the file"
                )
        return placed

    def _tensor(self) -> TensorInfo:
        name = self._text()
        self._field = f"tensor {name[:100]!r}"
        dimensions = self._unpack("I")
        if dimensions > _MOST_DIMENSIONS:
            raise self._wrong(f"it has {dimensions} dimensions")
        shape = tuple(self._unpack("Q") for _ in range(dimensions))
        kind, offset = self._unpack("I"), self._unpack("Q")
        if kind not in _TYPES:
            raise self._wrong(f"it is of type {kind}, which is not known here")
        if 0 in shape:
            raise self._wrong("it is empty")
        _, block, width = _TYPES[kind]
        if (shape[0] if shape else 1) % block:
            raise self._wrong(f"the length of its rows is not a multiple of the block size {block}")
        return TensorInfo(name, shape[::-1], kind, offset, math.prod(shape) // block * width)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._list(self._unpack("I"))
        if kind not in _SCALARS:
            raise self._wrong(f"it is of type {kind}, which is not known here")
        value = self._unpack(_SCALARS[kind])
        # The shortest decimal that rounds to the 32-bit float (1e-05), as in a config.json, not its exact value.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _list(self, kind: int) -> Any:
        if kind != _STRING and kind not in _SCALARS:
            raise self._wrong("it has lists of lists" if kind == _ARRAY else f"it is a list of the unknown type {kind}")
        dtype = np.dtype(_SCALARS.get(kind, "Q")).newbyteorder("<")  # a text begins with its length
        count = self._count("Q", dtype.itemsize)
        self._items += count
        if self._items > _MOST_ITEMS:
            raise self._wrong(f"the lists up to this one have more than {_MOST_ITEMS} items")
        if kind == _STRING:
            return [self._text() for _ in range(count)]
        return np.frombuffer(self._slice(count * dtype.itemsize), dtype)

    def _text(self) -> str:
        return self._slice(self._count("Q", 1)).decode("utf-8", "replace")

    def _count(self, form: str, width: int) -> int:
        """Read a number of elements. Raises INVALID_ARG if the file is too short for ``width`` bytes per element."""
        count: int = self._unpack(form)
        if count * width > self._size - self.position:
            raise self._cut()
        return count

    def _unpack(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._slice(struct.calcsize(f"<{form}")))[0]

    def _slice(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > self._size:
            raise self._cut()
        if self.position > self._most_bytes:
            raise self._wrong(f"the header has more than {MOST_HEADER_BYTES} bytes")
        return self._content[start : self.position]

    def _cut(self) -> ConchError:
        return self._wrong("it was cut off, or declares more data than it contains")

    def _wrong(self, why: str) -> ConchError:
        return invalid(f"{self._path} is not a GGUF file that can be read: {self._field}: {why}")


#: Names of architectures in transformers, ``model_type`` and the class of the language model, by llama.cpp's name.
_ARCHITECTURES: Final[Mapping[str, tuple[str, str]]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "falcon": ("falcon", "FalconForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "stablelm": ("stablelm", "StableLmForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "cohere": ("cohere", "CohereForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
    "mamba": ("mamba", "MambaForCausalLM"),
}
_INTEGERS: Final[Mapping[str, str]] = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_NUMBERS: Final[Mapping[str, str]] = {
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
#: The architecture of files that turn images and sounds into vectors for a language model.
PROJECTOR: Final = "clip"
_REQUIRED: Final = ("max_position_embeddings", "hidden_size", "num_hidden_layers")
_TOKENS: Final[Mapping[str, str]] = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of config.json for the model in a GGUF file.

    An unknown architecture keeps llama.cpp's name. Raises INVALID_ARG for a file without a model or without required
    metadata.
    """
    name = file.text("general.architecture")
    if not name:
        raise invalid(f"{file.path} contains no model: general.architecture is missing")
    if name == PROJECTOR or file.text("general.type") == "mmproj":
        raise invalid(
            f"{file.path} is a multimodal projector (mmproj), not a model: use the file of the language "
            "model, and this one as parameter 'mmproj'"
        )
    if file.text("general.type", "model") != "model":
        raise invalid(f"{file.path} is of type '{file.text('general.type')}', not a model")
    model_type, architecture = _ARCHITECTURES.get(name, (name, ""))
    config: dict[str, Any] = {"model_type": model_type, "architectures": [architecture] if architecture else []}
    for key, theirs in _INTEGERS.items():
        if sizes := file.sizes(f"{name}.{theirs}"):
            config[key] = max(sizes)
    for key, theirs in _NUMBERS.items():
        if f"{name}.{theirs}" in file.metadata:
            config[key] = file.number(f"{name}.{theirs}")
    for key in _REQUIRED:
        if config.get(key, 0) <= 0:
            raise invalid(f"{file.path}: {name}.{_INTEGERS[key]} is missing")
    config["vocab_size"] = len(file.texts("tokenizer.ggml.tokens")) or file.integer(f"{name}.vocab_size", 0)
    for key, role in _TOKENS.items():
        if (id := file.token(role)) is not None:
            config[key] = id
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    return config


def rope_scaling(file: GgufFile) -> tuple[str, float]:
    """Return the type of rotary frequency scaling (``none``, ``linear``, ``yarn``, ``longrope``) and its factor.

    Source of the defaults: llama.cpp's llama-model.cpp.
    """
    name = file.text("general.architecture")
    factor = file.number(f"{name}.rope.scaling.factor") or file.number(f"{name}.rope.scale_linear") or 1.0
    kind = file.text(f"{name}.rope.scaling.type", "linear")
    if any(tensor.startswith("rope_factors_") for tensor in file.tensors):
        kind = "longrope"
    return ("none", 1.0) if kind == "none" or (kind == "linear" and factor == 1) else (kind, factor)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix with the values ``scales * numbers + minima``.

    ``numbers`` is ``[rows, groups, size]``, with 4 or 8 ``bits`` per number; ``scales`` and ``minima`` are
    ``[rows, groups]``.
    """

    numbers: Bytes
    scales: Floats
    minima: Floats
    bits: int

    def rows(self, order: Any) -> Blocks:
        """Return the rows ``order``, in that order."""
        return Blocks(self.numbers[order], self.scales[order], self.minima[order], self.bits)


def read_blocks(rows: Bytes, kind: int) -> Blocks:
    """Decode the bytes ``[rows, bytes]`` of a matrix whose type ``kind`` is in ``DECODERS``."""
    decode = DECODERS[type_name(kind)]
    numbers, scales, minima, bits = decode(np.ascontiguousarray(rows).reshape(len(rows), -1, block_bytes(kind)))
    groups = (len(rows), -1)
    return Blocks(
        numbers.reshape(*groups, numbers.shape[-1]),
        scales.astype(np.float32).reshape(groups),
        minima.astype(np.float32).reshape(groups),
        bits,
    )


def half(blocks: Bytes, start: int) -> Floats:
    """Return the 16-bit float at byte ``start`` of each block, ``[..., 1]``."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2").astype(np.float32)


def k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return the scales and negative minima of the 8 groups in each block of Q4_K and Q5_K, ``[..., 8]``."""
    low, high, mixed = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([low & 63, mixed & 15 | low >> 6 << 4], -1)
    minima = np.concatenate([high & 63, mixed >> 4 | high >> 6 << 4], -1)
    return half(blocks, 0) * scales, half(blocks, 2) * minima


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Unpack 4-bit numbers: the low halves of ``run`` bytes, then the high halves of the same bytes."""
    parts = packed.reshape(*packed.shape[:-1], -1, run)
    return np.concatenate([parts & 15, parts >> 4], -1).reshape(*packed.shape[:-1], -1)


def _q4_0(blocks: Bytes) -> tuple[Any, ...]:
    scales = half(blocks, 0)
    return _nibbles(blocks[..., 2:], 16), scales, -8 * scales, 4


def _q4_1(blocks: Bytes) -> tuple[Any, ...]:
    return _nibbles(blocks[..., 4:], 16), half(blocks, 0), half(blocks, 2), 4


def _q8_0(blocks: Bytes) -> tuple[Any, ...]:
    scales = half(blocks, 0)
    return blocks[..., 2:] ^ 128, scales, -128 * scales, 8


def _q4_k(blocks: Bytes) -> tuple[Any, ...]:
    scales, minima = k_scales(blocks)
    numbers = _nibbles(blocks[..., 16:], 32)
    return numbers.reshape(*numbers.shape[:-1], 8, 32), scales, -minima, 4


def _q6_k(blocks: Bytes) -> tuple[Any, ...]:
    numbers = _nibbles(blocks[..., :128], 64)
    parts = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32)
    for part_index in range(4):
        high = parts >> 2 * part_index & 3
        numbers.reshape(*blocks.shape[:-1], 2, 4, 32)[..., part_index, :] |= high << 4
    scales = half(blocks, 208) * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return numbers.reshape(*numbers.shape[:-1], 16, 16), scales, -32 * scales, 8


#: Decoders by type name.
DECODERS: Final[Mapping[str, Callable[[Bytes], tuple[Any, ...]]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k,
}  # fmt: skip

#: The values of ``model_type`` that OpenVINO GenAI 2026.4 supports in GGUF files, and the tensors that it reads.
_MODELS: Final = ("llama", "qwen2", "qwen3")
#: The metadata that it needs besides those of every model; ``{}`` is the architecture.
_NEEDED: Final = ("general.file_type", "{}.attention.head_count", "{}.attention.layer_norm_rms_epsilon")
_TENSORS: Final = re.compile(
    r"((token_embd|output|output_norm)|blk\.\d+\.(attn_(norm|[qkv]|[qk]_norm|output)|ffn_(norm|gate|up|down)))\.(weight|bias)"
)


#: Types for intermediate results and counters, which llama.cpp does not multiply: it would crash.
_NO_WEIGHTS: Final = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")


#: The architectures for which the engine ``llamacpp`` converts adapters of PEFT. True: the rows of their queries and
#: keys have a special order, because numbers next to each other are rotated together.
ADAPTED: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("llama", "granite", "smollm3"), True),
    **dict.fromkeys(("qwen2", "qwen3", "phi3", "olmo2", "gemma", "gemma2", "gemma3"), False),
}


def llamacpp_problem(file: GgufFile, adapters: Iterable[str | Path]) -> str:
    """Return why engine ``llamacpp`` cannot serve a file with these LoRA adapters; empty if no reason is known.

    llama.cpp itself refuses more files: its architectures change with every version.
    """
    for adapter in map(Path, adapters):
        if adapter.suffix != ".gguf" and (name := file.text("general.architecture")) not in ADAPTED:
            return (
                f"LoRA adapter {adapter} is not a GGUF file, and those of PEFT are not converted for the architecture "
                f"'{name}': convert it with llama.cpp's convert_lora_to_gguf.py"
            )
    for tensor in file.tensors.values():
        kind = type_name(tensor.type)
        if len(tensor.shape) > 1 and tensor.name.endswith(".weight") and kind in _NO_WEIGHTS:
            return f"matrix '{tensor.name}' is of type {kind}, which no model has"
    return ""


def other_engines(file: GgufFile, adapters: Iterable[str | Path], *, without: str) -> str:
    """Return the engines that may serve a file with these LoRA adapters, except ``without``, for messages."""
    paths = list(map(Path, adapters))
    problems = {
        "llamacpp": llamacpp_problem(file, paths),
        "openvino": openvino_problem(file, str(config_of(file).get("model_type", "")), bool(paths)),
        "transformers": "it reads no GGUF adapters" if any(path.suffix == ".gguf" for path in paths) else "",
    }
    if len(file.parts) > 1:
        problems["transformers"] = "it reads only whole files"
    names = [f"'{engine}'" for engine, problem in problems.items() if not problem and engine != without]
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))) or "another engine"


def require_whole(file: GgufFile, adapters: Iterable[str | Path], engine: str) -> None:
    """Raise INVALID_ARG for a model in several files, on an engine that reads only one."""
    if len(file.parts) > 1:
        raise invalid(
            f"engine '{engine}' cannot load {file.path}, which is one of {len(file.parts)} files of a model: set "
            f"parameter 'engine' to {other_engines(file, adapters, without=engine)}, or join them with "
            "'llama-gguf-split --merge'"
        )


def openvino_problem(file: GgufFile, model_type: str, adapters: bool) -> str:
    """Return why engine ``openvino`` cannot serve a file with a model of this type; empty if it can.

    With ``adapters``, the model also has LoRA adapters.
    """
    if adapters:
        # GenAI does not find the layers of adapters in a graph that it builds from a GGUF file.
        return "OpenVINO GenAI ignores LoRA adapters of a GGUF file"
    if model_type not in _MODELS:
        return f"OpenVINO GenAI supports GGUF files of {', '.join(_MODELS)}, not of '{model_type}'"
    for form in _NEEDED:
        if (key := form.format(file.text("general.architecture"))) not in file.metadata:
            return f"OpenVINO GenAI needs {key}, which is missing"
    scaling, _ = rope_scaling(file)
    if scaling != "none":
        return f"OpenVINO GenAI ignores its scaling of rotary frequencies, '{scaling}'"
    for tensor in file.tensors.values():
        kind = type_name(tensor.type)
        if not _TENSORS.fullmatch(tensor.name):
            return f"OpenVINO GenAI ignores tensor '{tensor.name}'"
        if kind not in ("F16", *DECODERS) and (kind != "F32" or len(tensor.shape) > 1):
            shapes = "matrices" if kind == "F32" else "tensors"
            return f"OpenVINO GenAI does not read {shapes} of type {kind}, such as '{tensor.name}'"
    return ""
