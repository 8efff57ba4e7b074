"""Vectors in the forms that clients request: shortened, scaled to length 1, and quantized.

int8, uint8, binary and ubinary are those of sentence-transformers' ``quantize_embeddings``.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.core.errors import internal
from conch.wire.openai.reading import ApiError

Array = npt.NDArray[Any]

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
