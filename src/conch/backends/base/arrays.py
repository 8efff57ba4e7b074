"""Requests, results and tensors of the built-in backends: numpy arrays, and flat lists for BYTES.

Runs in workers and in ``conch convert``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.core.errors import ConchError, error_text, internal, invalid
from conch.core.tensors import Buffer, WireTensor, pack_bytes, split_bytes
from conch.workers.child.buffers import OutputLoan

Array = npt.NDArray[Any]

_logger = logging.getLogger(__name__)

#: The numpy type of each protocol datatype; BF16 is represented by its 16 bits.
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}


@dataclass(slots=True)
class Strings:
    """A BYTES tensor: its shape and its row-major elements; ``str`` elements are sent as UTF-8."""

    shape: tuple[int, ...]
    elements: Sequence[bytes | str]

    def packed(self) -> bytes:
        """Encode the elements in the wire format, each preceded by its length."""
        return pack_bytes(
            [text if isinstance(text, bytes) else text.encode("utf-8", "replace") for text in self.elements]
        )


@dataclass(slots=True)
class Result:
    """The response to one request: tensors by output name, with the batch dimension, and response parameters."""

    outputs: dict[str, Array | Strings]
    parameters: dict[str, bool | int | float | str] = field(default_factory=dict)


#: In place of the result of a request that has not been completed and runs again.
UNFINISHED: Final = Result({})
#: Limit for the total size of an input's texts, as a multiple of ``text_limit``.
TEXTS_TOGETHER: Final = 16


class Request:
    """One request in a worker; ``outputs`` are the names of the requested outputs.

    Methods that read an input raise INVALID_ARG with its name if the request does not have it.
    """

    __slots__ = (
        "cancelled", "id", "inputs", "loans", "outputs", "parameters", "preview", "rows", "serial", "text_limit",
    )  # fmt: skip

    def __init__(
        self,
        inputs: dict[str, WireTensor],
        outputs: frozenset[str],
        *,
        serial: int = 0,
        id: str = "",
        parameters: dict[str, Any] | None = None,
        batched: bool = True,
        text_limit: int = 0,
        loans: Mapping[str, OutputLoan] | None = None,
        preview: Callable[[str], None] | None = None,
    ) -> None:
        self.serial = serial
        self.id = id
        self.inputs = inputs
        self.outputs = outputs
        self.parameters = parameters or {}
        #: The batch dimension; 1 for a model without one.
        self.rows = next((tensor.shape[0] for tensor in inputs.values() if tensor.shape), 1) if batched else 1
        self.cancelled = False
        #: Maximum size of a text (bytes); 0 for no limit.
        self.text_limit = text_limit
        #: Loans of shared memory by output name; these outputs are written there instead of being sent to the server.
        self.loans = loans or {}
        #: Sends the beginning of the response's text to a client that reads it early; None for all other clients.
        self.preview = preview

    @property
    def size(self) -> int:
        """The total size of the inputs (bytes)."""
        return sum([len(tensor.data) for tensor in self.inputs.values()])

    def has(self, name: str) -> bool:
        return name in self.inputs

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an input, with the batch dimension."""
        return self._tensor(name).shape

    def array(self, name: str) -> Array:
        """Return a tensor of fixed-size elements without copying it."""
        tensor = self._tensor(name)
        return array_of(tensor)

    def files(self, name: str) -> list[bytes]:
        """Return the elements of a BYTES tensor in row-major order."""
        return split_bytes(self._tensor(name).data)

    def texts(self, name: str) -> list[str]:
        """Return the elements of a BYTES tensor as text.

        Raises INVALID_ARG for invalid UTF-8, with its position, for a text longer than ``text_limit``, and if all texts
        together exceed ``TEXTS_TOGETHER`` times that limit. The sizes are checked first, because reading the texts
        takes longer than refusing them.
        """
        elements = self.files(name)
        if self.text_limit:
            self._check_sizes(name, elements)
        try:
            return [element.decode() for element in elements]
        except UnicodeDecodeError:
            for index, element in enumerate(elements):
                try:
                    element.decode()
                except UnicodeDecodeError as error:
                    raise invalid(f"input '{name}' is not valid UTF-8: element {index}, byte {error.start}") from None
            raise

    def _check_sizes(self, name: str, elements: list[bytes]) -> None:
        limit, max_size = self.text_limit, TEXTS_TOGETHER * self.text_limit
        longest = max(map(len, elements), default=0)
        if longest > limit:
            raise invalid(
                f"input '{name}' has a text of {longest} bytes; at most {limit} are read. Use parameter"
                " 'max_text_bytes' of the model to increase the limit."
            )
        if (size := len(self.inputs[name].data)) > max_size:
            raise invalid(
                f"input '{name}' has {size} bytes of texts; at most {max_size} are read at a time. Use parameter"
                " 'max_text_bytes' of the model to increase the limit."
            )

    def option(self, name: str, default: Any = None) -> Any:
        """Return the value of an optional one-element input; ``default`` if it is absent.

        BYTES are returned as text. Raises INVALID_ARG if the rows have different values.
        """
        if name not in self.inputs:
            return default
        values = self.texts(name) if self.inputs[name].datatype == "BYTES" else self.array(name).ravel().tolist()
        if not values:
            return default
        if any(value != values[0] for value in values[1:]):
            raise invalid(f"input '{name}' must be the same in all rows of a request")
        return values[0]

    def _tensor(self, name: str) -> WireTensor:
        try:
            return self.inputs[name]
        except KeyError:
            raise invalid(f"input '{name}' is missing") from None


def array_of(tensor: WireTensor) -> Array:
    """Return a tensor of fixed-size elements as an array over the same memory."""
    return np.frombuffer(tensor.data, DTYPES[tensor.datatype]).reshape(tensor.shape)


def value_of(tensor: WireTensor) -> Array | Strings:
    """Return the value of a tensor of any datatype; numbers are not copied."""
    if tensor.datatype == "BYTES":
        return Strings(tensor.shape, split_bytes(tensor.data))
    return array_of(tensor)


def joined_rows(tensors: Sequence[WireTensor]) -> Array | Strings:
    """Concatenate tensors along the batch dimension."""
    if tensors[0].datatype == "BYTES":
        shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
        return Strings(shape, [element for tensor in tensors for element in split_bytes(tensor.data)])
    return np.concatenate([array_of(tensor) for tensor in tensors])


def cut_rows(requests: Sequence[Request], outputs: Mapping[str, Array | Strings]) -> list[Result]:
    """Split batched outputs into one result per request. Raises INTERNAL for an output with a wrong number of rows."""
    total = sum(request.rows for request in requests)
    for name, value in outputs.items():
        if not value.shape or value.shape[0] != total:
            raise internal(f"output '{name}' has shape {list(value.shape)}, not the batch dimension {total}")
    results = []
    at = 0
    for request in requests:
        part = slice(at, at + request.rows)
        results.append(Result({name: _rows(value, part) for name, value in outputs.items()}))
        at += request.rows
    return results


def _rows(value: Array | Strings, part: slice) -> Array | Strings:
    if isinstance(value, Strings):
        width = len(value.elements) // value.shape[0]
        count = part.stop - part.start
        return Strings((count, *value.shape[1:]), value.elements[part.start * width : part.stop * width])
    return value[part]


def wire_tensor(name: str, datatype: str, value: Array | Strings) -> tuple[str, str, Sequence[int], Buffer]:
    """Return the name, datatype, shape and bytes of an output. Raises INTERNAL if ``value`` does not fit."""
    if isinstance(value, Strings):
        if datatype != "BYTES" or prod(value.shape) != len(value.elements):
            raise internal(f"output '{name}' was given {len(value.elements)} strings for {datatype} {value.shape}")
        return name, datatype, value.shape, value.packed()
    if datatype == "BYTES":
        raise internal(f"output '{name}' must be given strings")
    array = np.ascontiguousarray(value, DTYPES[datatype])
    return name, datatype, value.shape, array.reshape(-1).view(np.uint8).data


def failure(error: BaseException) -> ConchError:
    """Convert ``error`` to an INTERNAL error that names its type, and log its traceback, unless it is a ConchError."""
    if isinstance(error, ConchError):
        return error
    message = error_text(error)
    _logger.error("%s", message.partition("\n")[0], exc_info=error)
    return internal(message)
