"""What holds whatever happens: limits, busy and pinned models, and that every request ends in its turn."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from conch.server.models.capacity import Capacity, CapacityLimits, Footprint, Footprints, Phase
from tests.unit.server.town import Town

LIMITS = CapacityLimits(Capacity(models=3, memory=40), min_loaded=5, wait=30)
NEEDS: dict[str, Footprints] = {
    name: {name: Footprint(Capacity(1, size))} for name, size in zip("abcdef", (5, 10, 15, 20, 5, 10), strict=True)
}
NEEDS["ensemble"] = {"ensemble": Footprint(Capacity(), frozenset("ab")), **NEEDS["a"], **NEEDS["b"]}
PINNED = "f"
#: What happens: a request, an unload during a load, the end of a load or departure, a model that begins or ends to be
#: used, time.
EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(sorted(NEEDS))),
    st.tuples(st.sampled_from(["failed", "left", "give up", "unload"]), st.integers(0, 5)),
    st.tuples(st.just("loaded"), st.integers(0, 5)),
    st.tuples(st.sampled_from(["use", "leave be"]), st.sampled_from(sorted(NEEDS))),
    st.tuples(st.just("wait"), st.floats(0, 20)),
)


class Watched(Town):
    """Looks at every departure as it is decided."""

    def on_evict(self, name: str) -> None:
        planner = self.planner
        assert name != PINNED
        assert not any(
            name in NEEDS[holder][holder].step_models
            for holder in NEEDS
            if planner.phase(holder) is not None and holder != name
        ), "a member stays as long as its ensemble"
        if name in self.in_use:
            oldest = min(waiter.since for waiter in self.waiters)
            assert self.now >= oldest + LIMITS.min_loaded, "a busy model leaves after its turn alone"


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, min_size=20, max_size=60))
def test_limits_hold_and_every_request_ends(events: list[tuple[str, object]]) -> None:
    town = Watched(LIMITS, pinned=[PINNED], footprints=NEEDS)
    serials = []
    waiters = []
    town.load("a", PINNED)
    for kind, what in events:
        match kind, what:
            case "ask", str(name):
                if town.planner.phase(name) is not Phase.LOADED and town.planner.refusal(name, town.now) is None:
                    serial, waiter = town.ask(name)
                    serials.append(serial)
                    waiters.append(waiter)
            case (("loaded" | "failed"), int(at)) if town.loading:
                name = town.loading[at % len(town.loading)]
                town.end_load(name, "broken" if kind == "failed" else "")
            case "unload", int(at) if town.loading:
                town.planner.unloaded_during_load(town.loading[at % len(town.loading)], town.now)
                town.decide()
            case "left", int(at) if town.leaving:
                town.end_leaving(town.leaving[at % len(town.leaving)])
            case "give up", int(at) if waiters:
                at %= len(waiters)
                town.planner.withdraw(waiters.pop(at))
                serials.pop(at)
                town.wait(0)
            case "use", str(name) if town.planner.phase(name) is Phase.LOADED:
                town.in_use.add(name)
            case "leave be", str(name):
                town.in_use.discard(name)
                town.wait(0)
            case "wait", float(seconds):
                town.wait(seconds)
        assert town.planner.capacity_used().within(LIMITS.capacity)
    town.in_use.clear()
    for _ in range(100):
        for name in list(town.loading):
            town.end_load(name)
        for name in list(town.leaving):
            town.end_leaving(name)
        town.wait(1)
    assert set(serials) <= town.answers.keys(), "every request ends"
    assert town.planner.waiting() == 0 and not town.planner.blocked


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=30))
def test_models_get_their_turn_in_order_although_all_are_always_in_use(names: list[str]) -> None:
    limits = CapacityLimits(Capacity(models=2), min_loaded=5, wait=1e9)
    town = Town(limits)
    asked: list[str] = []
    for name in names:
        if town.planner.phase(name) is None:
            town.ask(name)
            if name not in asked:
                asked.append(name)
    begun: list[str] = []
    for _ in range(40):
        begun += [name for name in town.loading if name not in begun]
        for name in list(town.loading):
            town.end_load(name)
            town.in_use.add(name)
        town.wait(limits.min_loaded)
        for name in list(town.leaving):
            town.in_use.discard(name)
            town.end_leaving(name)
    assert begun == asked and set(town.answers.values()) == {""}
