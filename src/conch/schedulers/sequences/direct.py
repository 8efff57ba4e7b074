"""The direct strategy: each sequence keeps its row of the batch, and rows without a request are filled up."""

from __future__ import annotations

from conch.inference import InferRequest, ModelSignature
from conch.schedulers.sequences.policy import SequencePolicy
from conch.schedulers.sequences.slots import InstanceSlots, LiveSequence, RequestPreparer, Slot, same_shapes


class DirectRows:
    """Forms the batches of one instance.

    A batch waits until enough rows have a request, or the oldest of them has waited ``policy.max_delay``.
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
        """Requests stay with their sequence until a batch takes them."""

    def withdraw(self, request: InferRequest) -> None:
        """Nothing has been issued that could be withdrawn."""

    def take(self, now: int) -> tuple[list[tuple[InferRequest, LiveSequence | None]], int]:
        """The requests to run now, by row, and when to ask again (ns, 0 for after the next change)."""
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
        """When a batch of these rows runs (ns); 0 for at once."""
        policy = self._policy
        enough = len(ready) / max(policy.max_batch_size, 1) >= policy.minimum_utilization
        if not policy.max_delay or not policy.minimum_utilization or enough:
            return 0
        return min(_head(slot).times.queued for slot in ready) + policy.max_delay

    def _fits(self, first: InferRequest, other: InferRequest) -> bool:
        return not self._compares or same_shapes(self._signature, first, other)


def _head(slot: Slot) -> InferRequest:
    assert slot.sequence is not None
    return slot.sequence.waiting[0]
