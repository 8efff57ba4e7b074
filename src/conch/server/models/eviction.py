"""The state machine of on-demand loading: decides which model is loaded next and which models are evicted for it.

Owned by ``conch.server.models.on_demand``, which reports events to it and carries out its decisions. Models are loaded
in the order of their first requests, and a model that does not fit blocks the models behind it, so that none starves. A
model whose files are still being read, or that is still being unloaded, does not block others and keeps its position.
Models that other models call come first, because their callers keep their capacity until the calls end. A step of an
ensemble that is being loaded also loads on its own if a request waits for it, so that it does not wait for the files of
the ensemble or of other steps. Idle models are evicted, least recently used first. If none is idle, the model that was
loaded first is evicted after its minimum time, when its requests have ended. Recent failures delay the
next attempt, and recent evictions of models that are needed again are reported as thrashing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from conch.core.errors import Code, ConchError, unavailable
from conch.server.models.capacity import (
    Capacity,
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
    describe_shortage,
    total,
)
from conch.telemetry.on_demand import OnDemandCounts

#: Delay before the next load after the first, second, third … consecutive failure (s); the last delay repeats.
RETRY_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class _Failure:
    count: int
    until: float
    error: ConchError


class LoadBackOff:
    """The failures of each model since its last successful load; times are seconds of one clock."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def failed(self, name: str, error: ConchError, now: float) -> None:
        """Record a failed load; the delay grows with consecutive failures."""
        count = self._failures[name].count + 1 if name in self._failures else 1
        seconds = RETRY_SECONDS[min(count, len(RETRY_SECONDS)) - 1]
        self._failures[name] = _Failure(count, now + seconds, error)

    def forget(self, name: str) -> None:
        """Reset a model, because it was loaded or a load was requested explicitly."""
        self._failures.pop(name, None)

    def refusal(self, name: str, now: float) -> ConchError | None:
        """Return the error for requests while a model may not be loaded; None if it may be loaded."""
        failure = self._failures.get(name)
        if failure is None or failure.until <= now:
            return None
        times = "" if failure.count == 1 else f" {failure.count} times"
        seconds = ceil(failure.until - now)
        prefix = f"model '{name}' failed to load{times}, and is tried again in {seconds} s: "
        error = failure.error
        return ConchError(prefix + error.message.strip(), Code.UNAVAILABLE, public=prefix + error.public.strip())

    def failing(self, now: float) -> list[str]:
        """Return the models that are in back-off after a failed load."""
        return sorted(name for name, failure in self._failures.items() if failure.until > now)


#: Length of the observed window, and minimum interval between warnings (s).
WINDOW: Final = 60.0
#: Number of loads within the window, of models evicted less than a window before, that cause a warning.
WORTH_A_WARNING: Final = 6
_NAMED: Final = 3


class Thrashing:
    """Counts models that are loaded again soon after their eviction; times are seconds of one clock."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}
        self._returned: deque[tuple[float, str]] = deque()
        self._warned = float("-inf")

    def left(self, name: str, now: float) -> None:
        """Record the eviction of a model."""
        self._left[name] = now

    def loads(self, name: str, now: float) -> bool:
        """Record a load; return whether the model was evicted at most ``WINDOW`` seconds before."""
        returns = now - self._left.pop(name, float("-inf")) <= WINDOW
        if returns:
            self._returned.append((now, name))
        return returns

    def warning(self, now: float) -> str:
        """Return a warning, at most once per ``WINDOW``; empty if there is no thrashing."""
        while self._returned and now - self._returned[0][0] > WINDOW:
            self._returned.popleft()
        if len(self._returned) < WORTH_A_WARNING or now - self._warned < WINDOW:
            return ""
        self._warned = now
        names = Counter(name for _, name in self._returned).most_common()
        shown = ", ".join(f"'{name}' {count} times" if count > 1 else f"'{name}'" for name, count in names[:_NAMED])
        others = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return (
            f"models are evicted and reloaded too often: within {WINDOW:.0f} s, {len(self._returned)} loads "
            f"were of models that had just made "
            f"room for others ({shown}{others}); --max-loaded-models or --memory-budget is too small for these requests"
        )


@dataclass(slots=True)
class _Resident:
    """A model that takes capacity, from the decision to load it until it is unloaded."""

    footprint: Footprint
    phase: Phase
    since: float
    #: The loads that may load it: its own, those of ensembles, or both.
    loads: set[Load] = field(default_factory=set)
    #: Duration of its load (s).
    load: float = 0.0


@dataclass(slots=True)
class _PendingLoad:
    """A model that requests wait for and that is not loading yet."""

    since: float
    #: The footprints of its load, None until its files have been read.
    footprints: Footprints | None = None


class OnDemandPlanner:
    """Decides which models to load and evict; times are seconds of one clock. ``pinned`` models are never evicted."""

    def __init__(self, limits: CapacityLimits, usage: ModelUse, pinned: Collection[str] = ()) -> None:
        self.limits = limits
        self.pinned = frozenset(pinned)
        self.back_off = LoadBackOff()
        self.thrashing = Thrashing()
        self.counts = OnDemandCounts()
        self._usage = usage
        self._residents: dict[str, _Resident] = {}
        #: In the order of their first waiting requests; derived from ``_waiting`` and ``_residents``.
        self._pending_loads: dict[str, _PendingLoad] = {}
        self._reading: set[str] = set()
        #: The loads during which a model that they bring was unloaded.
        self._interrupted: set[Load] = set()
        self._waiting: dict[str, dict[Waiter, None]] = {}
        self._decided: list[Decision] = []
        self._closed = ""

    # Events

    def refusal(self, name: str, now: float) -> ConchError | None:
        """Return the error if a request for a model that is not loaded may not wait, else None.

        A request may not wait if too many others do, or if the model is in back-off.
        """
        if self._closed:
            return unavailable(self._closed)
        refusal = self.back_off.refusal(name, now) or self._too_many(name)
        if refusal is not None and name in self.counts.models:
            self.counts.of(name).refused += 1
        return refusal

    def ask(
        self, name: str, proceed: Callable[[ConchError | None], None], now: float, *, caller: str | None = None
    ) -> Waiter:
        """Add a request that waits for a model that is not loaded; ``caller`` as for :class:`Waiter`."""
        waiter = Waiter(name, proceed, now, now + self.limits.wait, caller)
        if self._closed:
            self._end(waiter, unavailable(self._closed), now)
        else:
            self._waiting.setdefault(name, {})[waiter] = None
        return waiter

    def withdraw(self, waiter: Waiter) -> None:
        """Remove a cancelled request; a load that has begun continues."""
        waiter.withdrawn = True
        self._forget(waiter)

    def planned(self, name: str, footprints: Footprints) -> None:
        """Record the footprints of a load of ``name``, after its files have been read."""
        self._reading.discard(name)
        pending_load = self._pending_loads.get(name)
        if pending_load is not None:
            pending_load.footprints = footprints

    def unknown(self, name: str, error: ConchError, now: float) -> None:
        """Fail the requests for a model that does not exist."""
        self._reading.discard(name)
        self._end_waiting(name, error, now)

    def loaded(self, load: Load) -> None:
        """Record a successful load; ``serves`` has been called for all models that it loaded."""
        self.back_off.forget(load.name)
        self._end_load(load)

    def unreadable(self, name: str, error: ConchError, now: float) -> None:
        """Fail the requests for a model whose files cannot be read, and start its back-off."""
        self._reading.discard(name)
        self._refuse(name, error, now)

    def failed(self, load: Load, error: ConchError, now: float) -> None:
        """Record a failed load: fail the waiting requests and start the back-off.

        If a model was unloaded during the load, there is no back-off; the next request starts a new load instead. The
        error is ignored if another load has loaded the model.
        """
        resident = self._residents.get(load.name)
        counts = resident is not None and load in resident.loads and load not in self._interrupted
        self._end_load(load)
        if counts:
            self._refuse(load.name, error, now)

    def measured(self, name: str, capacity: Capacity) -> None:
        """Update the measured capacity of a loaded model."""
        if (resident := self._residents.get(name)) is not None:
            resident.footprint = Footprint(capacity, resident.footprint.step_models)

    def serves(self, name: str, footprint: Footprint, now: float) -> None:
        """Record that a model is ready, regardless of what loaded it; its waiting requests proceed."""
        before = self._residents.get(name)
        load = now - before.since if before is not None else 0.0
        self._residents[name] = _Resident(footprint, Phase.LOADED, now, load=load)
        self.back_off.forget(name)
        self._end_waiting(name, None, now)

    def unloaded_during_load(self, name: str, now: float) -> None:
        """Record that a model was unloaded during its load: waiting requests fail, the next one starts a new load."""
        resident = self._residents.get(name)
        if resident is not None and resident.phase is Phase.LOADING:
            resident.phase = Phase.LEAVING
            self._interrupted |= resident.loads
            self._end_waiting(
                name, unavailable(f"load failed for model '{name}': the model was unloaded during the load"), now
            )

    def leaves(self, name: str) -> None:
        """Record that an unload of a model has begun."""
        if (resident := self._residents.get(name)) is not None:
            resident.phase = Phase.LEAVING

    def left(self, name: str) -> None:
        """Record that an unload has ended, which frees the capacity, unless a load of the model itself is running."""
        resident = self._residents.get(name)
        if resident is not None and resident.phase is Phase.LEAVING and not _loads_alone(name, resident):
            del self._residents[name]

    def close(self, reason: str, now: float) -> None:
        """Stop loading and unloading, and refuse waiting and later requests with ``reason``."""
        self._closed = reason
        for name in list(self._waiting):
            self._end_waiting(name, unavailable(reason), now)

    # State

    def phase(self, name: str) -> Phase | None:
        resident = self._residents.get(name)
        return None if resident is None else resident.phase

    def residents(self, phase: Phase) -> list[str]:
        """Return the models in a phase."""
        return [name for name, resident in self._residents.items() if resident.phase is phase]

    def waiting(self) -> int:
        """Return the number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    def capacity_used(self) -> Capacity:
        """Return the capacity used by loading, loaded and leaving models."""
        return total(resident.footprint.capacity for resident in self._residents.values())

    @property
    def blocked(self) -> bool:
        """Whether a model waits for capacity."""
        return self._first_without_capacity() is not None

    # Decisions

    def decide(self, now: float) -> list[Decision]:
        """Return the next decisions; carry them out and call this again until it returns none."""
        self._expire(now)
        for name in [name for name in self._waiting if self.phase(name) is Phase.LOADED]:
            self._end_waiting(name, None, now)
        # Resumed requests make their models busy, so they must proceed before a model is chosen for eviction.
        if not self._decided and not self._closed:
            self._allot(now)
        decided, self._decided = self._decided, []
        return decided

    def _allot(self, now: float) -> None:
        self._load_awaited_steps()
        self._update_pending()
        for name, pending_load in self._pending_loads.items():
            if pending_load.footprints is None and name not in self._reading:
                self._reading.add(name)
                self._decided.append(ReadFootprints(name))
        passed: set[str] = set()
        for name, pending_load in list(self._pending_loads.items()):
            # The load of an ensemble removes the pending loads of its steps.
            if pending_load.footprints is None or name not in self._pending_loads:
                continue
            if self._leaving_among(pending_load.footprints):
                passed.update(pending_load.footprints)
            elif not self._try(name, pending_load.since, pending_load.footprints, passed, now):
                break
        self._relieve(now)

    def _load_awaited_steps(self) -> None:
        """Load steps that requests wait for separately as well, because the load of the ensemble may stall."""
        for name in self._waiting:
            resident = self._residents.get(name)
            if resident is not None and resident.phase is Phase.LOADING and not _loads_alone(name, resident):
                resident.loads.add(load := self._new_load(name))
                self._decided.append(load)

    def _new_load(self, name: str) -> Load:
        """Return a load of a model that requests wait for."""
        return Load(name, self._is_called(name))

    def _is_called(self, name: str) -> bool:
        """Whether a model waits for the model."""
        return any(waiter.caller is not None for waiter in self._waiting[name])

    def _update_pending(self) -> None:
        """Update the pending loads: models with waiting requests that are not loading, in order of these requests."""
        names = [name for name in self._waiting if self.phase(name) in (None, Phase.LEAVING)]
        names.sort(key=self._is_called, reverse=True)
        self._pending_loads = {
            name: self._pending_loads.get(name) or _PendingLoad(next(iter(self._waiting[name])).since) for name in names
        }

    def wake_at(self, now: float) -> float | None:
        """Return when to call ``decide`` even without an event (s); None for never."""
        times = [next(iter(waiting)).deadline for waiting in self._waiting.values()]
        first = self._first_without_capacity()
        if first is not None:
            ends = [self._pending_loads[first].since + self.limits.min_loaded]
            ends += [
                self._protected_until(resident)
                for resident in self._residents.values()
                if resident.phase is Phase.LOADED
            ]
            times += [end for end in ends if end > now]
        return min(times, default=None)

    def _first_without_capacity(self) -> str | None:
        """Return the first model that waits for capacity; the models behind it wait too."""
        for name, pending_load in self._pending_loads.items():
            if pending_load.footprints is not None and not self._leaving_among(pending_load.footprints):
                return name
        return None

    def _leaving_among(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.phase(name) is Phase.LEAVING]

    def _try(self, name: str, since: float, footprints: Footprints, passed: Collection[str], now: float) -> bool:
        """Load a model that has waited since ``since``, or evict models for it.

        Returns False if the models behind it must wait. The models in ``passed`` are not evicted, because models ahead
        of it, which do not wait for capacity, need them; nor are its callers, which free no capacity while they wait.
        """
        refusal = self._never_fits(name, footprints)
        if refusal is not None:
            del self._pending_loads[name]
            self._end_waiting(name, refusal, now)
            return True
        missing = {model: footprint for model, footprint in footprints.items() if model not in self._residents}
        needed = total(footprint.capacity for footprint in missing.values())
        if self.capacity_used().plus(needed).within(self.limits.capacity):
            load = self._new_load(name)
            for model, footprint in missing.items():
                self._pending_loads.pop(model, None)
                self._residents[model] = _Resident(footprint, Phase.LOADING, now, {load})
                self.counts.of(model).loads += 1
                self.counts.of(model).returns += self.thrashing.loads(model, now)
            self._decided.append(load)
            return True
        callers = {waiter.caller for waiter in self._waiting[name] if waiter.caller}
        leaving = total(self._residents[caller].footprint.capacity for caller in self._leaving_among(callers))
        turn_over = now >= since + self.limits.min_loaded
        for model in self._choose(needed.plus(leaving), {*footprints, *passed, *callers}, now, turn_over=turn_over):
            self._evict(model, f"to make room for '{name}'", now)
        return False

    def _relieve(self, now: float) -> None:
        """Evict idle models if the loaded models have grown beyond the capacity."""
        if not self._staying().within(self.limits.capacity):
            for model in self._choose(Capacity(), (), now, turn_over=False, partly=True):
                self._evict(model, "because more is loaded than fits", now)

    def _choose(
        self, needed: Capacity, keep: Collection[str], now: float, *, turn_over: bool, partly: bool = False
    ) -> list[str]:
        """Return the models to evict so that ``needed`` fits; empty if it cannot fit.

        ``turn_over``: busy models may be chosen after their minimum time. ``partly``: return the models that can be
        evicted even if they are not enough.
        """
        taken = self._staying().plus(needed)
        chosen: set[str] = set()
        leaving = set(self.residents(Phase.LEAVING))
        while not taken.within(self.limits.capacity):
            model = self._next_to_leave(chosen | set(keep), chosen | leaving, now, turn_over)
            if model is None:
                chosen = chosen if partly else set()
                break
            chosen.add(model)
            taken = taken.minus(self._residents[model].footprint.capacity)
        # The model of an ensemble step is unloaded after the ensembles that need it.
        return [model for model in chosen if not self._held_by(model, self._residents)]

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
            return min(idle, key=lambda candidate: self._last_used(*candidate))[0]
        if turn_over:
            done = [(resident.since, name) for name, resident in free if now >= self._protected_until(resident)]
            return min(done)[1] if done else None
        return None

    def _held_by(self, name: str, holders: Collection[str]) -> bool:
        """Whether an ensemble among ``holders`` needs the model."""
        return any(name in self._residents[holder].footprint.step_models for holder in holders)

    def _protected_until(self, resident: _Resident) -> float:
        """Return the time (s) before which a busy model may not be evicted: its minimum time or its load's duration."""
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

    def _end_load(self, load: Load) -> None:
        """Free the capacity of the models that an ended load did not load, unless another load may still load them."""
        self._interrupted.discard(load)
        for name, resident in list(self._residents.items()):
            if load in resident.loads:
                resident.loads.remove(load)
                if not resident.loads or (name == load.name and resident.phase is Phase.LEAVING):
                    del self._residents[name]

    def _refuse(self, name: str, error: ConchError, now: float) -> None:
        self.back_off.failed(name, error, now)
        self.counts.of(name).failures += 1
        self._end_waiting(name, error, now)

    def _forget(self, waiter: Waiter) -> None:
        waiting = self._waiting.get(waiter.name, {})
        waiting.pop(waiter, None)
        if not waiting:
            self._waiting.pop(waiter.name, None)

    def _end_waiting(self, name: str, error: ConchError | None, now: float) -> None:
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
        if error is None or error.code is not Code.NOT_FOUND:  # clients may send any number of unknown names
            counts = self.counts.of(waiter.name)
            counts.waits += 1
            counts.waited += now - waiter.since
            counts.refused += error is not None

    # Error messages

    def _too_many(self, name: str) -> ConchError | None:
        limit = self.limits.waiting_per_model
        if len(self._waiting.get(name, ())) >= limit:
            whose = f"model '{name}' to be loaded, no more may (--max-load-waiting-per-model)"
        elif self.waiting() >= (limit := self.limits.waiting):
            whose = "models to be loaded, no more may (--max-load-waiting)"
        else:
            return None
        return unavailable(f"{limit} requests are already waiting for {whose}")

    def _never_fits(self, name: str, footprints: Footprints) -> ConchError | None:
        """Return the error if the model does not fit even without all models that may be evicted, else None."""
        stays = {resident for resident in self._residents if resident in self.pinned}
        while more := {
            resident for resident in self._residents if resident not in stays and self._held_by(resident, stays)
        }:
            stays |= more
        used = total(self._residents[stay].footprint.capacity for stay in stays - set(footprints))
        needed = total(
            (self._residents[model].footprint if model in self._residents else footprint).capacity
            for model, footprint in footprints.items()
        )
        if used.plus(needed).within(self.limits.capacity):
            return None
        pinned = " that stay loaded (--load-model)" if stays else ""
        return unavailable(
            f"model '{name}' cannot be loaded: {describe_shortage(needed, used, self.limits.capacity)}{pinned}"
        )

    def _too_late(self, name: str, now: float) -> str:
        late = f"model '{name}' was not loaded within {self.limits.wait:g} s (--load-wait-secs)"
        if self.phase(name) is Phase.LOADING:
            return f"{late}: its load has taken {now - self._residents[name].since:.0f} s so far"
        pending_load = self._pending_loads.get(name)
        if pending_load is None or pending_load.footprints is None:
            return f"{late}: its files are still being read"
        if leaving := self._leaving_among(pending_load.footprints):
            return f"{late}: the last requests of '{leaving[0]}', which is being unloaded, still run"
        first = self._first_without_capacity() or name
        pending_load = self._pending_loads[first]
        assert pending_load.footprints is not None
        missing = [
            footprint.capacity for model, footprint in pending_load.footprints.items() if model not in self._residents
        ]
        cause = describe_shortage(total(missing), self.capacity_used(), self.limits.capacity)
        busy = sum(self._usage.busy(resident) for resident in self.residents(Phase.LOADED))
        before = "" if first == name else f"'{first}' comes first: "
        return (
            f"{late}: {before}{cause}; of these, {busy} are in use, {len(self.pinned & self._residents.keys())} stay "
            f"loaded (--load-model), {len(self.residents(Phase.LOADING))} are being loaded and "
            f"{len(self.residents(Phase.LEAVING))} are leaving"
        )


def _loads_alone(name: str, resident: _Resident) -> bool:
    """Whether one of the loads is that of the model itself, and not of an ensemble."""
    return any(load.name == name for load in resident.loads)
