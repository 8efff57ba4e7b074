"""The oldest strategy: the next request of each sequence waits for the dynamic batcher of its instance."""

from __future__ import annotations

from conch.inference import InferRequest, ModelSignature
from conch.schedulers.batching import DynamicBatcher
from conch.schedulers.ordering import InOrder
from conch.schedulers.queue import NS_PER_US, RequestQueue
from conch.schedulers.sequences.policy import SequencePolicy
from conch.schedulers.sequences.slots import InstanceSlots, LiveSequence, Slot


class OldestFirst:
    """Forms the batches of one instance from at most one request of each sequence, the oldest first."""

    def __init__(self, instance: InstanceSlots, policy: SequencePolicy, signature: ModelSignature) -> None:
        self._instance = instance
        self._queue = RequestQueue()
        self._batcher = DynamicBatcher(
            self._queue, signature, preferred=policy.preferred, max_delay_us=policy.max_delay // NS_PER_US
        )
        self._order = InOrder() if policy.preserve_ordering else None
        self._slots: dict[int, Slot] = {}

    def issue(self, slot: Slot, now: int) -> None:
        """Let the next request of a slot's sequence wait for a batch, unless another is under way."""
        sequence = slot.sequence
        if slot.under_way is not None or sequence is None or not sequence.waiting:
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
        """Take back a request that waits for a batch."""
        self._queue.remove([request])
        del self._slots[request.serial]

    def take(self, now: int) -> tuple[list[tuple[InferRequest, LiveSequence | None]], int]:
        """The requests to run now and when to ask again (ns, 0 for after the next change)."""
        decision = self._batcher.take(now)
        return [(request, self._slots.pop(request.serial).owner) for request in decision.batch], decision.wake_at
