"""Which models load and leave, one event at a time."""

from __future__ import annotations

from conch.core.errors import ConchError, not_found
from conch.server.models.capacity import Capacity, CapacityLimits, Footprint, Phase
from tests.unit.server.town import ONE, Town

TWO = CapacityLimits(Capacity(models=2), min_loaded=10, wait=60, waiting=5, waiting_per_model=3)
ENSEMBLE = {"all": {"all": Footprint(Capacity(), frozenset({"a", "b"})), "a": ONE, "b": ONE}}


def test_requests_for_one_model_share_its_load() -> None:
    town = Town(TWO)
    first, _ = town.ask("a")
    second, _ = town.ask("a")
    assert town.loading == ["a"]
    town.end_load("a")
    assert (town.answers, town.loaded()) == ({first: "", second: ""}, ["a"])


def test_least_recently_used_idle_model_makes_room() -> None:
    town = Town(TWO)
    town.load("a", "b")
    town.wait(20)
    town.used_at["a"] = 15
    serial, _ = town.ask("c")
    assert (town.leaving, town.loading) == (["b"], [])
    town.end_leaving("b")
    town.end_load("c")
    assert town.loaded() == ["a", "c"] and town.answers[serial] == ""


def test_model_that_was_loaded_just_now_counts_as_used_just_now() -> None:
    town = Town(TWO)
    town.load("a")
    town.wait(20)
    town.load("b")
    town.used_at["a"] = 20.5
    town.ask("c")
    assert town.leaving == ["a"]


def test_model_that_is_used_again_and_again_stays_longer_than_one_that_was_loaded_later() -> None:
    town = Town(TWO)
    town.load("hot", "b")
    town.wait(1)
    town.used_at["hot"] = town.now
    town.ask("c")
    assert town.leaving == ["b"]


def test_busy_model_stays_until_it_is_idle() -> None:
    town = Town(TWO)
    town.load("a", "b")
    town.in_use = {"a", "b"}
    town.ask("c")
    assert town.leaving == [] and town.planner.blocked
    town.in_use = {"b"}
    town.wait(1)
    assert town.leaving == ["a"]


def test_model_that_is_never_idle_is_evicted_after_its_minimum_time() -> None:
    town = Town(TWO)
    town.load("a", "b")
    town.wait(20)
    town.in_use = {"a", "b"}
    town.ask("c")
    assert town.planner.wake_at(town.now) == town.now + 10
    town.wait(9.9)
    assert town.leaving == []
    town.wait(0.1)
    assert town.leaving == ["a"]
    town.ask("a")  # its own requests queue behind the one that has waited
    town.in_use.discard("a")
    town.end_leaving("a")
    assert town.loading == ["c"]


def test_model_in_use_keeps_its_place_as_long_as_its_load_took() -> None:
    town = Town(CapacityLimits(Capacity(models=1), min_loaded=10, wait=1000))
    town.ask("slow")
    town.wait(50)
    town.end_load("slow")
    town.in_use = {"slow"}
    town.ask("b")
    town.wait(49.9)
    assert town.leaving == []
    assert town.planner.wake_at(town.now) == 100
    town.wait(0.1)
    assert town.leaving == ["slow"]


def test_pinned_model_never_leaves() -> None:
    town = Town(TWO, pinned=["a"])
    town.load("a", "b")
    town.wait(20)
    town.used_at["b"] = 22
    town.ask("c")
    assert town.leaving == ["b"]


def test_models_load_in_the_order_in_which_they_were_asked_for() -> None:
    large = {"large": Footprint(Capacity(models=1, memory=90))}
    town = Town(CapacityLimits(Capacity(memory=100)), footprints={"large": large})
    town.load("a", "b")
    town.in_use = {"a", "b"}
    town.ask("large")
    town.ask("c")
    assert town.loading == [], "the small one does not overtake the large one, for which room is being made"
    town.in_use = set()
    town.wait(0.1)
    town.end_leaving("a")
    town.end_leaving("b")
    assert town.loading == ["large", "c"]


def test_request_that_waits_too_long_is_told_the_sum() -> None:
    town = Town(CapacityLimits(Capacity(models=2), min_loaded=1000, wait=60), pinned=["a"])
    town.load("a", "b")
    town.in_use = {"a", "b"}
    first, _ = town.ask("c")
    town.wait(30)
    second, _ = town.ask("d")
    town.wait(30)
    reason = "1 model and 2 others are more than --max-loaded-models=2"
    whole = "2 are in use, 1 stay loaded (--load-model), 0 are being loaded and 0 are leaving"
    late = "was not loaded within 60 s (--load-wait-secs)"
    assert town.answers[first] == f"model 'c' {late}: {reason}; of these, {whole}"
    town.ask("e")
    town.wait(30)
    assert town.answers[second] == f"model 'd' {late}: {reason}; of these, {whole}"


def test_request_that_waits_behind_another_model_is_told_which() -> None:
    town = Town(CapacityLimits(Capacity(models=1), min_loaded=1000, wait=60))
    town.load("a")
    town.in_use = {"a"}
    town.ask("b")
    serial, _ = town.ask("c")
    town.ask("b")
    town.wait(60)
    assert "(--load-wait-secs): 'b' comes first: 1 model and 1 others are more than" in town.answers[serial]


def test_request_that_waits_for_a_load_too_long_is_told_so_and_the_load_continues() -> None:
    town = Town(TWO)
    serial, _ = town.ask("a")
    town.wait(60)
    assert town.answers[serial].endswith("its load has taken 60 s so far")
    town.end_load("a")
    assert town.loaded() == ["a"]


def test_model_larger_than_the_budget_is_refused_at_once() -> None:
    footprints = {"large": {"large": Footprint(Capacity(1, 3 << 30))}}
    town = Town(CapacityLimits(Capacity(memory=2 << 30)), footprints=footprints)
    serial, _ = town.ask("large")
    assert town.answers[serial] == "model 'large' cannot be loaded: 3072 MiB are more than --memory-budget=2048 MiB"


def test_pinned_models_that_leave_no_room_are_named_in_the_refusal() -> None:
    town = Town(CapacityLimits(Capacity(models=1)), pinned=["a"])
    town.load("a")
    serial, _ = town.ask("b")
    assert town.answers[serial] == (
        "model 'b' cannot be loaded: 1 model and 1 others are more than --max-loaded-models=1 that stay loaded "
        "(--load-model)"
    )


def test_requests_that_wait_are_bounded_per_model_and_over_all() -> None:
    town = Town(TWO)
    for name in ("a", "a", "a"):
        town.ask(name)
    refusal = town.planner.refusal("a", town.now)
    assert refusal is not None and "(--max-load-waiting-per-model)" in refusal.message
    assert town.planner.refusal("b", town.now) is None
    town.ask("b")
    town.ask("b")
    refusal = town.planner.refusal("c", town.now)
    assert refusal is not None and refusal.message.endswith("no more may (--max-load-waiting)")


def test_load_that_fails_fails_what_waits_and_is_not_tried_again_at_once() -> None:
    town = Town(TWO)
    serial, _ = town.ask("a")
    town.end_load("a", error="no such file")
    assert town.answers[serial] == "no such file"
    refusal = town.planner.refusal("a", town.now)
    assert refusal is not None
    assert refusal.message == "model 'a' failed to load, and is tried again in 1 s: no such file"
    town.wait(1)
    assert town.planner.refusal("a", town.now) is None
    town.ask("a")
    town.end_load("a", error="still no such file")
    refusal = town.planner.refusal("a", town.now)
    assert refusal is not None
    assert refusal.message == "model 'a' failed to load 2 times, and is tried again in 2 s: still no such file"
    town.wait(2)
    town.load("a")
    assert town.planner.back_off.failing(town.now) == []


def test_failed_load_leaves_its_room_to_others() -> None:
    town = Town(CapacityLimits(Capacity(models=1)))
    town.ask("a")
    town.ask("b")
    assert town.loading == ["a"]
    town.end_load("a", error="broken")
    assert town.loading == ["b"]


def test_unknown_model_is_remembered_nowhere() -> None:
    town = Town(TWO)
    town.unknown.add("nobody")
    serial, _ = town.ask("nobody")
    assert town.answers[serial] == "there is no 'nobody'"
    assert town.planner.counts.models == {} and town.planner.refusal("nobody", town.now) is None


def test_load_that_is_no_longer_awaited_does_not_begin() -> None:
    town = Town(CapacityLimits(Capacity(models=1)))
    town.load("a")
    town.in_use = {"a"}
    _, waiter = town.ask("b")
    town.planner.withdraw(waiter)
    town.in_use = set()
    town.wait(1)
    assert (town.leaving, town.loading, town.planner.blocked) == ([], [], False)


def test_model_that_is_leaving_is_loaded_again_when_it_has_left() -> None:
    town = Town(TWO)
    town.load("a", "b")
    town.wait(20)
    town.ask("c")
    assert town.leaving == ["a"]
    serial, _ = town.ask("a")
    town.end_leaving("a")
    assert town.loading == ["c"] and town.leaving == ["b"]
    town.end_leaving("b")
    town.end_load("c")
    town.end_load("a")
    assert town.answers[serial] == ""


def test_ensemble_brings_its_members_and_keeps_them() -> None:
    town = Town(CapacityLimits(Capacity(models=3)), footprints=ENSEMBLE)
    town.load("all")
    assert town.loaded() == ["a", "all", "b"] and town.planner.capacity_used().models == 2
    town.wait(100)
    town.load("c")
    town.wait(100)
    town.in_use = {"all"}
    town.ask("d")
    assert town.leaving == ["c"], "members of an ensemble in use stay, however long they have not been used"


def test_idle_ensemble_leaves_before_its_members() -> None:
    town = Town(CapacityLimits(Capacity(models=2)), footprints=ENSEMBLE)
    town.load("all")
    town.wait(100)
    town.ask("c")
    assert town.leaving == ["all"]
    town.end_leaving("all")
    assert len(town.leaving) == 1 and town.leaving[0] in ("a", "b")
    town.end_leaving(town.leaving[0])
    assert town.loading == ["c"]


def test_member_of_a_failed_ensemble_that_was_asked_for_itself_gets_its_own_load() -> None:
    town = Town(CapacityLimits(Capacity(models=3)), footprints=ENSEMBLE)
    town.ask("all")
    serial, _ = town.ask("a")
    assert town.loading == ["all", "a"]
    town.loading.remove("all")
    town.serve("b")
    town.planner.failed(town.loads["all"], not_found("broken"), town.now)
    town.decide()
    assert town.loading == ["a"] and town.loaded() == ["b"]
    town.end_load("a")
    assert town.answers[serial] == ""


def test_step_that_a_request_waits_for_loads_while_its_ensemble_stalls() -> None:
    town = Town(CapacityLimits(Capacity(models=2)), footprints=ENSEMBLE)
    whole, _ = town.ask("all")
    early, _ = town.ask("a")
    late, _ = town.ask("a")
    assert town.loading == ["all", "a"]
    town.end_load("a")
    assert town.answers == {early: "", late: ""}
    town.end_load("all")
    assert town.answers[whole] == "" and town.loaded() == ["a", "all", "b"]


def test_step_that_does_not_load_keeps_its_room_while_its_ensemble_loads() -> None:
    town = Town(CapacityLimits(Capacity(models=2)), footprints=ENSEMBLE)
    town.ask("all")
    serial, _ = town.ask("a")
    town.end_load("a", "broken")
    assert town.answers == {serial: "broken"} and town.planner.capacity_used().models == 2
    town.planner.failed(town.loads["all"], not_found("'a' is not loaded"), town.now)
    assert town.planner.capacity_used().models == 0


def test_step_that_was_unloaded_during_its_load_loads_again_while_its_ensemble_stalls() -> None:
    town = Town(CapacityLimits(Capacity(models=2)), footprints=ENSEMBLE)
    town.ask("all")
    town.ask("a")
    town.planner.unloaded_during_load("a", town.now)
    serial, _ = town.ask("a")
    town.planner.left("a")
    town.decide()
    assert town.loading == ["all", "a"]
    town.end_load("a", "unloaded")
    assert town.loading == ["all", "a"] and serial not in town.answers
    town.end_load("a")
    assert town.answers[serial] == ""
    town.end_load("all", "'a' was unloaded")
    assert town.loading == ["all"], "the unload has ended this load too"


def test_load_that_ends_after_its_model_was_loaded_again_changes_nothing() -> None:
    town = Town(CapacityLimits(Capacity(models=1)))
    town.ask("a")
    old = town.loads["a"]
    town.serve("a")
    town.ask("b")
    town.end_leaving("a")
    town.end_load("b")
    serial, _ = town.ask("a")
    town.end_leaving("b")
    for end in (lambda: town.planner.loaded(old), lambda: town.planner.failed(old, not_found("no"), town.now)):
        end()
        town.decide()
        assert town.loading == ["a", "a"] and town.planner.capacity_used().models == 1
        assert serial not in town.answers and town.planner.refusal("a", town.now) is None


def test_load_that_an_unload_ended_is_not_counted_as_a_failure() -> None:
    town = Town(TWO)
    early, _ = town.ask("a")
    town.planner.unloaded_during_load("a", town.now)
    late, _ = town.ask("a")
    assert town.answers == {early: "load failed for model 'a': the model was unloaded during the load"}
    assert town.loading == ["a"]
    town.end_load("a", "unloaded")
    assert town.planner.refusal("a", town.now) is None and town.loading == ["a"]
    town.end_load("a")
    assert town.answers[late] == ""


def test_ensemble_whose_member_was_unloaded_during_its_load_is_loaded_again() -> None:
    town = Town(CapacityLimits(Capacity(models=3)), footprints=ENSEMBLE)
    serial, _ = town.ask("all")
    town.planner.unloaded_during_load("a", town.now)
    town.end_load("all", "'a' is not loaded")
    assert town.loading == ["all"] and town.planner.phase("a") is Phase.LOADING
    town.end_load("all")
    assert town.answers[serial] == "" and town.loaded() == ["a", "all", "b"]


def test_models_that_grow_beyond_the_budget_lose_an_idle_one() -> None:
    town = Town(CapacityLimits(Capacity(memory=25)))
    town.load("a", "b")
    town.wait(100)
    town.in_use = {"a"}
    town.planner.measured("a", Capacity(1, 20))
    town.wait(1)
    assert town.leaving == ["b"]


def test_models_that_come_and_go_are_counted_and_warned_of_once_a_minute() -> None:
    town = Town(CapacityLimits(Capacity(models=1)))
    town.load("a")
    warnings = []
    for _ in range(5):
        for name in ("b", "a"):
            town.ask(name)
            town.end_leaving(town.leaving[0])
            town.end_load(name)
            town.wait(1)
            warnings.append(town.planner.thrashing.warning(town.now))
    (warning,) = filter(None, warnings)
    assert warning.startswith(
        "models are evicted and reloaded too often: within 60 s, 6 loads were of models that had just made room"
    )
    counts = town.planner.counts.of("a")
    assert (counts.loads, counts.evictions, counts.returns, counts.waits) == (6, 5, 5, 6)


def test_what_waits_when_the_server_stops_is_refused() -> None:
    town = Town(TWO)
    serial, _ = town.ask("a")
    town.planner.close("stopping", town.now)
    town.decide()
    assert town.answers[serial] == "stopping" and town.planner.waiting() == 0


def test_request_that_comes_when_the_server_stops_is_refused() -> None:
    town = Town(TWO)
    town.planner.close("stopping", town.now)
    serial, _ = town.ask("a")
    assert town.answers[serial] == "stopping" and (town.loading, town.planner.waiting()) == ([], 0)


def test_other_models_load_while_the_files_of_one_are_read() -> None:
    town = Town(TWO)
    town.slow = {"stored"}
    serial, _ = town.ask("stored")
    town.load("a", "b")
    town.ask("c")
    assert town.leaving == ["a"], "others make room as well"
    town.end_leaving("a")
    town.end_load("c")
    town.end_reading("stored")
    assert town.leaving == ["b"] and town.planner.blocked
    town.end_leaving("b")
    town.end_load("stored")
    assert town.answers[serial] == "" and town.loaded() == ["c", "stored"]


def test_model_whose_files_have_been_read_has_the_place_of_its_first_request() -> None:
    town = Town(CapacityLimits(Capacity(models=1)))
    town.load("a")
    town.in_use = {"a"}
    town.slow = {"stored"}
    town.ask("stored")
    town.ask("b")
    town.end_reading("stored")
    town.in_use = set()
    town.wait(1)
    town.end_leaving("a")
    assert town.loading == ["stored"]


def test_files_that_take_longer_than_requests_wait_are_read_once() -> None:
    town = Town(CapacityLimits(Capacity(models=1), wait=60))
    town.slow = {"stored"}
    answers = []
    for _ in range(4):
        first, _ = town.ask("stored")
        second, _ = town.ask("stored")
        town.wait(60)
        answers += [town.answers[first], town.answers[second]]
    assert town.reading == ["stored"]
    assert set(answers) == {
        "model 'stored' was not loaded within 60 s (--load-wait-secs): its files are still being read"
    }
    serial, _ = town.ask("stored")
    town.end_reading("stored")
    town.end_load("stored")
    assert town.answers[serial] == ""


def test_files_that_cannot_be_read_are_not_read_for_every_request() -> None:
    town = Town(TWO)
    town.slow = {"a"}
    serial, _ = town.ask("a")
    town.reading.remove("a")
    town.planner.unreadable("a", not_found("no disk"), town.now)
    town.decide()
    assert town.answers[serial] == "no disk"
    refusal = town.planner.refusal("a", town.now)
    assert refusal is not None and "is tried again in 1 s: no disk" in refusal.message
    town.wait(1)
    town.ask("a")
    assert town.reading == ["a"]


def test_request_that_comes_while_its_model_is_being_unloaded_is_served_when_it_has_left() -> None:
    town = Town(TWO)
    town.load("a")
    answers: list[ConchError | None] = []
    town.planner.ask("a", answers.append, town.now)
    town.planner.leaves("a")
    town.decide()
    assert town.loading == []
    town.planner.left("a")
    town.decide()
    town.end_load("a")
    assert answers == [None]


def test_model_whose_last_requests_run_for_long_keeps_no_others_waiting() -> None:
    town = Town(CapacityLimits(Capacity(models=2), wait=60))
    town.load("a")
    town.planner.leaves("a")
    serial, _ = town.ask("a")
    other, _ = town.ask("b")
    town.end_load("b")
    assert town.answers[other] == ""
    town.wait(60)
    assert town.answers[serial] == (
        "model 'a' was not loaded within 60 s (--load-wait-secs): the last requests of 'a', which is being unloaded, "
        "still run"
    )


def test_members_of_an_ensemble_that_waits_for_one_of_them_to_leave_are_kept_for_it() -> None:
    town = Town(CapacityLimits(Capacity(models=2)), footprints=ENSEMBLE)
    town.load("a", "b")
    town.planner.leaves("a")
    town.ask("all")
    town.ask("c")
    town.ask("d")
    assert town.leaving == []
    town.planner.left("a")
    town.decide()
    assert town.loading == ["all"]


def test_request_for_a_member_continues_when_it_serves_though_its_ensemble_still_loads() -> None:
    town = Town(CapacityLimits(Capacity(models=3)), footprints=ENSEMBLE)
    whole, _ = town.ask("all")
    serial, _ = town.ask("a")
    town.serve("a")
    assert town.answers == {serial: ""}
    town.wait(30)
    town.ask("c")
    town.ask("d")
    assert town.leaving == [], "it stays for the ensemble"
    town.end_load("all")
    assert town.answers[whole] == ""
