"""Inputs that the server adds to the requests of sequences: controls and implicit states.

Control inputs have the position of a request in its sequence and the correlation ID. Implicit states are outputs that
the server stores for a sequence and adds as inputs to its next request.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

from conch.config.schema import ModelConfig, SequenceBatching, datatype
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse
from conch.core.tensors import ELEMENT_SIZE, WireTensor, pack_bytes

_Control: TypeAlias = SequenceBatching.Control
#: Datatype and ``struct`` format of the tensors, by the configuration field with the values for false and true.
_VALUES: Final = {
    "int32_false_true": ("INT32", "<i"),
    "fp32_false_true": ("FP32", "<f"),
    "bool_false_true": ("BOOL", "<?"),
}
_Pair = tuple[WireTensor, WireTensor]


class ControlInputs:
    """Creates the control inputs of ``batching``; their shape is ``[1]``, or ``[1, 1]`` for ``batched`` models."""

    def __init__(self, batching: SequenceBatching, *, batched: bool) -> None:
        self._shape = (1, 1) if batched else (1,)
        self._pairs: dict[int, _Pair] = {}
        self._correlation: tuple[str, str] | None = None
        for tensor in batching.control_input:
            for control in tensor.control:
                if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
                    self._correlation = tensor.name, datatype(control.data_type)
                else:
                    self._pairs[control.kind] = self._pair(tensor.name, control)
        #: The control inputs of a row without a request.
        self.of_null = self._made(0, "" if self._wants_text else 0, ready=False)

    def of(self, request: InferRequest) -> list[WireTensor]:
        """Return the control inputs of a request, from its flags and its correlation ID."""
        return self._made(request.flags, request.correlation_id, ready=True)

    def check(self, model: str, request: InferRequest) -> None:
        """Raise INVALID_ARG if the correlation ID is text but the model expects a number, or the reverse."""
        if self._correlation is None or isinstance(request.correlation_id, str) == self._wants_text:
            return
        name, expected = self._correlation
        declared = "UINT64" if self._wants_text else "BYTES"
        raise request.error(
            f"sequence batching control '{name}' data-type is '{declared}', but model '{model}' expects '{expected}'"
        )

    @property
    def _wants_text(self) -> bool:
        return self._correlation is not None and self._correlation[1] == "BYTES"

    def _made(self, flags: int, correlation_id: int | str, *, ready: bool) -> list[WireTensor]:
        truth = {
            _Control.CONTROL_SEQUENCE_START: bool(flags & SEQUENCE_START),
            _Control.CONTROL_SEQUENCE_END: bool(flags & SEQUENCE_END),
            _Control.CONTROL_SEQUENCE_READY: ready,
        }
        tensors = [pair[truth[kind]] for kind, pair in self._pairs.items()]
        if self._correlation is not None:
            name, kind = self._correlation
            if isinstance(correlation_id, str):
                data = pack_bytes([correlation_id.encode()])
            else:  # smaller types get the lower bytes
                data = (correlation_id % 2**64).to_bytes(8, "little")[: ELEMENT_SIZE[kind]]
            tensors.append(WireTensor(name, kind, self._shape, data))
        return tensors

    def _pair(self, name: str, control: _Control) -> _Pair:
        """Return the tensors for false and for true."""
        field = next(field for field in _VALUES if getattr(control, field))
        kind, form = _VALUES[field]
        false, true = (
            WireTensor(name, kind, self._shape, struct.pack(form, value)) for value in getattr(control, field)
        )
        return false, true


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
