"""The scheduler for sequence batching: assigns the requests of sequences to instances, in order.

A pure state machine: times are passed in (``monotonic_ns``) and nothing sleeps. Each loaded model version with sequence
batching has a scheduler, on the event loop; its dispatcher reports instances and completed batches. A sequence keeps a
slot of one instance until its end, because the model keeps state there; sequences without a slot wait in the backlog in
order of arrival. Source: Triton's sequence batcher.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count

from conch.config.schema import ModelConfig
from conch.core.errors import QUEUE_FULL, Code, ConchError, cancelled, internal, invalid, unavailable
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse, ModelSignature, ignore
from conch.server.schedulers.batching import BatchDecision, DynamicBatcher, Scheduler
from conch.server.schedulers.ordering import InOrder
from conch.server.schedulers.queue import NS_PER_US, RequestQueue
from conch.server.schedulers.sequences.inputs import ControlInputs, State, StateKeeper, zeros
from conch.server.schedulers.sequences.roster import InstanceSlots, LiveSequence, SequenceRoster, Slot

LOG = logging.getLogger("conch")

EXPIRED = "timeout of the corresponding sequence has been expired"


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """The sequence batching settings of a model; times in nanoseconds.

    ``slots`` is the number of sequences that an instance has at a time. With the direct strategy, each sequence has its
    own row of the batch; with the ``oldest`` strategy, the first requests of all sequences are batched dynamically.
    ``max_idle`` is the maximum time that a sequence may be without requests. No request runs before ``hold`` requests
    have arrived for sequences with a slot and ``hold_backlog`` requests for sequences without.
    """

    model: str
    max_batch_size: int
    slots: int
    max_idle: int
    max_delay: int = 0
    minimum_utilization: float = 0.0
    oldest: bool = False
    preferred: tuple[int, ...] = ()
    preserve_ordering: bool = False
    iterative: bool = False
    limit: int = 0
    hold: int = 0
    hold_backlog: int = 0


def sequence_policy(config: ModelConfig, *, limit: int = 0, hold: int = 0, hold_backlog: int = 0) -> SequencePolicy:
    """Return the policy of an effective configuration; ``limit`` bounds the waiting requests, 0 for no limit."""
    batching = config.sequence_batching
    oldest = batching.HasField("oldest")
    strategy = batching.oldest if oldest else batching.direct
    rows = max(config.max_batch_size, 1)
    return SequencePolicy(
        model=config.name,
        max_batch_size=config.max_batch_size,
        slots=(batching.oldest.max_candidate_sequences or rows) if oldest else rows,
        max_idle=batching.max_sequence_idle_microseconds * NS_PER_US,
        max_delay=strategy.max_queue_delay_microseconds * NS_PER_US,
        minimum_utilization=batching.direct.minimum_slot_utilization,
        oldest=oldest,
        preferred=tuple(batching.oldest.preferred_batch_size),
        preserve_ordering=batching.oldest.preserve_ordering,
        iterative=batching.iterative_sequence,
        limit=limit,
        hold=hold,
        hold_backlog=hold_backlog,
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


class DirectRows:
    """Forms the batches of one instance with the direct strategy: each sequence has its own row.

    A batch waits until enough rows have a request, or the oldest request has waited ``policy.max_delay``.
    """

    def __init__(
        self, instance: InstanceSlots, policy: SequencePolicy, signature: ModelSignature, preparer: RequestPreparer
    ) -> None:
        self._instance = instance
        self._policy = policy
        self._signature = signature
        self._preparer = preparer
        self._compares = any(spec.optional or -1 in spec.dims for spec in signature.inputs.values())

    def issue(self, slot: Slot, now: int) -> None:
        """Do nothing: requests stay in their sequence until a batch takes them."""

    def withdraw(self, request: InferRequest) -> None:
        """Do nothing: no requests are issued."""

    def take(self, now: int) -> tuple[list[tuple[InferRequest, LiveSequence | None]], int]:
        """Return the requests to run now, by row, and when to call this again (ns, 0 for after the next change)."""
        ready = [slot for slot in self._instance.slots if slot.sequence is not None and slot.sequence.waiting]
        if not ready:
            return [], 0
        due = self._due(ready)
        if due > now:
            return [], due
        first = _head(ready[0])
        assert ready[0].sequence is not None
        state = ready[0].sequence.state
        batch: list[tuple[InferRequest, LiveSequence | None]] = []
        for slot in self._instance.slots[: ready[-1].number + 1]:
            sequence = slot.sequence
            if sequence is None or not sequence.waiting or not self._fits(first, sequence.waiting[0]):
                batch.append((self._preparer.null(first, state), None))
                continue
            request = sequence.waiting.popleft()
            slot.begin(request, sequence)
            batch.append((request, sequence))
        return batch, 0

    def _due(self, ready: list[Slot]) -> int:
        """Return when a batch of these rows runs (ns); 0 for at once."""
        policy = self._policy
        is_utilized = len(ready) / max(policy.max_batch_size, 1) >= policy.minimum_utilization
        if not policy.max_delay or not policy.minimum_utilization or is_utilized:
            return 0
        return min(_head(slot).times.queued for slot in ready) + policy.max_delay

    def _fits(self, first: InferRequest, other: InferRequest) -> bool:
        return not self._compares or same_shapes(self._signature, first, other)


def _head(slot: Slot) -> InferRequest:
    assert slot.sequence is not None
    return slot.sequence.waiting[0]


class OldestFirst:
    """Forms the batches of one instance from at most one request per sequence, oldest first."""

    def __init__(self, policy: SequencePolicy, signature: ModelSignature) -> None:
        self._queue = RequestQueue()
        self._batcher = DynamicBatcher(
            self._queue, signature, preferred=policy.preferred, max_delay_us=policy.max_delay // NS_PER_US
        )
        self._order = InOrder() if policy.preserve_ordering else None
        self._slots: dict[int, Slot] = {}

    def issue(self, slot: Slot, now: int) -> None:
        """Queue the next request of a slot's sequence for a batch, unless another request is in flight."""
        sequence = slot.sequence
        if slot.in_flight is not None or sequence is None or not sequence.waiting:
            return
        request = sequence.waiting.popleft()
        slot.begin(request, sequence)
        self._slots[request.serial] = slot
        queued, on_cancel = request.times.queued, request.on_cancel
        self._queue.add(request, now)
        request.times.queued, request.on_cancel = queued, on_cancel
        if self._order is not None and sequence.repeated is not request:
            self._order.admit(request)

    def withdraw(self, request: InferRequest) -> None:
        """Withdraw a request that waits for a batch."""
        self._queue.remove([request])
        del self._slots[request.serial]

    def take(self, now: int) -> tuple[list[tuple[InferRequest, LiveSequence | None]], int]:
        """Return the requests to run now and when to call this again (ns, 0 for after the next change)."""
        decision = self._batcher.take(now)
        return [(request, self._slots.pop(request.serial).owner) for request in decision.batch], decision.wake_at


class SequenceScheduler(Scheduler):
    """The sequences of a model, the slots of its instances, and the backlog."""

    stateful = True

    def __init__(
        self, policy: SequencePolicy, signature: ModelSignature, controls: ControlInputs, states: StateKeeper
    ) -> None:
        self.policy = policy
        self.iterative = policy.iterative
        self._signature = signature
        self._controls = controls
        self._states = states
        self._preparer = RequestPreparer(controls, states)
        #: The live sequences and their waiting requests.
        self.roster = SequenceRoster(policy.max_idle)
        self._rows: dict[str, DirectRows | OldestFirst] = {}
        self._instances: dict[str, InstanceSlots] = {}
        self._order = count()
        self._ids = count(1)
        self._held = bool(policy.hold or policy.hold_backlog)
        #: Heap of slots without a sequence, lowest row and first instance first; may contain slots in use again.
        self._free: list[tuple[int, int, Slot]] = []
        #: Slots whose sequence was cut short by a cancellation; the next ``take`` continues them.
        self._cut_short: list[Slot] = []

    @property
    def queue(self) -> SequenceScheduler:  # type: ignore[override]
        """The queue of waiting requests, which is this scheduler itself."""
        return self

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self.roster.waiting)

    @property
    def live(self) -> int:
        return len(self.roster.backlog) + len(self.roster.settled)

    # Instances.

    def continues(self, request: InferRequest) -> bool:
        return not request.flags & SEQUENCE_START

    def add_instance(self, key: str, now: int) -> None:
        instance = InstanceSlots(key, self.policy.slots, next(self._order))
        self._instances[key] = instance
        self._rows[key] = (
            OldestFirst(self.policy, self._signature)
            if self.policy.oldest
            else DirectRows(instance, self.policy, self._signature, self._preparer)
        )
        for slot in instance.slots:
            self._offer(slot, now)

    def retire(self, key: str) -> bool:
        self._instances[key].accepting = False
        return self._instances[key].vacant

    def lose(self, key: str, error: ConchError, now: int) -> None:
        instance = self._instances.pop(key, None)
        if instance is None:
            return
        instance.accepting = False
        doomed: list[tuple[InferRequest, ConchError]] = []
        for slot in instance.slots:
            running = None if self._waits(slot) else slot.owner  # its running request reports the error
            withdrawn = self._withdraw(slot)
            owner = slot.owner
            slot.finish()
            for sequence in dict.fromkeys((owner, slot.sequence)):
                if sequence is None:
                    continue
                ended = internal(f"sequence {sequence.id} of model '{self.policy.model}' has ended: {error.message}")
                lost = [*(withdrawn if sequence is owner else ()), *sequence.waiting]
                if not lost and not sequence.closed and sequence is not running:
                    self.roster.lose(sequence, ended, now)
                doomed += [(request, ended) for request in lost]
                self.roster.forget(sequence)
        del self._rows[key]
        for request, reason in doomed:
            request.fail(ConchError(reason.message, reason.code))

    # Requests.

    def note_replaced(self) -> None:
        """Release the slots of idle sequences sooner, because another version now receives requests."""
        self.roster.note_replaced()

    def add(self, request: InferRequest, now: int) -> None:
        """Enqueue a request of a sequence.

        Raises INVALID_ARG if the request does not belong to a sequence, UNAVAILABLE if too many requests wait, and
        INTERNAL if the sequence has ended with its instance.
        """
        self._check(request)
        self.expire(now)
        starts, ends = request.flags & SEQUENCE_START, request.flags & SEQUENCE_END
        sequence = self.roster.find(request.correlation_id)
        loss = self.roster.loss(request.correlation_id, now)
        if sequence is None and not starts:
            raise loss or invalid(
                f"inference request for sequence {request.correlation_id} to model '{self.policy.model}' must specify "
                "the START flag on the first request of the sequence"
            )
        if self.policy.limit and len(self) >= self.policy.limit:
            raise request.error(QUEUE_FULL, Code.UNAVAILABLE)
        if sequence is None:
            sequence = self._begin_sequence(request, now)
        elif starts:
            LOG.warning(
                "sequence %s for model '%s' has a conflict. The previous sequence did not end before this sequence "
                "start. Previous sequence will be terminated early.",
                request.correlation_id,
                self.policy.model,
            )
        self._append(sequence, request, now)
        if ends:
            self.roster.close(sequence)
        if sequence.slot is not None:
            self._advance(sequence.slot, now)

    def eager(self, free: Collection[str]) -> list[str]:
        return [key for key in free if self._instances[key].eager]

    def take(self, now: int) -> BatchDecision:
        """Return the next batch for any idle instance."""
        return self.assign(self._instances, now)

    def assign(self, free: Collection[str], now: int) -> BatchDecision:
        self.expire(now)
        while self._cut_short:
            slot = self._cut_short.pop()
            if self._instances.get(slot.instance.key) is slot.instance:
                self._advance(slot, now)
        wake = self.roster.next_deadline()
        if self._held and self._holds():
            return BatchDecision([], wake)
        for instance in self._instances.values():
            if instance.busy or instance.key not in free:
                continue
            rows, at = self._rows[instance.key].take(now)
            if rows:
                return self._run(instance, rows, now)
            wake = min(wake, at) if wake and at else wake or at
        return BatchDecision([], wake)

    def done(self, key: str, now: int, again: Collection[InferRequest] = ()) -> None:
        """Record the end of a batch; in an iterative model, a request that does not run again ends its sequence."""
        instance = self._instances.get(key)
        if instance is None:
            return
        instance.busy = False
        repeated = {request.serial for request in again if not request.finished}
        for slot in instance.slots:
            request, owner = slot.in_flight, slot.owner
            if request is None or owner is None or self._waits(slot):
                continue
            slot.finish()
            if self.policy.iterative:
                self._iterate(owner, request, request.serial in repeated, now)
            self.roster.touch(owner, now)
            self._advance(slot, now)

    def expire(self, now: int) -> None:
        """End sequences that have been idle for too long, and refuse those that have waited too long for a slot."""
        late = self.roster.late(now)
        for sequence in self.roster.idle(now):
            self._vacate(sequence, now)
        for request in late:
            request.fail(unavailable(EXPIRED))

    def drain(self) -> list[InferRequest]:
        """End all sequences; remove and return their waiting requests."""

        def withdraw(sequence: LiveSequence) -> list[InferRequest]:
            slot = sequence.slot
            if slot is None:
                return []
            requests = self._withdraw(slot) if slot.owner is sequence else []
            if requests:
                slot.finish()
            if slot.sequence is sequence:
                slot.sequence = None
                heapq.heappush(self._free, (slot.number, slot.instance.order, slot))
            return requests

        return self.roster.forget_all(withdraw)

    # From arrival to execution.

    def _check(self, request: InferRequest) -> None:
        model = self.policy.model
        if request.batch_size > 1:
            raise invalid(
                f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence "
                "batcher"
            )
        if not request.correlation_id:
            if not self.policy.iterative:
                raise invalid(
                    f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
                )
            request.correlation_id = next(self._ids)
            request.flags = SEQUENCE_START
        self._controls.check(model, request)

    def _begin_sequence(self, request: InferRequest, now: int) -> LiveSequence:
        """Create a sequence, in a free slot or in the backlog."""
        sequence = LiveSequence(request.correlation_id, self._states.first)
        self.roster.open(sequence)
        slot = self._free_slot()
        if slot is not None:
            self._settle(sequence, slot, now)
        return sequence

    def _append(self, sequence: LiveSequence, request: InferRequest, now: int) -> None:
        request.on_cancel = self._cancelled
        self.roster.append(sequence, request, now)

    def _run(
        self, instance: InstanceSlots, rows: Iterable[tuple[InferRequest, LiveSequence | None]], now: int
    ) -> BatchDecision:
        instance.busy = True
        batch = []
        for request, sequence in rows:
            batch.append(request)
            if sequence is None:
                continue
            del self.roster.waiting[request.serial]
            request.on_cancel = None
            self._preparer.prepare(request, sequence)
            self._leave_if_over(sequence, now)
        return BatchDecision(batch, 0, instance.key)

    def _advance(self, slot: Slot, now: int) -> None:
        """Issue the next request of a slot, and give the slot to another sequence if its own is over."""
        self._rows[slot.instance.key].issue(slot, now)
        if slot.sequence is not None:
            self._leave_if_over(slot.sequence, now)

    def _leave_if_over(self, sequence: LiveSequence, now: int) -> None:
        if sequence.closed and not sequence.waiting:
            self.roster.forget(sequence)
            self._vacate(sequence, now)

    def _vacate(self, sequence: LiveSequence, now: int) -> None:
        """Release the slot of a sequence that is over."""
        slot = sequence.slot
        if slot is not None and slot.sequence is sequence:
            slot.sequence = None
            self._offer(slot, now)

    def _offer(self, slot: Slot, now: int) -> None:
        """Give a slot to the first sequence of the backlog; without a backlog it becomes free."""
        if not slot.instance.accepting:
            return
        sequence = next(iter(self.roster.backlog), None)
        if sequence is None:
            heapq.heappush(self._free, (slot.number, slot.instance.order, slot))
        else:
            self._settle(sequence, slot, now)
            self._advance(slot, now)

    def _settle(self, sequence: LiveSequence, slot: Slot, now: int) -> None:
        slot.sequence, sequence.slot = sequence, slot
        self.roster.settle(sequence, now)

    def _free_slot(self) -> Slot | None:
        while self._free:
            slot = heapq.heappop(self._free)[-1]
            if slot.sequence is None and slot.instance.accepting:
                return slot
        return None

    # Ends of sequences.

    def _cancelled(self, request: InferRequest) -> None:
        """Fail a request that was cancelled while it waited, and the requests after it in its sequence."""
        sequence = self.roster.waiting[request.serial]
        slot = sequence.slot
        doomed = list(sequence.waiting)
        if slot is not None and slot.in_flight is request:
            doomed = self._withdraw(slot) + doomed
            slot.finish()
        elif slot is not None:
            doomed = doomed[doomed.index(request) :]
        self.roster.cut(sequence, doomed)
        if slot is not None:
            self._cut_short.append(slot)
        for queued in doomed:
            queued.fail(cancelled())
        self.on_cancelled()

    def _waits(self, slot: Slot) -> bool:
        """Whether the in-flight request of a slot still waits for a batch."""
        return slot.in_flight is not None and slot.in_flight.serial in self.roster.waiting

    def _withdraw(self, slot: Slot) -> list[InferRequest]:
        """Take back and return the request of a slot that waits for a batch, if any."""
        request = slot.in_flight
        if request is None or not self._waits(slot):
            return []
        self._rows[slot.instance.key].withdraw(request)
        del self.roster.waiting[request.serial]
        request.on_cancel = None
        return [request]

    def _iterate(self, sequence: LiveSequence, request: InferRequest, again: bool, now: int) -> None:
        """Run a request of an iterative model again, or end its sequence."""
        if again and not sequence.closed and not request.cancelled:
            request.flags = 0
            sequence.repeated = request
            self._append(sequence, request, now)
        elif again and sequence.closed:
            request.fail(cancelled())
        elif again or not request.flags & SEQUENCE_END:
            doomed = [request, *sequence.waiting] if again else list(sequence.waiting)
            self.roster.cut(sequence, doomed)
            for queued in doomed:
                queued.fail(cancelled())

    def _holds(self) -> bool:
        """Whether too few requests have arrived for any to run."""
        backlog = sum(len(sequence.waiting) for sequence in self.roster.backlog)
        self._held = len(self) - backlog < self.policy.hold or backlog < self.policy.hold_backlog
        return self._held
