"""Models that are loaded as the state machine decides, at times and with uses that the test says."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from conch.core.errors import ConchError, not_found, unavailable
from conch.server.models import capacity
from conch.server.models.capacity import Capacity
from conch.server.models.eviction import OnDemandPlanner

ONE = capacity.Footprint(Capacity(models=1, memory=10))


class Town:
    """Carries decisions out: loads and departures end when the test says, files are read at once except for those of
    the models in ``slow``, whose readings are in ``reading`` until the test ends them.

    ``footprints`` has those of models that are not like ``ONE``. ``answers`` has the outcome of each request: "" if
    its model was loaded, else the reason why not.
    """

    def __init__(
        self,
        limits: capacity.CapacityLimits,
        pinned: Collection[str] = (),
        footprints: Mapping[str, capacity.Footprints] | None = None,
    ) -> None:
        self.planner = OnDemandPlanner(limits, self, pinned)
        self.now = 0.0
        self.in_use: set[str] = set()
        self.used_at: dict[str, float] = {}
        self.footprints = footprints or {}
        self.unknown: set[str] = set()
        self.slow: set[str] = set()
        self.reading: list[str] = []
        self.loading: list[str] = []
        self.loads: dict[str, capacity.Load] = {}
        self.leaving: list[str] = []
        self.answers: dict[int, str] = {}
        #: The waiting requests, without those that are about to continue.
        self.waiters: list[capacity.Waiter] = []
        self._serial = 0

    def busy(self, name: str) -> bool:
        return name in self.in_use

    def last_used(self, name: str) -> float:
        return self.used_at.get(name, 0.0)

    def ask(self, name: str) -> tuple[int, capacity.Waiter]:
        """A request for a model that is not loaded; its number in ``answers``, and what waits."""
        self._serial += 1
        serial = self._serial

        def proceed(error: ConchError | None) -> None:
            assert serial not in self.answers, "a request goes on once"
            self.answers[serial] = error.message if error is not None else ""

        waiter = self.planner.ask(name, proceed, self.now)
        self.waiters.append(waiter)
        self.decide()
        return serial, waiter

    def decide(self) -> None:
        while decisions := self.planner.decide(self.now):
            resumed = [decision.waiter for decision in decisions if isinstance(decision, capacity.ResumeRequest)]
            self.waiters = [one for one in self.waiters if one not in resumed and not one.withdrawn]
            for decision in decisions:
                match decision:
                    case capacity.ReadFootprints(name) if name in self.slow:
                        self.reading.append(name)
                    case capacity.ReadFootprints(name) if name in self.unknown:
                        self.planner.unknown(name, not_found(f"there is no '{name}'"), self.now)
                    case capacity.ReadFootprints(name):
                        self.planner.planned(name, self.needs_of(name))
                    case capacity.Load(name):
                        self.loading.append(name)
                        self.loads[name] = decision
                    case capacity.Evict(name, _):
                        self.on_evict(name)
                        self.leaving.append(name)
                    case capacity.ResumeRequest(waiter, error):
                        waiter.proceed(error)

    def on_evict(self, name: str) -> None:
        """For what a test wants to see of every departure."""

    def needs_of(self, name: str) -> capacity.Footprints:
        return self.footprints.get(name, {name: ONE})

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.decide()

    def end_load(self, name: str, error: str = "") -> None:
        """A load ends: with all of its models, or where there is an ``error``, with its members alone."""
        self.loading.remove(name)
        brought = [one for one in self.needs_of(name) if self.planner.phase(one) is capacity.Phase.LOADING]
        for one in brought:
            if one != name or not error:
                self.serve(one, self.needs_of(name)[one])
        if error:
            self.planner.failed(self.loads[name], unavailable(error), self.now)
        else:
            self.planner.loaded(self.loads[name])
        self.decide()

    def serve(self, name: str, footprint: capacity.Footprint = ONE) -> None:
        """A model begins to serve, perhaps before the load that brings it has ended."""
        self.planner.serves(name, footprint, self.now)
        self.decide()

    def end_reading(self, name: str) -> None:
        self.reading.remove(name)
        self.planner.planned(name, self.needs_of(name))
        self.decide()

    def end_leaving(self, name: str) -> None:
        self.leaving.remove(name)
        self.planner.left(name)
        self.decide()

    def load(self, *names: str) -> None:
        """Load models one after the other, for a request each, and let a second pass after each."""
        for name in names:
            self.ask(name)
            self.end_load(name)
            self.wait(1)

    def loaded(self) -> list[str]:
        return sorted(self.planner.residents(capacity.Phase.LOADED))
