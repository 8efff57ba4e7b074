"""Workers, instances and requests that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from conch.core.errors import ConchError, internal, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import StoredData, WireTensor
from conch.workers.host.bls import ModelCalls
from conch.workers.host.execution import Execution
from conch.workers.host.liveness import DEFAULT_WORKER_TIMEOUTS, Kill, Verdict, worker_end


class FakeWorker:
    """A worker without a process; the test finishes its batches and ends it."""

    def __init__(self, name: str = "m_0") -> None:
        self.name = name
        self.pid = 1
        self.shared_bytes = 0
        self.slots = 0
        self.runtime_facts: dict[str, str] = {}
        self.adapters: dict[str, str] = {}
        self.end = worker_end(-9, None)
        self.alive = True
        self.stopped = False
        self.verdict = Verdict()
        self.calls = ModelCalls(lambda header, packer: None)
        self.timeouts = DEFAULT_WORKER_TIMEOUTS
        self.on_exit: Callable[[FakeWorker], None] | None = None
        self.on_response_sent: Callable[[InferRequest, InferResponse], None] | None = None
        self.batches: list[Execution] = []

    def register_adapter(self, name: str, path: str) -> None:
        self.adapters[name] = path

    async def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        if not self.alive:
            raise internal(f"Stub process '{self.name}' is not healthy.")
        del self.adapters[name]

    def execute(self, requests: Sequence[InferRequest], on_done: Callable[[Execution], None]) -> None:
        for request in requests:
            request.times.started = 1
        self.batches.append(Execution(requests, on_done))

    def finish_batch(self) -> None:
        execution = self.batches.pop(0)
        execution.times = (1, 2, 3)
        execution.on_done(execution)
        for request in execution.requests:
            if request in execution.unfinished:
                continue
            request.responded = True
            request.respond(InferResponse([WireTensor("y", "FP32", (1,), b"abcd")]))

    @property
    def idle(self) -> bool:
        return not self.batches

    def kill_for(self, kill: Kill) -> None:
        self.die()

    def die(self) -> None:
        self.alive = False
        error = internal(f"Stub process '{self.name}' is not healthy.")
        for execution in self.batches:
            execution.error = error
            execution.on_done(execution)
            for request in execution.requests:
                request.fail(error)
        self.batches.clear()
        if self.on_exit:
            self.on_exit(self)

    async def finish(self) -> None:
        while self.batches:
            await asyncio.sleep(0)

    async def stop(self, seconds: float) -> None:
        self.stopped = True
        self.alive = False


class UncopiedData(StoredData):
    """An input of ``size`` bytes in shared memory, of which the server can hold no copy."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def hold(self) -> None:
        raise unavailable("the server holds too many bytes")


class Answers:
    """Collects what a request got."""

    def __init__(self) -> None:
        self.responses: list[InferResponse] = []

    def __call__(self, response: InferResponse) -> None:
        self.responses.append(response)

    @property
    def error(self) -> ConchError | None:
        return self.responses[-1].error if self.responses else None

    @property
    def finals(self) -> int:
        return sum(response.final for response in self.responses)


def make_request(answers: Answers | None = None, **fields: object) -> InferRequest:
    return InferRequest("m", {}, answers or Answers(), **fields)  # type: ignore[arg-type]
