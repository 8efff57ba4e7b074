"""The server's guarantees, checked while a program runs and at its end."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conch.client.transport import UnreachableError
from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest, InferResponse
from conch.server.core import InferenceServer
from conch.server.models.on_demand import LoadNeeded
from tests.simulation.connection import CONNECTION_LOST
from tests.simulation.models import SimulatedRepository

_OUTPUT = struct.Struct("<3q")


@dataclass
class Outcome:
    """A request of the program and its result."""

    id: str
    arguments: dict[str, Any]
    origin: str
    #: The models that must be loaded for it.
    models: set[str]
    #: The oldest stamp that a response may have: that of the last load completed before the request was sent.
    oldest: int
    kind: str
    request: InferRequest | None = None
    give_up: Callable[[], None] | None = None
    #: The client whose connection carries it; None in the server process.
    client: object = None
    #: Whether its shared memory region stays registered until the end of the program.
    registered: bool = False
    responses: list[tuple[int, int, int]] = field(default_factory=list)
    error: ConchError | None = None
    finals: int = 0
    cancelled: bool = False
    cancelled_waiting: bool = False
    given_up: bool = False
    executed: bool = False
    #: Whether it ended while the server was stopping and closing connections.
    during_stop: bool = False
    #: Whether its response waits for the responses to earlier requests.
    ordered: bool = False


class Promises:
    """Tracks every request; ``violations`` describes the broken promises."""

    def __init__(self, repository: SimulatedRepository) -> None:
        self.violations: list[str] = []
        self.outcomes: list[Outcome] = []
        #: Whether the server is stopping.
        self.stopping = False
        #: The models that no step of the program replaces or unloads.
        self.stable: frozenset[str] = frozenset()
        #: Whether any number of models may be loaded and all loads are quick, so that every request can run.
        self.unlimited = False
        #: Whether the limit of bytes in flight is low enough that bodies are refused, which closes connections.
        self.refuses_bodies = False
        #: The models with files that cannot be read in time.
        self.hung: set[str] = set()
        self._repository = repository
        self._loaded: dict[str, int] = {}
        self._by_id: dict[str, Outcome] = {}
        self._sequences: dict[tuple[str, object], list[Outcome]] = {}

    def broken(self, what: str) -> None:
        self.violations.append(what)

    # Loads

    def newest(self, model: str) -> int:
        """Return the current stamp of a model's files."""
        return self._repository.stamps[model][-1]

    def loaded(self, model: str, stamp: int) -> None:
        """Record a completed load of a model that began when its files had ``stamp``."""
        self._loaded[model] = max(self._loaded.get(model, 0), stamp)

    # Requests

    def begin(self, arguments: dict[str, Any], specs: Mapping[str, Any]) -> Outcome:
        """Record a request that is about to be sent."""
        spec = specs[arguments["model"]]
        origin = arguments["model"]
        models = {origin, *spec.get("steps", ())}
        if spec["kind"] == "ensemble":
            origin = spec["steps"][-1]
        elif spec["kind"] == "bls":
            origin = spec["calls"]
        models.add(origin)
        oldest = self._loaded.get(origin, 0)
        outcome = Outcome(f"r{len(self.outcomes)}", arguments, origin, models, oldest, spec["kind"])
        self.outcomes.append(outcome)
        self._by_id[outcome.id] = outcome
        if "correlation" in arguments:
            key = arguments["model"], arguments["correlation"]
            if arguments["start"]:
                self._sequences[key] = []
            self._sequences.setdefault(key, []).append(outcome)
        return outcome

    def cancelled(self, outcome: Outcome) -> None:
        """Record that the client cancelled a request that the server has received."""
        request = outcome.request
        outcome.cancelled = True
        if request is not None and not request.finished and not request.times.started:
            outcome.cancelled_waiting = not outcome.executed

    def gave_up(self, outcome: Outcome) -> None:
        """Record that the client expects no more responses."""
        outcome.given_up = not outcome.finals

    def executed(self, id: str) -> None:
        """Record that a worker began to execute a request."""
        outcome = self._by_id.get(id)
        if outcome is None or outcome.kind in ("ensemble", "bls"):
            return
        if outcome.executed:
            self.broken(f"request {id} was executed twice")
        outcome.executed = True

    def responded(self, outcome: Outcome, response: InferResponse) -> None:
        """Record and check a response."""
        if outcome.finals:
            self.broken(f"request {outcome.id} got a response after its last one")
        if outcome.given_up:
            self.broken(f"request {outcome.id} got a response after it was cancelled")
        outcome.finals += response.final
        outcome.during_stop = self.stopping
        outcome.error = response.error or outcome.error
        if isinstance(response.error, LoadNeeded):
            self.broken(f"request {outcome.id} was refused, although its model can be loaded")
        if response.error is not None and "must specify the START flag" in response.error.message:
            self._check_overtaken(outcome)
        message = response.error.message if response.error is not None else ""
        if outcome.registered and "Unable to find shared memory region" in message:
            self.broken(f"request {outcome.id} was refused, although its region is registered: {message}")
        if "is tried again in" in message and "was unloaded" in message:
            self.broken(f"request {outcome.id} was refused after an unload: {message}")
        if response.error is not None and "was not loaded within" in response.error.message:
            self._check_late(outcome, response.error)
        for tensor in response.outputs:
            if tensor.name == "OUT":
                value, stamp, place = _OUTPUT.unpack(bytes(tensor.data))
                outcome.responses.append((value, stamp, place))
                self._check_response(outcome, value, stamp, place)

    def _check_overtaken(self, outcome: Outcome) -> None:
        """Check that a request did not overtake the first request of its sequence."""
        if outcome.arguments["model"] not in self.stable:
            return  # a new version does not continue the sequences of the old one, as in Triton
        first = self._sequences[outcome.arguments["model"], outcome.arguments.get("correlation", 0)][0]
        if first.arguments["start"] and first is not outcome and not first.finals and not first.given_up:
            self.broken(f"request {outcome.id} overtook {first.id}, which begins its sequence")

    def _check_late(self, outcome: Outcome, error: ConchError) -> None:
        """Check that a model that could be loaded at once was loaded."""
        impatient = outcome.arguments.get("deadline", 0)
        if self.unlimited and not impatient and not self.hung & outcome.models:
            self.broken(f"request {outcome.id} waited in vain: {error.message}")

    def _check_response(self, outcome: Outcome, value: int, stamp: int, place: int) -> None:
        arguments = outcome.arguments
        if value != arguments["value"]:
            self.broken(f"request {outcome.id} for {arguments['value']} got the response for {value}")
        stamps = self._repository.stamps[outcome.origin]
        if stamp not in stamps:
            self.broken(f"request {outcome.id} to '{arguments['model']}' got a response of another model ({stamp})")
        elif stamp < outcome.oldest:
            self.broken(
                f"request {outcome.id} to '{arguments['model']}' got a response of files {stamp}, which were replaced "
                f"by {outcome.oldest} before it was sent"
            )
        if outcome.kind in ("decoupled", "remote_decoupled") and place != len(outcome.responses) - 1:
            self.broken(f"request {outcome.id} got response {place} as number {len(outcome.responses) - 1}")

    def waiting(self) -> list[Outcome]:
        """Return the requests that need nothing but a worker of their model."""
        return [
            outcome
            for outcome in self.outcomes
            if not outcome.finals
            and not outcome.given_up
            and outcome.client is None
            and outcome.request is not None
            and outcome.kind in ("plain", "decoupled")
            and not outcome.ordered
        ]

    # Checks

    def check_rest(self, server: InferenceServer) -> None:
        """Check a server without work: no counter may show any."""
        if server.in_flight():
            self.broken(f"{server.in_flight()} requests count as in flight at rest")
        for name, version, status in server.model_rows():
            if status.startswith(("LOADING", "UNLOADING")):
                self.broken(f"'{name}' version {version} is {status} at rest")

    def serving(self, server: InferenceServer, specs: Mapping[str, Any]) -> list[str]:
        """Return the models that should respond now."""
        if server.loads_on_demand:
            return sorted(specs)
        ready = {name for name, _, status in server.model_rows() if status.startswith("READY")}
        return sorted(name for name in ready if specs[name].get("calls", name) in ready)

    def check_probe(self, outcome: Outcome) -> None:
        """Check a request that was sent after all faults had ended."""
        if outcome.kind not in ("sequence", "remote_sequence") and outcome.error is not None:
            self.broken(f"at rest, '{outcome.arguments['model']}' answers {outcome.error.status}")

    def check_end(self) -> None:
        """Check the results after the server has stopped."""
        for outcome in self.outcomes:
            if not outcome.finals and not outcome.given_up:
                self.broken(f"request {outcome.id} to '{outcome.arguments['model']}' never ended")
            if outcome.cancelled_waiting and outcome.executed and outcome.kind in ("plain", "decoupled", "sequence"):
                self.broken(f"request {outcome.id} was executed though it was cancelled while it waited")
            alone = outcome.kind in ("plain", "ensemble", "bls") and outcome.error is None and not outcome.given_up
            gives_up = outcome.arguments.get("streamed") and outcome.arguments.get("results") == 0
            if alone and len(outcome.responses) != (not gives_up):
                self.broken(f"request {outcome.id} ended with {len(outcome.responses)} responses")
            lost = outcome.error is CONNECTION_LOST or (
                isinstance(outcome.error, UnreachableError) and not getattr(outcome.client, "disturbed", False)
            )
            if lost and not outcome.during_stop and not self.refuses_bodies:
                self.broken(f"the connection of request {outcome.id} was closed before it was answered")
            if outcome.error is not None and outcome.error.code is Code.UNKNOWN:
                self.broken(f"request {outcome.id} ended with {outcome.error.status}")
        for (model, correlation), outcomes in self._sequences.items():
            self._check_sequence(model, correlation, outcomes)

    def _check_sequence(self, model: str, correlation: object, outcomes: list[Outcome]) -> None:
        """Check that the responses to a sequence come from one instance that executed its requests in order."""
        remote = outcomes[0].kind == "remote_sequence"
        places = [outcome.responses[0][2] for outcome in outcomes if outcome.responses]
        if outcomes[0].arguments["start"] and places != sorted(places):
            self.broken(f"the sequence {correlation} of '{model}' ran in the order {places}")
        given_up = any(outcome.cancelled or outcome.given_up for outcome in outcomes)
        failed = False
        for outcome in outcomes if remote and not given_up else ():
            if failed and outcome.error is None:
                self.broken(f"the sequence {correlation} of '{model}' went on after one of its requests had failed")
                break
            failed = failed or (outcome.error is not None and not _refused_at_once(outcome.error))
        if -1 in places:
            self.broken(f"a request of the sequence {correlation} of '{model}' ran on an instance that has no such")


def _refused_at_once(error: ConchError) -> bool:
    """Return whether a front end refused a request, so that its model never received it."""
    return any(reason in error.message for reason in ("shared memory region", "--max-bytes-in-flight"))
