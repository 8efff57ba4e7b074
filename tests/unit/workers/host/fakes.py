"""A worker process that is none: the test holds the other end of its channel, and ends it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import WireTensor
from conch.workers.child.channel import Endpoint, Header, write
from conch.workers.child.packing import Packer
from conch.workers.host.process import WorkerProcess


class FakeChild:
    """The process as the server sees it, and its end of the channel."""

    pid = 4711

    def __init__(self) -> None:
        self.exit_status: int | None = None
        self.kills = 0
        self.endpoint = Endpoint()
        self.connection: socket.socket
        self._frames: list[Header] = []

    def spawn(
        self, python: str, environment: Mapping[str, str], on_exit: Callable[[], None], on_line: Callable[[str], None]
    ) -> tuple[FakeChild, socket.socket]:
        ours, self.connection = socket.socketpair()
        self.connection.setblocking(False)
        self.on_exit = on_exit
        self.print = on_line
        return self, ours

    def kill(self) -> None:
        self.kills += 1
        self.exit(-9)

    def exit(self, status: int) -> None:
        if self.exit_status is None:
            self.exit_status = status
            self.on_exit()

    def send(self, header: Header, *outputs: WireTensor) -> None:
        packer = Packer()
        if outputs:
            header["outputs"] = packer.pack(outputs)
        assert not write(self.connection, self.endpoint.encode(header, packer))

    def received(self) -> list[Header]:
        """The headers of the frames that have come since the last call."""
        headers = []
        while True:
            try:
                headers += [header for header, _ in self.endpoint.receive(self.connection)]
            except BlockingIOError:
                return headers

    def done(self, batch: int, *responses: Header | None) -> None:
        """``execute`` has returned: with a response for each request, or None for one that is answered later."""
        self.send({"op": "done", "batch": batch, "times": [1, 2, 3], "responses": list(responses)})

    def respond(self, request: InferRequest, final: bool = True) -> None:
        response = {"op": "response", "serial": request.serial, "parameters": {}, "final": final}
        self.send(response, WireTensor("y", "FP32", (1,), b"abcd"))

    def close(self) -> None:
        self.endpoint.close()
        self.connection.close()


EMPTY: dict[str, Any] = {"outputs": [], "parameters": {}}


def make_process(**attributes: Any) -> tuple[WorkerProcess, FakeChild]:
    """A started worker process, whose ``init`` frame has been taken from the channel."""
    child = FakeChild()
    process = WorkerProcess("m_0", child.spawn)
    process.start({}, python="python", environment={})
    assert [header["op"] for header in child.received()] == ["init"]
    for name, value in attributes.items():
        setattr(process, name, value)
    return process, child


class Client:
    """Sends requests and counts what comes of them."""

    def __init__(self, inputs: Mapping[str, WireTensor] | None = None) -> None:
        self.responses: list[InferResponse] = []
        self.request = InferRequest("m", dict(inputs or {}), self.responses.append)

    @property
    def finals(self) -> int:
        return sum(response.final for response in self.responses)

    @property
    def errors(self) -> list[str]:
        return [response.error.message for response in self.responses if response.error is not None]
