"""The state machine of load on demand: which model is loaded next, and which ones leave for it.

Owned by ``conch.server.on_demand``, which tells it what happens and carries out what it decides.  Models are loaded in
the order in which they were first asked for, and a model that does not fit blocks the models behind it, so none
is overtaken for ever.  A model whose files are still being read, or that is still being unloaded, blocks no others and
keeps its position.  A step of an ensemble that is being loaded also loads on its own if a request waits for it, so it
does not wait for the files of the ensemble or of other steps.  Idle models are evicted, least recently used first.  If
none is idle, the model that was loaded first is evicted after its minimum time, once its requests have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from conch.errors import Code, ConchError, unavailable
from conch.schedulers.eviction.capacity import Capacity, the_sum, total
from conch.schedulers.eviction.failures import LoadBackOff
from conch.schedulers.eviction.thrashing import Thrashing
from conch.schedulers.eviction.vocabulary import (
    CapacityLimits,
    Decision,
    Evict,
    Footprint,
    Footprints,
    Load,
    ModelUse,
    Phase,
    ReadFootprints,
    ResumeRequest,
    Waiter,
)
from conch.telemetry.on_demand import OnDemandCounts


@dataclass(slots=True)
class _Resident:
    """A model that has room, from the decision to load it until it has left."""

    footprint: Footprint
    phase: Phase
    since: float
    #: The models whose loads bring this one: itself, ensembles, or both.
    loaders: set[str] = field(default_factory=set)
    #: How long its load took (s).
    load: float = 0.0


@dataclass(slots=True)
class _PendingLoad:
    """A model that requests wait for and that nothing loads yet."""

    since: float
    #: The footprints of its load, None until its files have been read.
    footprints: Footprints | None = None


class OnDemandPlanner:
    """Decides; times are seconds of one clock.  ``pinned`` models never leave."""

    def __init__(self, limits: CapacityLimits, usage: ModelUse, pinned: Collection[str] = ()) -> None:
        self.limits = limits
        self.pinned = frozenset(pinned)
        self.back_off = LoadBackOff()
        self.thrashing = Thrashing()
        self.counts = OnDemandCounts()
        self._usage = usage
        self._residents: dict[str, _Resident] = {}
        #: In the order in which they were first asked for; follows from ``_waiting`` and ``_residents``.
        self._pending_loads: dict[str, _PendingLoad] = {}
        self._reading: set[str] = set()
        #: The loads during which a model that they bring was unloaded.
        self._interrupted: set[str] = set()
        self._waiting: dict[str, dict[Waiter, None]] = {}
        self._decided: list[Decision] = []
        self._closed = ""

    # What happens

    def refusal(self, name: str, now: float) -> ConchError | None:
        """Why a request for a model that does not serve may not wait: too many do, or its last load has just failed."""
        if self._closed:
            return unavailable(self._closed)
        refusal = self.back_off.refusal(name, now) or self._too_many(name)
        if refusal is not None and name in self.counts.models:
            self.counts.of(name).refused += 1
        return refusal

    def ask(self, name: str, proceed: Callable[[ConchError | None], None], now: float) -> Waiter:
        """A request waits for a model that does not serve."""
        waiter = Waiter(name, proceed, now, now + self.limits.wait)
        if self._closed:
            self._end(waiter, unavailable(self._closed), now)
        else:
            self._waiting.setdefault(name, {})[waiter] = None
        return waiter

    def withdraw(self, waiter: Waiter) -> None:
        """Nobody waits for the answer to the request any more; a load that has begun goes on."""
        waiter.withdrawn = True
        self._forget(waiter)

    def planned(self, name: str, footprints: Footprints) -> None:
        """It is known what a load of ``name`` needs."""
        self._reading.discard(name)
        pending_load = self._pending_loads.get(name)
        if pending_load is not None:
            pending_load.footprints = footprints

    def unknown(self, name: str, error: ConchError, now: float) -> None:
        """There is no such model."""
        self._reading.discard(name)
        self._let_go(name, error, now)

    def loaded(self, name: str) -> None:
        """A load has ended; all models that it loaded are already ready."""
        self.back_off.forget(name)
        self._end_load(name)

    def unreadable(self, name: str, error: ConchError, now: float) -> None:
        """The files of a model could not be read; that is not tried again for some time."""
        self._reading.discard(name)
        self._refuse(name, error, now)

    def failed(self, name: str, error: ConchError, now: float) -> None:
        """A load has failed, and is not tried again for some time.

        If a model was unloaded during the load, the next request starts a new load instead.
        """
        if not self._end_load(name):
            self._refuse(name, error, now)

    def measured(self, name: str, capacity: Capacity) -> None:
        """A loaded model takes as much as this by now."""
        if (resident := self._residents.get(name)) is not None:
            resident.footprint = Footprint(capacity, resident.footprint.members)

    def serves(self, name: str, footprint: Footprint, now: float) -> None:
        """A model has become ready, whatever loaded it; its waiting requests proceed."""
        before = self._residents.get(name)
        load = now - before.since if before is not None else 0.0
        self._residents[name] = _Resident(footprint, Phase.LOADED, now, load=load)
        self.back_off.forget(name)
        self._let_go(name, None, now)

    def unloaded_early(self, name: str, now: float) -> None:
        """The model was unloaded during its load: waiting requests fail, and the next request starts a new load."""
        resident = self._residents.get(name)
        if resident is not None and resident.phase is Phase.LOADING:
            resident.phase = Phase.LEAVING
            self._interrupted |= resident.loaders
            self._let_go(name, unavailable(f"load failed for model '{name}': the model was unloaded meanwhile"), now)

    def leaves(self, name: str) -> None:
        """Somebody has unloaded the model."""
        if (resident := self._residents.get(name)) is not None:
            resident.phase = Phase.LEAVING

    def left(self, name: str) -> None:
        """An unloaded model has given everything back; if its own load has not ended, that frees its room."""
        resident = self._residents.get(name)
        if resident is not None and resident.phase is Phase.LEAVING and name not in resident.loaders:
            del self._residents[name]

    def close(self, reason: str, now: float) -> None:
        """Stop loading and unloading, and refuse waiting and later requests for the ``reason`` given."""
        self._closed = reason
        for name in list(self._waiting):
            self._let_go(name, unavailable(reason), now)

    # What is so

    def phase(self, name: str) -> Phase | None:
        resident = self._residents.get(name)
        return None if resident is None else resident.phase

    def residents(self, phase: Phase) -> list[str]:
        """The models in a phase."""
        return [name for name, resident in self._residents.items() if resident.phase is phase]

    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

    def room_taken(self) -> Capacity:
        """By models that are being loaded, loaded and leaving."""
        return total(resident.footprint.capacity for resident in self._residents.values())

    @property
    def blocked(self) -> bool:
        """Whether a model waits until others have room for it."""
        return self._first_without_room() is not None

    # What is to be done

    def decide(self, now: float) -> list[Decision]:
        """What is to be done next; to be called again when that is done, until nothing is left to do."""
        self._expire(now)
        for name in [name for name in self._waiting if self.phase(name) is Phase.LOADED]:
            self._let_go(name, None, now)
        # Requests that proceed are about to use their models, which are then no longer idle.
        if not self._decided and not self._closed:
            self._allot(now)
        decided, self._decided = self._decided, []
        return decided

    def _allot(self, now: float) -> None:
        self._load_awaited_steps()
        self._note_wishes()
        for name, pending_load in self._pending_loads.items():
            if pending_load.footprints is None and name not in self._reading:
                self._reading.add(name)
                self._decided.append(ReadFootprints(name))
        passed: set[str] = set()
        for name, pending_load in list(self._pending_loads.items()):
            if (
                pending_load.footprints is None or name not in self._pending_loads
            ):  # an ensemble brings those that have gone from there
                continue
            if self._leaving_among(pending_load.footprints):
                passed.update(pending_load.footprints)
            elif not self._try(name, pending_load.since, pending_load.footprints, passed, now):
                break
        self._relieve(now)

    def _load_awaited_steps(self) -> None:
        """Load ensemble steps that requests wait for on their own too, because the load of the ensemble may stall."""
        for name in self._waiting:
            resident = self._residents.get(name)
            if resident is not None and resident.phase is Phase.LOADING and name not in resident.loaders:
                resident.loaders.add(name)
                self._decided.append(Load(name))

    def _note_wishes(self) -> None:
        """Record each model that requests wait for and that is not loading, in the order of those requests."""
        self._pending_loads = {
            name: self._pending_loads.get(name) or _PendingLoad(next(iter(waiting)).since)
            for name, waiting in self._waiting.items()
            if self.phase(name) in (None, Phase.LEAVING)
        }

    def wake_at(self, now: float) -> float | None:
        """When time alone changes what is decided; None for never."""
        times = [next(iter(waiting)).deadline for waiting in self._waiting.values()]
        first = self._first_without_room()
        if first is not None:
            turns = [self._pending_loads[first].since + self.limits.min_loaded]
            turns += [
                self._turn_ends(resident) for resident in self._residents.values() if resident.phase is Phase.LOADED
            ]
            times += [turn for turn in turns if turn > now]
        return min(times, default=None)

    def _first_without_room(self) -> str | None:
        """The first model that waits for capacity; the models behind it wait too."""
        for name, pending_load in self._pending_loads.items():
            if pending_load.footprints is not None and not self._leaving_among(pending_load.footprints):
                return name
        return None

    def _leaving_among(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.phase(name) is Phase.LEAVING]

    def _try(self, name: str, since: float, footprints: Footprints, passed: Collection[str], now: float) -> bool:
        """Load a model that waits since ``since``, or make room for it; False if the models behind it have to wait.

        The models ``passed`` are kept for models ahead of it that do not wait for capacity.
        """
        refusal = self._never_fits(name, footprints)
        if refusal is not None:
            del self._pending_loads[name]
            self._let_go(name, refusal, now)
            return True
        missing = {one: need for one, need in needs.items() if one not in self._residents}
        needed = total(need.room for need in missing.values())
        if self.room_taken().plus(needed).within(self.limits.room):
            for one, need in missing.items():
                self._wishes.pop(one, None)
                self._residents[one] = _Resident(need, Phase.LOADING, now, {name})
                self.counts.of(one).loads += 1
                self.counts.of(one).returns += self.thrashing.loads(one, now)
            self._decided.append(Load(name))
            return True
        turn_over = now >= since + self.limits.min_loaded
        for one in self._choose(needed, {*footprints, *passed}, now, turn_over=turn_over):
            self._evict(one, f"to make room for '{name}'", now)
        return False

    def _relieve(self, now: float) -> None:
        """Let idle models leave where what is loaded has grown beyond the budget."""
        if not self._staying().within(self.limits.capacity):
            for one in self._choose(Capacity(), (), now, turn_over=False, partly=True):
                self._evict(one, "because more is loaded than fits", now)

    def _choose(
        self, needed: Capacity, keep: Collection[str], now: float, *, turn_over: bool, partly: bool = False
    ) -> list[str]:
        """The models that leave so that there is room for ``needed``; none where that is not possible.

        ``turn_over``: those that are never idle may be chosen.  ``partly``: rather some than none.
        """
        taken = self._staying().plus(needed)
        chosen: set[str] = set()
        leaving = set(self.residents(Phase.LEAVING))
        while not taken.within(self.limits.capacity):
            one = self._next_to_leave(chosen | set(keep), chosen | leaving, now, turn_over)
            if one is None:
                chosen = chosen if partly else set()
                break
            chosen.add(one)
            taken = taken.minus(self._residents[one].footprint.capacity)
        # A member leaves once the ensembles that need it have left.
        return [one for one in chosen if not self._held_by(one, self._residents)]

    def _next_to_leave(self, spared: set[str], gone: set[str], now: float, turn_over: bool) -> str | None:
        free = [
            (name, resident)
            for name, resident in self._residents.items()
            if resident.phase is Phase.LOADED
            and name not in spared
            and name not in self.pinned
            and not self._held_by(name, self._residents.keys() - gone)
        ]
        idle = [(name, resident) for name, resident in free if not self._usage.busy(name)]
        if idle:
            return min(idle, key=lambda one: self._last_used(*one))[0]
        if turn_over:
            done = [(resident.since, name) for name, resident in free if now >= self._turn_ends(resident)]
            return min(done)[1] if done else None
        return None

    def _held_by(self, name: str, holders: Collection[str]) -> bool:
        """Whether an ensemble among ``holders`` needs the model."""
        return any(name in self._residents[holder].footprint.members for holder in holders)

    def _turn_ends(self, resident: _Resident) -> float:
        """Until when a loaded model keeps its place while it is in use: a load is worth its time."""
        return resident.since + max(self.limits.min_loaded, resident.load)

    def _last_used(self, name: str, resident: _Resident) -> float:
        return max(resident.since, self._usage.last_used(name))

    def _staying(self) -> Capacity:
        return total(
            resident.footprint.capacity for resident in self._residents.values() if resident.phase is not Phase.LEAVING
        )

    def _evict(self, name: str, reason: str, now: float) -> None:
        self._residents[name].phase = Phase.LEAVING
        self.thrashing.left(name, now)
        self.counts.of(name).evictions += 1
        self._decided.append(Evict(name, reason))

    def _end_load(self, name: str) -> bool:
        """Free the room of the models that an ended load did not load, unless another load may still bring them.

        Returns whether one of them was unloaded during the load.
        """
        for one, resident in list(self._residents.items()):
            if name in resident.loaders:
                resident.loaders.remove(name)
                if not resident.loaders or (one == name and resident.phase is Phase.LEAVING):
                    del self._residents[one]
        interrupted = name in self._interrupted
        self._interrupted.discard(name)
        return interrupted

    def _refuse(self, name: str, error: ConchError, now: float) -> None:
        self.back_off.failed(name, error, now)
        self.counts.of(name).failures += 1
        self._let_go(name, error, now)

    def _forget(self, waiter: Waiter) -> None:
        waiting = self._waiting.get(waiter.name, {})
        waiting.pop(waiter, None)
        if not waiting:
            self._waiting.pop(waiter.name, None)

    def _let_go(self, name: str, error: ConchError | None, now: float) -> None:
        for waiter in self._waiting.pop(name, ()):
            self._end(waiter, error, now)

    def _expire(self, now: float) -> None:
        for name, waiting in list(self._waiting.items()):
            for waiter in list(waiting):
                if waiter.deadline > now:
                    break
                self._forget(waiter)
                self._end(waiter, unavailable(self._too_late(name, now)), now)

    def _end(self, waiter: Waiter, error: ConchError | None, now: float) -> None:
        self._decided.append(ResumeRequest(waiter, error))
        if error is None or error.code is not Code.NOT_FOUND:  # the names of unknown models are without number
            counts = self.counts.of(waiter.name)
            counts.waits += 1
            counts.waited += now - waiter.since
            counts.refused += error is not None

    # The sentences that refuse requests

    def _too_many(self, name: str) -> ConchError | None:
        limit = self.limits.waiting_per_model
        if len(self._waiting.get(name, ())) >= limit:
            whose = f"model '{name}' to be loaded, no more may (--max-load-waiting-per-model)"
        elif self.waiting() >= (limit := self.limits.waiting):
            whose = "models to be loaded, no more may (--max-load-waiting)"
        else:
            return None
        return unavailable(f"{limit} requests wait already for {whose}")

    def _never_fits(self, name: str, footprints: Footprints) -> ConchError | None:
        """Why the model cannot be loaded even when everything leaves that may."""
        stays = {resident for resident in self._residents if resident in self.pinned}
        while more := {
            resident for resident in self._residents if resident not in stays and self._held_by(resident, stays)
        }:
            stays |= more
        used = total(self._residents[stay].footprint.capacity for stay in stays - set(footprints))
        needed = total(
            (self._residents[one].footprint if one in self._residents else footprint).capacity
            for one, footprint in footprints.items()
        )
        if used.plus(needed).within(self.limits.capacity):
            return None
        pinned = " that stay loaded (--load-model)" if stays else ""
        return unavailable(f"model '{name}' cannot be loaded: {the_sum(needed, used, self.limits.capacity)}{pinned}")

    def _too_late(self, name: str, now: float) -> str:
        late = f"model '{name}' was not loaded within {self.limits.wait:g} s (--load-wait-secs)"
        if self.phase(name) is Phase.LOADING:
            return f"{late}: its load has taken {now - self._residents[name].since:.0f} s so far"
        pending_load = self._pending_loads.get(name)
        if pending_load is None or pending_load.footprints is None:
            return f"{late}: its files are still being read"
        if leaving := self._leaving_among(pending_load.footprints):
            return f"{late}: the last requests of '{leaving[0]}', which is being unloaded, still run"
        first = self._first_without_room() or name
        pending_load = self._pending_loads[first]
        assert pending_load.footprints is not None
        missing = [
            footprint.capacity for one, footprint in pending_load.footprints.items() if one not in self._residents
        ]
        cause = the_sum(total(missing), self.room_taken(), self.limits.capacity)
        busy = sum(self._usage.busy(resident) for resident in self.residents(Phase.LOADED))
        before = "" if first == name else f"'{first}' comes first: "
        return (
            f"{late}: {before}{cause}; of those, {busy} are in use, {len(self.pinned & self._residents.keys())} stay "
            f"loaded (--load-model), {len(self.residents(Phase.LOADING))} are being loaded and "
            f"{len(self.residents(Phase.LEAVING))} are leaving"
        )
