"""Load on demand without disks and processes: models that load, serve and leave when the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from conch.config.pbtxt import parse
from conch.core.errors import Code, ConchError, invalid, unavailable
from conch.core.inference import InferRequest
from conch.core.tensors import WireTensor
from conch.repository.errors import NotFoundError
from conch.server.model import Model
from conch.server.models.capacity import Capacity, CapacityLimits, Footprint, Footprints
from conch.server.models.on_demand import LoadNeeded, OnDemand
from conch.server.models.states import UNLOADED, ModelState, ModelTable, State, VersionState
from conch.telemetry.statistics import ModelStatistics
from tests.unit.fake_clock import settle
from tests.unit.server.fakes import Answers
from tests.unit.server.loads import CONFIG, FakeExecutor

T = TypeVar("T")


class FakeLifecycle:
    """Loads in ``seconds`` of the loop's clock; ``broken`` ones fail, and so do those that are unloaded before.

    An ensemble, after as many seconds, also loads its ``step_models`` that do not serve. ``files`` are those of every
    model, ``served`` those that each model was loaded from.
    """

    def __init__(self, table: ModelTable, step_models: Mapping[str, Collection[str]]) -> None:
        self.table = table
        self.versions = self
        self.seconds = 1.0
        self._step_models = step_models
        #: What a load still does when its model serves (s).
        self.afterwards = 0.0
        self.broken: set[str] = set()
        self.files = 1
        self.served: dict[str, int] = {}
        self.log: list[str] = []
        #: Models that were loaded for a model, without a load slot.
        self.by_model: list[str] = []
        self._loads: dict[str, asyncio.Event] = {}
        self._unloaded: set[str] = set()

    def is_loading(self, name: str) -> bool:
        return name in self._loads

    async def load(self, name: str, *, by_model: bool = False) -> None:
        self.log.append(f"load {name}")
        self.by_model += [name] if by_model else []
        state = self.table.models.setdefault(name, ModelState(name))
        state.versions.setdefault(1, VersionState(State.LOADING))
        files, broken = self.files, name in self.broken
        ended = self._loads[name] = asyncio.Event()
        await asyncio.sleep(self.seconds)
        for step_model in self._step_models.get(name, ()):
            if not self._serves(step_model):
                with suppress(ConchError):
                    await self.load(step_model)
        broken = broken or not all(map(self._serves, self._step_models.get(name, ())))
        del self._loads[name]
        ended.set()
        if name in self._unloaded:
            self._unloaded.remove(name)
            raise unavailable(f"load failed for model '{name}': the model was unloaded during the load")
        if broken:
            state.versions[1] = VersionState(State.UNAVAILABLE, "broken")
            raise invalid(f"load failed for model '{name}': broken")
        self.served[name] = files
        model = Model(parse(f'name: "{name}" {CONFIG}', "x"), 1, FakeExecutor(), ModelStatistics(name, 1), {})
        state.versions[1] = VersionState(State.READY, "", model)
        self.table.on_ready()
        await asyncio.sleep(self.afterwards)

    def _serves(self, name: str) -> bool:
        state = self.table.models.get(name)
        return state is not None and bool(state.ready_versions())

    async def unload(self, name: str, dependents: bool = False) -> None:
        self.log.append(f"unload {name}")
        if self.is_loading(name):
            self._unloaded.add(name)
            await self._loads[name].wait()
        version = self.table.models[name].versions[1]
        if version.model is None:
            version.make_unavailable(UNLOADED)
        else:
            version.state = State.UNLOADING

    async def wait(self, name: str) -> None:
        version = self.table.models[name].versions[1]
        if version.model is not None:
            await version.model.finish()
            version.make_unavailable(UNLOADED)


class FakeRepository:
    """Has every model."""

    def check_unique(self, name: str) -> None: ...

    async def in_thread(self, look: Callable[[], T]) -> T:
        return look()

    async def listed(self) -> list[str]:
        return []


class FakeFootprints:
    """Every model but ``nobody`` takes one place and ``memory``; the files of ``broken`` ones cannot be read, and the
    next measurements fail as often as ``failures`` says."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.step_models: dict[str, list[str]] = {}
        self.memory = 0
        self.failures = 0

    async def of(self, name: str) -> Footprints:
        if name == "nobody":
            raise NotFoundError(name)
        if name in self.broken:
            raise RuntimeError("the disk is on fire")
        step_models = self.step_models.get(name, [])
        footprints = {step_model: Footprint(Capacity(models=1, memory=self.memory)) for step_model in step_models}
        return {**footprints, name: self._footprint(name)}

    async def remeasure(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no such process")

    def measured(self, models: Sequence[Model]) -> Footprint:
        return self._footprint(models[0].name)

    def _footprint(self, name: str) -> Footprint:
        if step_models := self.step_models.get(name):
            return Footprint(Capacity(), frozenset(step_models))
        return Footprint(Capacity(models=1, memory=self.memory))


class Market:
    """A server that loads on demand, as front ends see it."""

    def __init__(self, limits: CapacityLimits, pinned: tuple[str, ...] = ()) -> None:
        self.table = ModelTable()
        self.footprints = FakeFootprints()
        self.lifecycle = FakeLifecycle(self.table, self.footprints.step_models)
        self.demand = OnDemand(
            limits,
            pinned,
            FakeRepository(),  # type: ignore[arg-type]
            self.table,
            self.lifecycle,  # type: ignore[arg-type]
            self.footprints,  # type: ignore[arg-type]
            asyncio.get_running_loop().time,
        )

    def model(self, name: str, version: int = -1) -> Model:
        try:
            return self.table.find(name, version)
        except ConchError as missing:
            raise self.demand.needed(name, missing) from None

    def model_ready(self, name: str, version: int = -1) -> bool:
        return name != "nobody"

    def submit(self, name: str) -> Asked:
        """A request as a front end sends it, which waits for its model where it must."""
        asked = Asked(name)
        self._send(asked)
        return asked

    def _send(self, asked: Asked) -> None:
        try:
            self.model(asked.name).infer(asked.request)
        except LoadNeeded as needed:
            asked.give_up = needed.then(lambda error: self._resume(asked, error))
        except ConchError as error:
            asked.refused = error

    def _resume(self, asked: Asked, load_error: ConchError | None) -> None:
        if load_error is None:
            self._send(asked)
        else:
            asked.refused = load_error

    def answer(self, name: str) -> None:
        """Answer everything that a model runs."""
        executor = self.table.find(name).executor
        assert isinstance(executor, FakeExecutor)
        requests, executor.requests = executor.requests, []
        for request in requests:
            request.fail(ConchError("answered", Code.INTERNAL))

    def running(self, name: str) -> int:
        version = self.table.models[name].versions[1]
        assert version.model is not None
        return version.model.in_flight

    async def load(self, *names: str) -> None:
        for name in names:
            self.submit(name)
            await asyncio.sleep(1.5)
            self.answer(name)
            await settle()


class Asked:
    """A request and what became of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answers = Answers()
        self.request = InferRequest(name, {"x": WireTensor("x", "FP32", (1,), bytes(4))}, self.answers)
        self.refused: ConchError | None = None

    def give_up(self) -> None:
        raise AssertionError("it does not wait")
