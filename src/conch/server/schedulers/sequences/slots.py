"""Active sequences, and the slots of instances, each with one sequence at a time."""

from __future__ import annotations

from collections import deque

from conch.core.inference import SEQUENCE_START, InferRequest, InferResponse, ModelSignature, ignore
from conch.server.schedulers.sequences.controls import ControlInputs
from conch.server.schedulers.sequences.states import State, StateKeeper, zeros


class LiveSequence:
    """An active sequence, from its first request to its last; it has a slot or waits for one.

    ``closed`` is True if no more requests may join it, because it had its last request, was cancelled or was removed.
    ``last`` is the time of its last activity (ns), ``expires`` the deadline of its wait for a slot (ns, 0 for none).
    """

    __slots__ = ("closed", "expires", "id", "last", "repeated", "running", "slot", "state", "waiting")

    def __init__(self, id: int | str, state: State) -> None:
        self.id = id
        self.state = state
        self.waiting: deque[InferRequest] = deque()
        #: Number of its requests that an instance has.
        self.running = 0
        self.slot: Slot | None = None
        self.closed = False
        self.last = 0
        self.expires = 0
        #: The request that an iterative model runs again.
        self.repeated: InferRequest | None = None

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running


class Slot:
    """A slot for one sequence; ``number`` is its row in the batch.

    ``in_flight`` is the request that its instance has, from this sequence or from the previous one.
    """

    __slots__ = ("in_flight", "instance", "number", "owner", "sequence")

    def __init__(self, instance: InstanceSlots, number: int) -> None:
        self.instance = instance
        self.number = number
        self.sequence: LiveSequence | None = None
        self.in_flight: InferRequest | None = None
        #: The sequence of ``in_flight``.
        self.owner: LiveSequence | None = None

    def begin(self, request: InferRequest, sequence: LiveSequence) -> None:
        """Record that the instance has been given ``request``."""
        self.in_flight, self.owner = request, sequence
        sequence.running += 1

    def finish(self) -> LiveSequence | None:
        """Clear the in-flight request, if any, when it has completed; return its sequence."""
        owner, self.in_flight, self.owner = self.owner, None, None
        if owner is not None:
            owner.running -= 1
        return owner


class InstanceSlots:
    """The slots of the instance ``key``, which runs one batch at a time.

    ``accepting`` is False if it gets no new sequences, because it has died or is being retired.
    """

    def __init__(self, key: str, count: int, order: int) -> None:
        self.key = key
        self.order = order
        self.slots = [Slot(self, number) for number in range(count)]
        self.accepting = True
        self.busy = False

    @property
    def vacant(self) -> bool:
        """Whether it has no sequences and no requests."""
        return not self.busy and all(slot.sequence is None and slot.in_flight is None for slot in self.slots)

    @property
    def eager(self) -> bool:
        """Whether it is not busy and has waiting requests."""
        return not self.busy and any(
            slot.in_flight is not None or (slot.sequence is not None and slot.sequence.waiting) for slot in self.slots
        )


class NullRequest(InferRequest):
    """Fills a batch row whose sequence has no request, so that other sequences keep their rows.

    Its responses are discarded.
    """

    __slots__ = ()


class RequestPreparer:
    """Adds control inputs and states of sequences to requests."""

    def __init__(self, controls: ControlInputs, states: StateKeeper) -> None:
        self._controls = controls
        self._states = states

    def prepare(self, request: InferRequest, sequence: LiveSequence) -> None:
        """Add the control inputs and the state to a request that is about to run."""
        for tensor in self._controls.of(request):
            request.inputs[tensor.name] = tensor
        if self._states:
            if request.flags & SEQUENCE_START:
                sequence.state = self._states.first
            request.inputs.update(sequence.state)
            if sequence.repeated is not request:
                self._keep_state(request, sequence)

    def null(self, like: InferRequest, state: State) -> NullRequest:
        """Return a request for an empty row, with the input shapes of ``like``, a request in the same batch."""
        inputs = {name: zeros(tensor) for name, tensor in like.inputs.items()}
        inputs.update({tensor.name: tensor for tensor in self._controls.of_null})
        inputs.update({name: zeros(tensor) for name, tensor in state.items()})
        return NullRequest(like.model_name, inputs, ignore, model_version=like.model_version)

    def _keep_state(self, request: InferRequest, sequence: LiveSequence) -> None:
        """Store the states in the responses, and remove those that the client did not request."""
        states, hidden = self._states, self._states.request_outputs(request)

        def keep(response: InferResponse) -> None:
            sequence.state = states.after(sequence.state, response)
            if hidden:
                response.outputs = [tensor for tensor in response.outputs if tensor.name not in hidden]

        request.observe(keep)


def same_shapes(signature: ModelSignature, first: InferRequest, other: InferRequest) -> bool:
    """Whether two requests may share a batch: same inputs, same variable dimensions."""
    if first.inputs.keys() != other.inputs.keys():
        return False
    return all(
        first.inputs[name].shape == other.inputs[name].shape
        for name, spec in signature.inputs.items()
        if name in first.inputs and -1 in spec.dims and not spec.ragged
    )
