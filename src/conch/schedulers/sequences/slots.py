"""A sequence that is under way, and the slots of an instance, each of which has one sequence at a time."""

from __future__ import annotations

from collections import deque

from conch.inference import SEQUENCE_START, InferRequest, InferResponse, ModelSignature
from conch.schedulers.sequences.controls import ControlInputs
from conch.schedulers.sequences.states import State, StateKeeper, zeros


class LiveSequence:
    """A sequence from its first request to the last.

    It has a slot or waits for one; ``closed`` says that no request joins it any more: it has had its last one, was
    cancelled or was forgotten.  ``last`` is when it last had a request (ns), ``expires`` when it may wait no longer for
    a slot (ns, 0 for never).
    """

    __slots__ = ("closed", "expires", "id", "last", "repeated", "running", "slot", "state", "waiting")

    def __init__(self, id: int | str, state: State) -> None:
        self.id = id
        self.state = state
        self.waiting: deque[InferRequest] = deque()
        #: How many of its requests an instance has been given.
        self.running = 0
        self.slot: Slot | None = None
        self.closed = False
        self.last = 0
        self.expires = 0
        #: The request that runs again, in an iterative model.
        self.repeated: InferRequest | None = None

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running


class Slot:
    """A place for one sequence; ``number`` is its row.

    ``in_flight`` is the request that its instance has been given and has not done, of this sequence or of the one
    before it.
    """

    __slots__ = ("in_flight", "instance", "number", "owner", "sequence")

    def __init__(self, instance: InstanceSlots, number: int) -> None:
        self.instance = instance
        self.number = number
        self.sequence: LiveSequence | None = None
        self.in_flight: InferRequest | None = None
        #: Whose ``in_flight`` is.
        self.owner: LiveSequence | None = None

    def begin(self, request: InferRequest, sequence: LiveSequence) -> None:
        """The instance is given ``request``."""
        self.in_flight, self.owner = request, sequence
        sequence.running += 1

    def finish(self) -> LiveSequence | None:
        """The instance has done what was under way here, if anything was; returns whose it was."""
        owner, self.in_flight, self.owner = self.owner, None, None
        if owner is not None:
            owner.running -= 1
        return owner


class InstanceSlots:
    """The slots of the instance ``key``, which runs one batch at a time.

    ``accepting`` is false when it gets no new sequences: it has died, or is about to go.
    """

    def __init__(self, key: str, count: int, order: int) -> None:
        self.key = key
        self.order = order
        self.slots = [Slot(self, number) for number in range(count)]
        self.accepting = True
        self.busy = False

    @property
    def vacant(self) -> bool:
        """Whether it has no sequence and nothing to run."""
        return not self.busy and all(slot.sequence is None and slot.in_flight is None for slot in self.slots)

    @property
    def eager(self) -> bool:
        """Whether it could run and some of its requests wait."""
        return not self.busy and any(
            slot.in_flight is not None or (slot.sequence is not None and slot.sequence.waiting) for slot in self.slots
        )


class NullRequest(InferRequest):
    """Fills a row whose sequence has no request, so that the others keep theirs; nobody gets its responses."""

    __slots__ = ()


class RequestPreparer:
    """Gives requests what models see of their sequences: controls and states."""

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
                self._states.watch(request)
                self._follow(request, sequence)

    def null(self, like: InferRequest, state: State) -> NullRequest:
        """A request for a row without one, in the shapes of a request that is in the same batch."""
        inputs = {name: zeros(tensor) for name, tensor in like.inputs.items()}
        inputs.update({tensor.name: tensor for tensor in self._controls.of_null})
        inputs.update({name: zeros(tensor) for name, tensor in state.items()})
        return NullRequest(like.model_name, inputs, _ignore, model_version=like.model_version)

    def _follow(self, request: InferRequest, sequence: LiveSequence) -> None:
        deliver, states = request.on_response, self._states

        def keep(response: InferResponse) -> None:
            sequence.state = states.after(sequence.state, response)
            deliver(response)

        request.on_response = keep


def same_shapes(signature: ModelSignature, first: InferRequest, other: InferRequest) -> bool:
    """Whether two requests may share a batch: the same inputs, and the same variable dimensions."""
    if first.inputs.keys() != other.inputs.keys():
        return False
    return all(
        first.inputs[name].shape == other.inputs[name].shape
        for name, spec in signature.inputs.items()
        if name in first.inputs and -1 in spec.dims and not spec.ragged
    )


def _ignore(response: InferResponse) -> None:
    """Nobody waits for what a model answers to a row without a request."""
