"""A service over an engine without a network, whose channel keeps the frames."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from typing import Any, Self

from conch.backends.base.arrays import Request, Result
from conch.backends.generation.generation_backend import IoFormat
from conch.backends.generation.service import GenerationService, RequestState
from conch.core.errors import ConchError
from conch.workers.child.packing import Packer
from tests.unit.backends.generation.fake_engine import FakeEngine


class RunningService:
    """Requests get serial numbers from 1; ``shown`` makes outputs of a result as tests see them."""

    def __init__(
        self,
        engine: FakeEngine,
        io_format: IoFormat,
        shown: Callable[[Result], Any],
        *,
        reserve: bool = False,
        compile_seconds: float = 30,
    ) -> None:
        self.engine = engine
        self._io_format = io_format
        self._shown = shown
        self.service = GenerationService(
            engine,
            self,  # type: ignore[arg-type]
            self._pack,
            reserve=reserve,
            compile_seconds=compile_seconds,
        )
        self._frames: Queue[dict[str, Any]] = Queue()
        self.started = False
        self.asked = 0
        #: Responses by serial number, the serial numbers of requests in the order of their ends, and the statistics.
        self.answers: dict[int, list[dict[str, Any]]] = {}
        self.done: list[int] = []
        self.loads: list[dict[str, Any]] = []
        self.logged: list[str] = []

    def send(self, header: dict[str, Any], packer: Packer | None = None) -> None:
        self._frames.put(header)

    def submit(self, request: Request, **state: Any) -> int:
        self.asked += 1
        request.serial = self.asked
        builder = self._io_format.response_builder(request)
        self.service.submit(RequestState(request, self.asked, builder, arrived=1, **state))
        return self.asked

    def run(self) -> Self:
        """Run until everything has been answered."""
        self.start()
        return self.finish()

    def start(self) -> None:
        self.started = True
        self.service.start()

    def finish(self) -> Self:
        while len(self.done) < self.asked:
            self.take()
        return self

    def take(self) -> None:
        frame = self._frames.get(timeout=60)
        if frame["op"] == "log":
            self.logged.append(frame["message"])
            return
        for response in frame["responses"]:
            self.answers.setdefault(response["serial"], []).append(response)
        self.done += [batch for batch, _ in frame["done"]]
        self.loads.append(frame["load"])

    def outputs(self, serial: int = 1) -> list[Any]:
        answers = self.answers[serial]
        assert [answer["final"] for answer in answers] == [False] * (len(answers) - 1) + [True]
        return [answer["outputs"] for answer in answers]

    def _pack(self, request: Request, result: Result | ConchError, packer: Packer) -> dict[str, Any]:
        try:
            if isinstance(result, ConchError):
                raise result
            return {"error": None, "outputs": self._shown(result)}
        except ConchError as error:
            return {"error": error, "outputs": {}}
