"""Test functions that stand in for the other models that a model under test calls, and tensors of test values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from conch.backends.python.errors import TritonModelException
from conch.backends.python.tensor import DATATYPE, encode_strings
from conch.client.values import decode, encode_inputs
from conch.core.errors import Code, ConchError, error_text, internal
from conch.core.inference import InferRequest, InferResponse, ModelSignature
from conch.core.tensors import WireTensor

#: Takes inputs as arrays by name; returns outputs by name, or any number of such mappings, as a decoupled model does.
FakeModel = Callable[..., Mapping[str, Any] | Iterable[Mapping[str, Any]]]


class FakeModels:
    """Serves BLS calls as the server does; see :class:`conch.workers.host.bls.BlsServer`.

    A ConchError or TritonModelException of a function becomes the error of its response. Any other exception is a
    mistake in the test, and is also passed to ``on_mistake``.
    """

    def __init__(self, models: Mapping[str, FakeModel], on_mistake: Callable[[BaseException], None]) -> None:
        self._models = models
        self._loaded = set(models)
        self._on_mistake = on_mistake

    def infer(self, request: InferRequest, decoupled: bool, caller: str) -> None:
        name = request.model_name
        if name not in self._loaded:
            raise internal(f"Failed for execute the inference request. Model '{name}' is not ready.")
        try:
            returned = self._models[name](**{key: decode(tensor) for key, tensor in request.inputs.items()})
            if isinstance(returned, Mapping):
                request.respond(InferResponse(_tensors(returned, request), final=not decoupled))
            elif not decoupled:
                raise TypeError(f"the fake of model '{name}' returned {returned!r:.100}, not its outputs by name")
            else:
                for outputs in returned:
                    request.respond(InferResponse(_tensors(outputs, request), final=False))
            if decoupled:
                request.respond(InferResponse())
        except ConchError as error:
            request.fail(error)
        except TritonModelException as error:
            request.fail(internal(str(error)))
        except BaseException as error:
            self._on_mistake(error)
            request.fail(internal(f"the fake of model '{name}' raised {error_text(error)}"))

    def is_ready(self, name: str, version: int) -> bool:
        return name in self._loaded

    async def load(self, name: str, parameters: Mapping[str, object], starting: str) -> None:
        if name not in self._models:
            raise ConchError(f"failed to load '{name}', failed to poll from model repository", Code.INTERNAL)
        self._loaded.add(name)

    async def unload(self, name: str, dependents: bool) -> None:
        self._loaded.discard(name)


def _tensors(outputs: Mapping[str, Any], request: InferRequest) -> list[Any]:
    requested = request.outputs or tuple(outputs)
    return [to_tensor(name, outputs[name]) for name in outputs if name in requested]


def input_tensors(signature: ModelSignature, values: Mapping[str, Any]) -> dict[str, WireTensor]:
    """Return the tensors of a request; invalid ones are left to the server's checks.

    An array keeps its shape and type. Lists, texts and numbers are converted to the declared type; raises INVALID_ARG
    if that would change their values. They may omit the batch dimension and trailing dimensions of 1.
    """
    plain = {
        name: value for name, value in values.items() if name in signature.inputs and not isinstance(value, np.ndarray)
    }
    encoded = encode_inputs(signature, plain)
    tensors = {name: encoded.get(name) or to_tensor(name, value) for name, value in values.items()}
    for name, tensor in tensors.items():
        if tensor.datatype == "UINT16" and name in signature.inputs and signature.inputs[name].datatype == "BF16":
            tensor.datatype = "BF16"  # NumPy has no BF16, so its bits are given as UINT16
    return tensors


def to_tensor(name: str, value: Any) -> WireTensor:
    """Return the tensor for an array or an array-like; raises TypeError for types that no model takes."""
    array = np.asarray(value)
    if array.dtype.kind in "SU":
        array = np.asarray(value, np.object_)
    datatype = DATATYPE.get(array.dtype)
    if datatype is None:
        raise TypeError(f"tensor '{name}': no model takes arrays of dtype {array.dtype}")
    data = encode_strings(array) if datatype == "BYTES" else array.tobytes()
    return WireTensor(name, datatype, array.shape, data)
