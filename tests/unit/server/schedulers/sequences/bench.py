"""A sequence scheduler with a clock and instances that do what a test says."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from google.protobuf import text_format

from conch.config.schema import ModelConfig, SequenceBatching
from conch.core.errors import ConchError, internal
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor
from conch.server.schedulers.sequences.inputs import ControlInputs, StateKeeper, StateTensor
from conch.server.schedulers.sequences.scheduler import NullRequest, SequencePolicy, SequenceScheduler

US = 1000
SECOND = 10**9
CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
"""
POLICY = SequencePolicy("m", max_batch_size=2, slots=2, max_idle=SECOND)
OLDEST = replace(POLICY, oldest=True)


def batching(text: str) -> SequenceBatching:
    return text_format.Parse("sequence_batching {" + text + "}", ModelConfig()).sequence_batching


class Bench:
    """``answers`` has what each request got, by its id; ``running`` what each instance was given and has not done."""

    def __init__(
        self,
        policy: SequencePolicy = POLICY,
        instances: int = 1,
        states: tuple[StateTensor, ...] = (),
        dims: tuple[int, ...] = (1,),
        controls: str = CONTROLS,
    ) -> None:
        self.now = 0
        inputs = {"x": TensorSpec("x", "INT32", dims)}
        signature = ModelSignature("m", 1, policy.max_batch_size, inputs, {})
        made = ControlInputs(batching(controls), batched=policy.max_batch_size > 0)
        self.scheduler = SequenceScheduler(policy, signature, made, StateKeeper(states))
        self.instances = [f"i{number}" for number in range(instances)]
        for key in self.instances:
            self.scheduler.add_instance(key, self.now)
        self.answers: dict[str, InferResponse] = {}
        self.running: dict[str, list[InferRequest]] = {}
        self.open: dict[str, InferRequest] = {}

    def request(self, id: str, sequence: int | str, flags: int = 0, shape: tuple[int, ...] = (1, 1), timeout: int = 0):
        def answered(response: InferResponse) -> None:
            assert id not in self.answers
            self.answers[id] = response
            del self.open[id]

        tensor = WireTensor("x", "INT32", shape, bytes(4 * shape[-1]))
        return InferRequest(
            "m", {"x": tensor}, answered, id=id, correlation_id=sequence, flags=flags, timeout=timeout
        )  # fmt: skip

    def add(self, id: str, sequence: int | str, marks: str = "", **fields: object) -> InferRequest:
        """Send a request; ``marks`` has ``s`` for one that starts its sequence and ``e`` for one that ends it."""
        flags = SEQUENCE_START * ("s" in marks) | SEQUENCE_END * ("e" in marks)
        request = self.request(id, sequence, flags, **fields)  # type: ignore[arg-type]
        self.open[id] = request
        try:
            self.scheduler.add(request, self.now)
        except ConchError:
            del self.open[id]
            raise
        return request

    def run(self) -> dict[str, list[str]]:
        """Give the instances what they can run; the ids of it, with ``-`` for rows without a request."""
        given = {}
        while (taken := self.scheduler.take(self.now)).batch:
            assert taken.instance not in self.running
            self.running[taken.instance] = taken.batch
            given[taken.instance] = ["-" if isinstance(one, NullRequest) else one.id for one in taken.batch]
        self.wake_at = taken.wake_at
        return given

    def batch(self) -> list[str]:
        """The ids of the only batch that runs now; nothing where none does."""
        return next(iter(self.run().values()), [])

    def finish(
        self, key: str = "i0", outputs: tuple[WireTensor, ...] = (), again: Collection[InferRequest] = ()
    ) -> None:
        """The instance has done its batch: all of it is answered but what comes again."""
        batch = self.running.pop(key)
        self.scheduler.done(key, self.now, again)
        for request in batch:
            if request not in again:
                request.respond(InferResponse(outputs))

    def turn(self) -> list[str]:
        """Run a batch to its end."""
        ids = self.batch()
        for key in list(self.running):
            self.finish(key)
        return ids

    def die(self, key: str = "i0") -> None:
        error = internal(f"Stub process '{key}' is not healthy.")
        for request in self.running.pop(key, []):
            request.fail(error)
        self.scheduler.lose(key, error, self.now)

    def error(self, id: str) -> str:
        error = self.answers[id].error
        return "" if error is None else error.status

    def wait(self, ns: int) -> None:
        self.now += ns
