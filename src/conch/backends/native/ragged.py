"""Batches of requests with other shapes: tensors laid end to end, tensors about their shapes, outputs cut by them.

Used in workers by backends that compute tensors, for models with ``allow_ragged_batch``, ``batch_input`` or
``batch_output``.  Source: the input collector and output responder of Triton's backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Final

import numpy as np

from conch.backends.native.arrays import DTYPES, Array, Request, Result, Strings, cut_rows, joined_rows, value_of
from conch.errors import internal, invalid
from conch.tensors import PROTOCOL_NAME

_Shapes = Sequence[tuple[int, ...]]


def _item_shapes(shapes: _Shapes) -> Array:
    """The shape of each row of each request, ``[rows, dimensions]``."""
    rows = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(rows, np.int64).reshape(len(rows), len(shapes[0]) - 1)


#: What each kind makes of the shapes that the requests give its source, batch dimension included.
_MAKE: Final[Mapping[str, Callable[[_Shapes], Array]]] = {
    "BATCH_ELEMENT_COUNT": lambda shapes: np.array([*map(prod, shapes)]),
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes: np.array([*accumulate(map(prod, shapes))]),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: np.array([*accumulate(map(prod, shapes), initial=0)]),
    # Its shape is what it says; Triton leaves whatever the memory holds in it.
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(max(map(prod, shapes)), np.int32),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: _item_shapes(shapes).ravel(),
}


class RaggedBatches:
    """What a configuration says of ragged inputs, batch inputs and batch outputs, obeyed for each batch."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises INVALID_ARG where an output has more dimensions than the input whose shape it should take."""
        inputs = {tensor["name"]: tensor for tensor in config.get("input", ())}
        outputs = {tensor["name"]: tensor for tensor in config.get("output", ())}
        self._ragged = frozenset(name for name, tensor in inputs.items() if tensor.get("allow_ragged_batch"))
        self._made = [
            (target, _MAKE[one["kind"]], one["source_input"][0], DTYPES[PROTOCOL_NAME[one["data_type"]]])
            for one in config.get("batch_input", ())
            for target in one["target_name"]
        ]
        batch = [-1] if int(config["max_batch_size"]) > 0 else []
        self._scattered = {
            target: (one["source_input"][0], (*batch, *_dims(outputs[target])))
            for one in config.get("batch_output", ())
            for target in one["target_name"]
        }
        for target, (source, shape) in self._scattered.items():
            known = len(batch) + len(_dims(inputs[source]))
            if -1 in shape[known:]:
                raise invalid(
                    f"output '{target}' of model '{config['name']}' takes its shape from input '{source}', which has "
                    f"{known} dimensions; of the output's {len(shape)}, those beyond must be numbers"
                )

    @property
    def needed(self) -> bool:
        """Whether anything differs from batches whose requests are joined row by row."""
        return bool(self._ragged or self._made or self._scattered)

    def join(self, requests: Sequence[Request]) -> dict[str, Array | Strings]:
        """The tensors of one run; a ragged input's elements lie end to end, in one dimension."""
        joined: dict[str, Array | Strings] = {}
        for name in requests[0].inputs:
            tensors = [request.inputs[name] for request in requests]
            joined[name] = _flat(map(value_of, tensors)) if name in self._ragged else joined_rows(tensors)
        for target, make, source, dtype in self._made:
            joined[target] = make([request.shape(source) for request in requests]).astype(dtype)
        return joined

    def split(self, requests: Sequence[Request], outputs: Mapping[str, Array | Strings]) -> list[Result]:
        """Each request's outputs; a scattered one is as many elements as its shape has, one request after the other.

        Raises INTERNAL where an output has too few elements.
        """
        plain = {name: value for name, value in outputs.items() if name not in self._scattered}
        results = cut_rows(requests, plain)
        for name in outputs.keys() & self._scattered.keys():
            source, dims = self._scattered[name]
            shapes = [_resolved(dims, request.shape(source)) for request in requests]
            for result, part in zip(results, _cut(name, outputs[name], shapes), strict=True):
                result.outputs[name] = part
        return results


def _resolved(dims: Sequence[int], given: Sequence[int]) -> tuple[int, ...]:
    return tuple(given[index] if dim == -1 else dim for index, dim in enumerate(dims))


def _cut(name: str, value: Array | Strings, shapes: _Shapes) -> Iterator[Array | Strings]:
    """The elements of an output in pieces of these shapes."""
    count, wanted = prod(value.shape), sum(map(prod, shapes))
    if count < wanted:
        raise internal(f"output '{name}' has {count} elements, and its requests' inputs ask for {wanted}")
    at = 0
    for shape in shapes:
        part = slice(at, at := at + prod(shape))
        if isinstance(value, Strings):
            yield Strings(shape, value.elements[part])
        else:
            yield value.ravel()[part].reshape(shape)


def _dims(tensor: Mapping[str, Any]) -> list[int]:
    """The shape that the graph sees."""
    reshape = tensor.get("reshape")
    return [int(dim) for dim in (reshape.get("shape", ()) if reshape else tensor["dims"])]


def _flat(values: Iterable[Array | Strings]) -> Array | Strings:
    parts = list(values)
    if isinstance(parts[0], Strings):
        elements = [element for part in parts for element in part.elements]  # type: ignore[union-attr]
        return Strings((len(elements),), elements)
    return np.concatenate([part.ravel() for part in parts])  # type: ignore[union-attr]
