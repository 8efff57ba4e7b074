"""What makes two requests the same to the response cache.

Called for each request to a model that uses the cache, on the event loop, or in a thread for large ones.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from conch.inference import InferRequest
from conch.tensors import StoredData

_DIGEST_BYTES: Final = 16


def request_key(request: InferRequest) -> bytes:
    """A digest of everything that the model is given: inputs, parameters, outputs asked for and flags.

    Requests with a correlation id are not in the cache.

    Inputs in shared memory are read here, once: their client may write there while the request runs, and what the model
    answers has to be the answer to what the key was made of.

    Triton's key has the names and the bytes of the inputs alone: it answers a request with the response to another one
    whose inputs have other shapes, or which asks for other outputs.
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
    """How many bytes of tensors :func:`request_key` goes through."""
    return sum(len(tensor.data) for tensor in request.inputs.values())
