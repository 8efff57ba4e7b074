"""Implicit state: outputs that the server stores for a sequence and adds as inputs to its next request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from conch.config.schema import ModelConfig, datatype
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import ELEMENT_SIZE, WireTensor

#: The state tensors of a sequence, by input name.
State = Mapping[str, WireTensor]

#: Size of an empty string in a BYTES tensor (bytes).
_EMPTY_TEXT = 4


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A state: the ``output`` of a request becomes the ``input`` of the next; ``first`` is the initial value."""

    input: str
    output: str
    first: WireTensor


class StateKeeper:
    """Handles the states of a model; does nothing if the model has none."""

    def __init__(self, tensors: tuple[StateTensor, ...] = ()) -> None:
        self._inputs = {tensor.output: tensor.input for tensor in tensors}
        #: The initial state of a sequence.
        self.first: State = {tensor.input: tensor.first for tensor in tensors}
        self.outputs = tuple(self._inputs)

    def __bool__(self) -> bool:
        return bool(self._inputs)

    def after(self, state: State, response: InferResponse) -> State:
        """Return the state after a response; tensors that are not in the response keep their value."""
        updated = {
            self._inputs[tensor.name]: WireTensor(
                self._inputs[tensor.name], tensor.datatype, tensor.shape, bytes(tensor.data)
            )
            for tensor in response.outputs
            if tensor.name in self._inputs
        }
        return {**state, **updated} if updated else state

    def request_outputs(self, request: InferRequest) -> frozenset[str]:
        """Request the state outputs too; return those that the client did not request."""
        hidden = frozenset(self.outputs).difference(request.outputs)
        request.outputs = (*request.outputs, *(name for name in self.outputs if name in hidden))
        return hidden


def state_tensors(config: ModelConfig, files: Mapping[str, bytes]) -> tuple[StateTensor, ...]:
    """Return the states of an effective configuration; ``files`` has the data of initial states by input name.

    A state without an initial value starts with zeros, and with size 1 for each variable dimension.
    """
    tensors = []
    for state in config.sequence_batching.state:
        initial = state.initial_state[0] if state.initial_state else None
        dims = tuple(initial.dims) if initial is not None else tuple(max(dim, 1) for dim in state.dims)
        kind = datatype(state.data_type)
        shape = (1, *dims) if config.max_batch_size > 0 else dims
        data = files.get(state.input_name) or bytes(ELEMENT_SIZE.get(kind, _EMPTY_TEXT) * prod(dims))
        tensors.append(
            StateTensor(state.input_name, state.output_name, WireTensor(state.input_name, kind, shape, data))
        )
    return tuple(tensors)


def zeros(tensor: WireTensor) -> WireTensor:
    """Return a tensor of the same shape, filled with zeros or empty strings."""
    size = ELEMENT_SIZE.get(tensor.datatype, _EMPTY_TEXT) * prod(tensor.shape)
    return WireTensor(tensor.name, tensor.datatype, tensor.shape, bytes(size))
