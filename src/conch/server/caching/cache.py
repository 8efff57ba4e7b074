"""The interface of response caches, the entries that they store (in memory or serialized), and the cache keys.

A key is computed for each request to a model that uses the cache, on the event loop, or in a thread for large requests.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from struct import Struct
from typing import Any, Final, Protocol

from conch.core.errors import ConchError
from conch.core.inference import InferRequest, InferResponse, ParameterValue
from conch.core.tensors import ELEMENT_SIZE, StoredData, WireTensor, split_bytes
from conch.telemetry.exposition import Family

#: Approximate memory overhead of an entry (key and index), and of each of its tensors (bytes).
_ENTRY_BYTES: Final = 500
_TENSOR_BYTES: Final = 300
#: The version of the layout and the size of the header.
_HEAD: Final = Struct("<BI")
_LAYOUT: Final = 1


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """The outputs and parameters of a response, with their own copy of the data; ``size`` is approximate (bytes)."""

    outputs: tuple[WireTensor, ...]
    parameters: Mapping[str, ParameterValue]
    size: int

    def response(self) -> InferResponse:
        """Return a new response for another request."""
        return InferResponse(list(self.outputs), parameters=self.parameters)


def kept(outputs: Sequence[WireTensor], parameters: Mapping[str, ParameterValue]) -> CachedResponse:
    """Copy a response into an entry; the original data may be part of a larger frame, which a reference would hold."""
    copies = tuple(WireTensor(output.name, output.datatype, output.shape, bytes(output.data)) for output in outputs)
    size = _ENTRY_BYTES + sum(_TENSOR_BYTES + len(copy.data) for copy in copies)
    size += sum(len(name) + len(str(value)) + 100 for name, value in parameters.items())
    return CachedResponse(copies, dict(parameters), size)


def packed(entry: CachedResponse) -> bytes:
    """Serialize an entry: a JSON header, then the data of the tensors."""
    # The json module accepts all parameter values, including NaN and integers of more than 64 bits.
    header = json.dumps({
        "outputs": [(output.name, output.datatype, output.shape, len(output.data)) for output in entry.outputs],
        "parameters": dict(entry.parameters),
    }, separators=(",", ":")).encode()  # fmt: skip
    return b"".join((_HEAD.pack(_LAYOUT, len(header)), header, *(output.data for output in entry.outputs)))


def unpacked(data: bytes) -> CachedResponse:
    """Deserialize an entry from :func:`packed`; raises ValueError for other data, which another program may store."""
    try:
        layout, length = _HEAD.unpack_from(data)
        at = _HEAD.size + length
        if layout != _LAYOUT or at > len(data):
            raise ValueError("the head of the entry is another one")
        header: dict[str, Any] = json.loads(data[_HEAD.size : at])
        outputs = []
        for name, datatype, shape, size in header["outputs"]:
            outputs.append(_tensor(name, datatype, tuple(shape), data[at : at + size]))
            at += size
        if at != len(data):
            raise ValueError("the sizes of the tensors differ from the header")
        return kept(outputs, header["parameters"])
    except (ArithmeticError, AttributeError, ConchError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a cached response: {error}") from error
    except Exception as error:  # struct.error derives directly from Exception
        raise ValueError(f"not a cached response: {error}") from error


def _tensor(name: Any, datatype: Any, shape: tuple[Any, ...], data: bytes) -> WireTensor:
    if type(name) is not str or any(type(dim) is not int or dim < 0 for dim in shape):
        raise ValueError("a tensor has no name, or no shape")
    elements = len(split_bytes(data)) if datatype == "BYTES" else len(data) / ELEMENT_SIZE[datatype]
    if elements != prod(shape):
        raise ValueError(f"tensor '{name}' has {elements:g} elements, its shape {prod(shape)}")
    return WireTensor(name, datatype, shape, data)


class CacheScope(Protocol):
    """The cache entries of one loaded model version, by cache key."""

    def find(self, key: bytes) -> CachedResponse | Awaitable[CachedResponse | None] | None:
        """Return the response for a key, None for a miss, or an awaitable of either; neither raises."""

    def insert(self, key: bytes, entry: CachedResponse) -> bool:
        """Store a response; return False if the key already has one, which is kept."""

    def forget(self) -> None:
        """End the scope because the version has been unloaded: its entries are not used again, and none are added."""


class NoEntries:
    """The scope of a version whose responses must not be cached; always empty."""

    def find(self, key: bytes) -> None:
        return None

    def insert(self, key: bytes, entry: CachedResponse) -> bool:
        return True

    def forget(self) -> None: ...


class ResponseCache(Protocol):
    """A cache for all models of the server; ``lasting`` is True if entries outlive the loaded versions."""

    lasting: bool

    def scope(self, model: str, version: int, identity: bytes) -> CacheScope:
        """Return the scope of a loading version; ``identity`` is a digest of everything its responses depend on."""

    def families(self) -> Iterable[Family]:
        """Return the metrics of the whole cache."""

    async def close(self) -> None:
        """Stop background work and release resources; called after the last request."""


_DIGEST_BYTES: Final = 16


def request_key(request: InferRequest) -> bytes:
    """Return a digest of everything that the model is given: inputs, parameters, requested outputs and flags.

    Requests with a correlation ID are not cached.

    Inputs in shared memory regions are copied here, because their client may write there while the request runs, and
    the model must receive the data that the key is computed from.

    Triton's key has only the names and bytes of the inputs: it may respond to a request with the response of another
    request that has other input shapes or requested outputs.
    """
    inputs = request.inputs
    for tensor in inputs.values():
        if isinstance(tensor.data, StoredData):
            tensor.data = bytes(tensor.data)
    digest = blake2b(
        repr((
            sorted((tensor.name, tensor.datatype, tensor.shape, len(tensor.data)) for tensor in inputs.values()),
            sorted(request.outputs),
            sorted(request.parameters.items()) if request.parameters else (),
            request.flags,
        )).encode(errors="surrogatepass"),
        digest_size=_DIGEST_BYTES,
    )  # fmt: skip
    for name in sorted(inputs) if len(inputs) > 1 else inputs:
        digest.update(inputs[name].data)
    return digest.digest()


def input_bytes(request: InferRequest) -> int:
    """Return the number of tensor bytes that :func:`request_key` hashes."""
    return sum(len(tensor.data) for tensor in request.inputs.values())
