"""The classification extension: returns the best classes of an output instead of its values.

Called by :mod:`conch.wire.json.infer` and :mod:`conch.wire.grpc.infer` for outputs with ``classification``; does no
I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from conch.core.errors import invalid
from conch.core.tensors import NATIVE_FORMAT, WireTensor, pack_bytes

#: Maximum number of values read, and of classes written.
MAX_ELEMENTS: Final = 1_000_000
MAX_CLASSES: Final = 50_000


def classify(tensor: WireTensor, count: int, labels: Sequence[str] | None, batched: bool) -> WireTensor:
    """Return the ``count`` largest values of an output, or of each of its rows if the model batches.

    The result is BYTES of ``<value>:<index>`` or ``<value>:<index>:<label>``, largest first, of shape ``[min(count,
    n)]`` after the batch dimension. Raises INVALID_ARG for datatypes without an order and for too many values or
    classes.
    """
    code = NATIVE_FORMAT.get(tensor.datatype)
    if code is None or code == "?":
        raise invalid(f"class result not available for output due to unsupported type '{tensor.datatype}'")
    batch = tensor.shape[:1] if batched else ()
    classes = prod(tensor.shape[len(batch) :])
    if prod(tensor.shape) > MAX_ELEMENTS:
        raise invalid("classification output tensor too large")
    count = min(count, classes)
    if count * prod(batch) > MAX_CLASSES:
        raise invalid(f"classification of {prod(batch)} rows has more than {MAX_CLASSES} classes: request fewer")
    elements: list[bytes] = []
    if classes:
        rows = np.frombuffer(tensor.data, np.dtype(code)).reshape(-1, classes)
        # Sorted from the end of each row, then reversed: of equal values, the first comes first.
        best = classes - 1 - np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1][:, :count]
        values = np.take_along_axis(rows, best, axis=1).tolist()
        for row, indices in zip(values, best.tolist(), strict=True):
            elements += [_class(value, index, labels) for value, index in zip(row, indices, strict=True)]
    return WireTensor(tensor.name, "BYTES", (*batch, count), pack_bytes(elements))


def _class(value: float | int, index: int, labels: Sequence[str] | None) -> bytes:
    shown = f"{value:.6f}" if isinstance(value, float) else str(value)
    label = labels[index] if labels and index < len(labels) else ""
    return f"{shown}:{index}:{label}".encode() if label else f"{shown}:{index}".encode()
