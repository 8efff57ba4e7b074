"""The clients of a simulated server: in its process, over HTTP, and over gRPC with single calls and streams.

Some clients are threads that use conch's library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from conch.client.client import Client
from conch.core.errors import ConchError
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse
from conch.core.tensors import WireTensor
from conch.library.server import Server
from conch.server.core import InferenceServer
from conch.server.models.on_demand import LoadNeeded
from tests.simulation.connection import OnResponse
from tests.simulation.grpc_client import SimulatedGrpcClient
from tests.simulation.http_client import SimulatedHttpClient
from tests.simulation.library import LibraryCaller
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import SimulatedNetwork
from tests.simulation.programs import PLATFORMS
from tests.simulation.promises import Outcome, Promises
from tests.simulation.shared_memory import ClientMemory
from tests.simulation.sockets import BlockingSockets

#: Requests with the same value below this are identical in every byte, like equal requests of several clients.
REPEATED = 1000


class Clients:
    """Sends requests; a connection is opened by its first request, and opened again after it was closed."""

    def __init__(
        self,
        loop: SimulatedLoop,
        network: SimulatedNetwork,
        server: InferenceServer,
        addresses: Mapping[str, tuple[str, int]],
        promises: Promises,
        specs: Mapping[str, Any],
        memory: ClientMemory,
        sockets: BlockingSockets,
    ) -> None:
        self._loop = loop
        self._network = network
        self._server = server
        self._addresses = addresses
        self._promises = promises
        self._specs = specs
        self._memory = memory
        self._sockets = sockets
        self._http: dict[tuple[str, int], SimulatedHttpClient] = {}
        self._grpc: dict[int, SimulatedGrpcClient] = {}
        self._library: dict[tuple[str, int], LibraryCaller] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    def send(self, outcome: Outcome, on_response: OnResponse) -> None:
        """Send a request as its arguments specify; ``on_response`` gets every response."""
        arguments = outcome.arguments
        via = arguments.get("via", "core")
        if via in ("http", *PLATFORMS) and via in self._addresses:
            self._send_http(via, outcome, on_response)
        elif via in ("grpc", "stream") and "grpc" in self._addresses:
            client = self._grpc_client(arguments["client"])
            request = self._request(outcome, on_response, named=via == "stream" or arguments["value"] >= REPEATED)
            outcome.client = client
            deadline = arguments.get("deadline", 0)
            client.infer(request, outcome.id, on_response, streamed=via == "stream", milliseconds=deadline)
        elif via in ("library", "client") and (via == "library" or "http" in self._addresses):
            outcome.client = caller = self._library_caller(via, arguments["client"])
            shape = (1, 3) if self._batched(arguments) else (3,)
            caller.infer(arguments, outcome.id if arguments["value"] >= REPEATED else "", shape, on_response)
        else:
            self._submit(outcome, on_response)

    def cancel(self, outcome: Outcome) -> bool:
        """Cancel a request if its protocol supports it; returns whether no response is expected any more."""
        if outcome.give_up is not None:
            outcome.give_up()
            outcome.give_up = None
            return True
        if isinstance(outcome.client, SimulatedGrpcClient):
            return outcome.client.cancel(outcome.id)
        if outcome.request is not None:
            self._promises.cancelled(outcome)
            outcome.request.cancel()
        return False

    def hang_up(self, via: str, number: int) -> object:
        """Close a client's connection at once; returns the client."""
        client = self._grpc.pop(number, None) if via == "grpc" else self._http.pop((via, number), None)
        if client is not None:
            client.hang_up()
        return client

    def break_off(self) -> None:
        """Break all connections of threads."""
        for caller in self._library.values():
            caller.disturbed = True
        for connection in self._sockets.opened:
            connection.break_off()
        self._sockets.opened.clear()

    def end_stream(self, number: int) -> None:
        """End a client's side of its stream."""
        client = self._grpc.get(number)
        if client is not None and not client.lost:
            client.end_stream()

    def close(self) -> None:
        """Close all connections."""
        for client in (*self._http.values(), *self._grpc.values()):
            client.hang_up()
        for caller in self._library.values():
            caller.close()
        for task in self._connecting:
            task.cancel()

    # Over the network

    def _send_http(self, via: str, outcome: Outcome, on_response: OnResponse) -> None:
        arguments = outcome.arguments
        client = self._http.get((via, arguments["client"]))
        if client is None or client.lost:
            compressed = arguments["client"] == 3 and "binary" in arguments
            client = SimulatedHttpClient(self._promises.broken, via, compressed=compressed)
            self._http[via, arguments["client"]] = client
            self._connect(client, via)
        options: dict[str, Any] = {}
        if "correlation" in arguments:
            options["sequence_id"] = arguments["correlation"]
            options["sequence_start"], options["sequence_end"] = arguments["start"], arguments["end"]
        outcome.client = client
        name = outcome.id if arguments["value"] >= REPEATED else ""
        batched, region, binary = self._batched(arguments), arguments.get("region", ""), arguments.get("binary", "")
        client.infer(
            arguments["model"], name, _values(arguments), batched, options, on_response, self._memory, region, binary
        )

    def _grpc_client(self, number: int) -> SimulatedGrpcClient:
        client = self._grpc.get(number)
        if client is None or client.lost:
            client = self._grpc[number] = SimulatedGrpcClient(self._promises.broken)
            self._connect(client, "grpc")
        return client

    def _connect(self, client: SimulatedHttpClient | SimulatedGrpcClient, kind: str) -> None:
        async def connect() -> None:
            try:
                await self._network.connect(lambda: client, *self._addresses[kind])
            except OSError:
                client.refused()

        task = asyncio.get_running_loop().create_task(connect())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    # In the process

    def _library_caller(self, via: str, number: int) -> LibraryCaller:
        if (via, number) not in self._library:
            service: Server | Client = Server(model_repository="models")
            if via == "client":
                service = Client("http://{}:{}".format(*self._addresses["http"]))
            self._library[via, number] = LibraryCaller(self._loop, service, self._promises.broken)
        return self._library[via, number]

    def _submit(self, outcome: Outcome, on_response: OnResponse) -> None:
        outcome.give_up = None
        try:
            model = self._server.model(outcome.arguments["model"])
            outcome.request = request = self._request(outcome, on_response)
            model.infer(request)
        except LoadNeeded as needed:
            outcome.give_up = needed.then(partial(self._resume, outcome, on_response))
        except ConchError as error:
            on_response(InferResponse(error=error))

    def _resume(self, outcome: Outcome, on_response: OnResponse, load_error: ConchError | None) -> None:
        if load_error is None:
            self._submit(outcome, on_response)
        else:
            on_response(InferResponse(error=load_error))

    def _request(self, outcome: Outcome, on_response: OnResponse, *, named: bool = True) -> InferRequest:
        arguments = outcome.arguments
        data = b"".join(value.to_bytes(8, "little") for value in _values(arguments))
        shape = (1, 3) if self._batched(arguments) else (3,)
        flags = SEQUENCE_START * bool(arguments.get("start")) | SEQUENCE_END * bool(arguments.get("end"))
        return InferRequest(
            arguments["model"],
            {"IN": WireTensor("IN", "INT64", shape, data)},
            on_response,
            id=outcome.id if named else "",
            correlation_id=arguments.get("correlation", 0),
            flags=flags,
            timeout=arguments["timeout"],
        )

    def _batched(self, arguments: Mapping[str, Any]) -> bool:
        return bool(self._specs[arguments["model"]].get("batch"))


def _values(arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    return arguments["value"], arguments["milliseconds"], arguments["count"]
