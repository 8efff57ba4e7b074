"""Implicit state: outputs that the server keeps for a sequence and gives to the model with its next request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from conch.config.schema import ModelConfig, datatype
from conch.inference import InferRequest, InferResponse
from conch.tensors import ELEMENT_SIZE, WireTensor

#: The tensors of a sequence's state by the names of the inputs.
State = Mapping[str, WireTensor]

#: An empty text, as BYTES has it (bytes).
_EMPTY_TEXT = 4


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One state: the ``output`` of a request is the ``input`` of the next; ``first`` is that of a sequence's first."""

    input: str
    output: str
    first: WireTensor


class StateKeeper:
    """Knows the states of a model; without any it does nothing."""

    def __init__(self, tensors: tuple[StateTensor, ...] = ()) -> None:
        self._inputs = {tensor.output: tensor.input for tensor in tensors}
        #: The state with which a sequence starts.
        self.first: State = {tensor.input: tensor.first for tensor in tensors}
        self.outputs = tuple(self._inputs)

    def __bool__(self) -> bool:
        return bool(self._inputs)

    def after(self, state: State, response: InferResponse) -> State:
        """The state after a response; what it does not give stays as it was."""
        given = {
            self._inputs[tensor.name]: WireTensor(
                self._inputs[tensor.name], tensor.datatype, tensor.shape, bytes(tensor.data)
            )
            for tensor in response.outputs
            if tensor.name in self._inputs
        }
        return {**state, **given} if given else state

    def watch(self, request: InferRequest) -> None:
        """Ask the model for the states too, and keep from the client those that it has not asked for."""
        hidden = frozenset(self.outputs).difference(request.outputs)
        if not hidden:
            return
        request.outputs = (*request.outputs, *(name for name in self.outputs if name in hidden))
        deliver = request.on_response

        def strip(response: InferResponse) -> None:
            response.outputs = [tensor for tensor in response.outputs if tensor.name not in hidden]
            deliver(response)

        request.on_response = strip


def state_tensors(config: ModelConfig, files: Mapping[str, bytes]) -> tuple[StateTensor, ...]:
    """The states of an effective configuration; ``files`` has the data of initial states by the names of the inputs.

    A state without an initial one begins with zeros, and with 1 in place of each variable dimension.
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
    """A tensor of the same shape that holds zeros, or empty texts."""
    size = ELEMENT_SIZE.get(tensor.datatype, _EMPTY_TEXT) * prod(tensor.shape)
    return WireTensor(tensor.name, tensor.datatype, tensor.shape, bytes(size))
