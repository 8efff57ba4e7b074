"""The plan of a response: how the outputs of a model become the body.

The plan is created together with the inputs of the requests to the model, possibly in an offloading process, and
writes the body when all requests have completed. Vectors are shortened, scaled to length 1, and quantized as in
sentence-transformers' ``quantize_embeddings`` (int8, uint8, binary and ubinary).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import orjson

from conch.core.errors import ConchError, internal
from conch.core.inference import ParameterValue
from conch.core.tensors import NATIVE_FORMAT, WireTensor, split_bytes
from conch.wire.openai.media import IMAGE
from conch.wire.openai.models import PROMPT, TOKEN_IDS
from conch.wire.openai.reading import ApiError
from conch.wire.retrieval.models import COUNT, PAIR

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalPlan(ABC):
    """``rows`` are the numbers of rows of the requests to the model, and ``outputs`` the outputs that they name.

    ``parameters`` are the request parameters of each. ``members`` are the client's names of the texts, and of the
    second texts of pairs; empty where requests to the model have different members.
    """

    rows: list[int]
    outputs: tuple[str, ...]
    parameters: dict[str, ParameterValue]
    members: tuple[str, ...] = ()

    @abstractmethod
    def body(self, model: str, results: Results) -> bytes:
        """Return the response body. Raises INTERNAL for outputs that do not fit the request."""

    def client_error(self, part: int, error: ConchError) -> ConchError:
        """Return an error of request number ``part`` to the model, with members and rows of the client's request."""
        if not self.members:
            return error
        first = sum(self.rows[:part])

        def translate(message: str) -> str:
            message = _INPUT.sub(lambda match: f"'{self.members[-1 if match[1] == PAIR else 0]}'", message)
            return _ROW.sub(lambda match: str(first + int(match[0])), message)

        return ConchError(
            translate(error.message), error.code, public=translate(error.public), param=error.param, reason=error.reason
        )


#: The inputs of models for texts, and the rows of their requests, in messages.
_INPUT: Final = re.compile(rf"\binput '({PROMPT}|{PAIR}|{TOKEN_IDS}|{IMAGE})'")
_ROW: Final = re.compile(r"(?<=\bin row )\d+")


class Results:
    """The outputs of all requests to a model, in the order of the rows."""

    def __init__(self, plan: RetrievalPlan, parts: Sequence[Sequence[WireTensor]]) -> None:
        self._rows = plan.rows
        self._parts: list[Mapping[str, WireTensor]] = [{tensor.name: tensor for tensor in part} for part in parts]

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts, 0 if the model does not count them."""
        if not all(COUNT in part for part in self._parts):
            return 0
        return sum([sum(_numbers(part[COUNT]).tolist()) for part in self._parts])

    def numbers(self, name: str) -> Array:
        """Return an output of numbers as ``[rows, elements]``. Raises INTERNAL if it has other rows."""
        parts = self._by_part(name)
        sizes = {part.shape[1] for part in parts}
        if len(sizes) > 1 or 0 in sizes:
            counts = ", ".join(map(str, sorted(sizes)))
            raise internal(
                f"the model's output '{name}' has rows of {counts} elements; all must have the same, at least 1"
            )
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def ragged(self, name: str) -> list[Array]:
        """Return an output of numbers row by row, as flat arrays whose size may differ between requests, and be 0."""
        return [row for part in self._by_part(name) for row in part]

    def last_dimension(self, name: str) -> int:
        """Return the last dimension of an output."""
        return _tensor(self._parts[0], name).shape[-1]

    def texts(self, name: str) -> list[list[str]]:
        """Return the elements of a BYTES output, row by row."""
        listed: list[list[str]] = []
        for part, rows in zip(self._parts, self._rows, strict=True):
            elements = [element.decode("utf-8", "replace") for element in split_bytes(_tensor(part, name).data)]
            size = _row_size(name, len(elements), rows)
            listed += [elements[size * row : size * (row + 1)] for row in range(rows)]
        return listed

    def _by_part(self, name: str) -> list[Array]:
        arrays = []
        for part, rows in zip(self._parts, self._rows, strict=True):
            numbers = _numbers(_tensor(part, name))
            arrays.append(numbers.reshape(rows, _row_size(name, numbers.size, rows)))
        return arrays


def _tensor(part: Mapping[str, WireTensor], name: str) -> WireTensor:
    if name not in part:
        raise internal(f"the model returned no output '{name}'")
    return part[name]


def _numbers(tensor: WireTensor) -> Array:
    return np.frombuffer(tensor.data, np.dtype(NATIVE_FORMAT[tensor.datatype]))


def _row_size(name: str, elements: int, rows: int) -> int:
    size, rest = divmod(elements, rows)
    if rest:
        raise internal(f"the model's output '{name}' has {elements} elements, which are not {rows} rows")
    return size


class DecodedRequest(NamedTuple):
    """The plan of a response and the inputs of each request to the model."""

    plan: RetrievalPlan
    inputs: list[dict[str, WireTensor]]


def document(members: dict[str, Any] | list[Any]) -> bytes:
    """Return the JSON of a body; numpy numbers and arrays are written as JSON numbers."""
    return orjson.dumps(members, option=orjson.OPT_SERIALIZE_NUMPY)


def new_id(prefix: str = "") -> str:
    """Return an identifier for a response."""
    return f"{prefix}{uuid4().hex}"


#: The datatypes of vectors.
DTYPES: Final = ("float", "int8", "uint8", "binary", "ubinary")
#: The datatypes whose values depend on the smallest and largest value of each dimension.
SCALED: Final = ("int8", "uint8")
RELATIVE: Final = (
    "int8 and uint8 values are relative to the vectors of their request, and cannot be compared with those of others"
)


def shortened(vectors: Array, dimensions: int, *, member: str = "dimensions") -> Array:
    """Return the first ``dimensions`` elements of FP32 ``[n, size]``, scaled to length 1; 0 changes nothing.

    Raises ApiError, naming ``member``, if the vectors have fewer.
    """
    if not dimensions:
        return vectors
    size = vectors.shape[1]
    if dimensions > size:
        raise ApiError(f"'{member}' is {dimensions}; the model has {size}", member)
    return normalized(vectors[:, :dimensions])


def normalized(vectors: Array) -> Array:
    """Scale FP32 ``[n, size]`` to length 1; zero vectors stay zero."""
    # In FP64, so that the length does not depend on the order of the sum.
    lengths = np.sqrt(np.square(vectors, dtype=np.float64).sum(1, keepdims=True))
    return np.asarray(vectors / np.where(lengths == 0, 1, lengths), np.float32)


def quantized(vectors: Array, dtype: str, *, member: str) -> Array:
    """Return FP32 ``[n, size]`` as one of ``DTYPES``.

    ``int8`` and ``uint8`` divide the range of each dimension, from the smallest to the largest value of these vectors,
    into 255 steps. ``binary`` (INT8, the bits minus 128) and ``ubinary`` (UINT8) have one bit per dimension. Raises
    ApiError, naming ``member``, for a single vector, which has no ranges, and INTERNAL for values that are not finite.
    """
    if dtype == "float":
        return vectors
    if not np.isfinite(vectors).all():
        raise internal(f"the model returned vectors with numbers that are not finite, which cannot be {dtype}")
    if dtype in SCALED:
        if len(vectors) < 2:
            raise ApiError(
                f"'{member}' is {dtype}, which needs at least two texts: {RELATIVE}; use binary or ubinary, or "
                "quantize float vectors with ranges of your own",
                member,
            )
        starts, steps = _ranges(vectors)
        levels = np.clip(np.floor((vectors - starts) / steps), 0, 255)
        return levels.astype(np.uint8) if dtype == "uint8" else (levels - 128).astype(np.int8)
    bits = np.packbits(vectors > 0, axis=1)
    return bits if dtype == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)


def _ranges(vectors: Array) -> tuple[Array, Array]:
    """Return the smallest value of each dimension and the size of a step; 1 if all values are equal."""
    lowest, highest = vectors.min(0), vectors.max(0)
    steps = (highest - lowest) / 255
    return lowest, np.where(steps == 0, 1, steps)


def base64(vector: Array) -> str:
    """Return the bytes of a vector, little-endian, as base64."""
    return b64encode(np.ascontiguousarray(vector).tobytes()).decode()
