"""The classification extension: an output as its best classes instead of its values.

Called by :mod:`conch.wire.json.infer` and :mod:`conch.wire.grpc.infer` for outputs whose client asks for it; pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from conch.errors import invalid
from conch.tensors import NATIVE_FORMAT, WireTensor, pack_bytes

MAX_ELEMENTS: Final = 1_000_000


def classify(tensor: WireTensor, count: int, labels: Sequence[str] | None, batched: bool) -> WireTensor:
    """The ``count`` largest values of an output, or of each of its rows if the model batches.

    The result is BYTES of ``<value>:<index>`` or ``<value>:<index>:<label>``, largest first, of
    shape ``[min(count, n)]`` behind the batch dimension.  Raises INVALID_ARG for datatypes that have no order.
    """
    code = NATIVE_FORMAT.get(tensor.datatype)
    if code is None or code == "?":
        raise invalid(f"class result not available for output due to unsupported type '{tensor.datatype}'")
    batch = tensor.shape[:1] if batched else ()
    classes = prod(tensor.shape[len(batch) :])
    if prod(tensor.shape) > MAX_ELEMENTS:
        raise invalid("classification output tensor too large")
    count = min(count, classes)
    rows = np.frombuffer(tensor.data, np.dtype(code)).reshape(-1, classes) if classes else ()
    elements: list[bytes] = []
    for row in rows:
        # Sorted from the end of the row, then reversed: of equal values the first one comes first.
        best = (classes - 1 - np.argsort(row[::-1], kind="stable")[::-1][:count]).tolist()
        elements += [_class(row[index].item(), index, labels) for index in best]
    return WireTensor(tensor.name, "BYTES", (*batch, count), pack_bytes(elements))


def _class(value: float | int, index: int, labels: Sequence[str] | None) -> bytes:
    shown = f"{value:.6f}" if isinstance(value, float) else str(value)
    label = labels[index] if labels and index < len(labels) else ""
    return f"{shown}:{index}:{label}".encode() if label else f"{shown}:{index}".encode()
