"""Cache keys: identify requests with the same response.

Computed for each request to a model that uses the cache, on the event loop, or in a thread for large requests.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from conch.core.inference import InferRequest
from conch.core.tensors import StoredData

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
