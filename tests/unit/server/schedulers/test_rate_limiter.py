"""Instances that share resources: who runs, in which order, and never more than there is for."""

import pytest

from conch.core.errors import ConchError
from conch.options.triton_values import Resource
from conch.server.schedulers.rate_limiter import GLOBAL, InstanceRateLimiter, LimitedInstance, ResourceKey

R = ResourceKey(0, "R")


class Fleet:
    """Instances by name, and which have been let run, in order; they run until the test ends them."""

    def __init__(self, *given: Resource) -> None:
        self.limiter = InstanceRateLimiter(given)
        self.instances: dict[str, LimitedInstance] = {}
        self.ran: list[str] = []
        self.idle: set[str] = set()

    def add(self, name: str, needs: dict[ResourceKey, int], priority: int = 0) -> LimitedInstance:
        def run() -> bool:
            if name in self.idle:
                return False
            self.ran.append(name)
            return True

        instance = LimitedInstance(needs, priority, run)
        self.limiter.register([instance])
        self.instances[name] = instance
        return instance

    def stage(self, *names: str) -> list[str]:
        """Stage instances one after the other; which have run since then."""
        before = len(self.ran)
        for name in names:
            self.limiter.stage(self.instances[name])
            self.limiter.attempt()
        return self.ran[before:]

    def end(self, name: str, *staged: str) -> list[str]:
        before = len(self.ran)
        self.limiter.release(self.instances[name])
        for one in staged:
            self.limiter.stage(self.instances[one])
        self.limiter.attempt()
        return self.ran[before:]


def test_instances_run_side_by_side_as_far_as_their_resources_go() -> None:
    fleet = Fleet(Resource("R", 5, 0))
    for name, need in (("a", 2), ("b", 3), ("c", 1)):
        fleet.add(name, {R: need})
    assert fleet.stage("a", "b", "c") == ["a", "b"]
    assert fleet.end("a") == ["c"]


def test_without_amounts_there_is_as_much_as_the_largest_instance_takes() -> None:
    fleet = Fleet()
    fleet.add("a", {R: 4})
    fleet.add("b", {R: 3})
    assert fleet.limiter.pool == {R: 4}
    assert fleet.stage("a", "b") == ["a"]
    assert fleet.end("a") == ["b"]


def test_large_instance_is_not_starved_by_small_ones() -> None:
    fleet = Fleet(Resource("R", 4, -1))
    fleet.add("small", {R: 1})
    fleet.add("large", {R: 4})
    fleet.add("other", {R: 1}, priority=9).executions = 1
    assert fleet.stage("small", "large", "other") == ["small"]
    assert fleet.end("small", "small") == ["large"]
    assert fleet.end("large") == ["small", "other"]


def test_instance_of_priority_two_runs_half_as_often() -> None:
    fleet = Fleet()
    fleet.add("one", {R: 1}, priority=1)
    fleet.add("two", {R: 1}, priority=2)
    ran = fleet.stage("one", "two")
    for _ in range(11):
        ran += fleet.end(ran[-1], ran[-1])
    assert (ran.count("one"), ran.count("two")) == (8, 4)


def test_resource_of_one_device_does_not_limit_another_and_a_global_one_does() -> None:
    fleet = Fleet()
    for name, device in (("a", 0), ("b", 1), ("c", 2)):
        needs = {ResourceKey(device, "R"): 1}
        fleet.add(name, needs if name == "a" else {**needs, ResourceKey(GLOBAL, "G"): 1})
    assert fleet.stage("a", "b", "c") == ["a", "b"]
    assert fleet.end("b") == ["c"]


def test_instance_that_has_nothing_to_run_gives_its_turn_away() -> None:
    fleet = Fleet()
    fleet.add("a", {R: 1})
    fleet.add("b", {R: 1})
    fleet.idle.add("a")
    assert fleet.stage("a", "b") == ["b"]
    assert fleet.instances["a"].executions == 0


def test_instances_that_go_away_give_back_what_they_have() -> None:
    fleet = Fleet(Resource("R", 2, 0))
    fleet.add("a", {R: 2})
    fleet.add("b", {R: 1})
    assert fleet.stage("a", "b") == ["a"]
    fleet.limiter.unregister([fleet.instances["a"]])
    assert fleet.ran == ["a", "b"]
    fleet.limiter.release(fleet.instances["a"])  # its batch ends after its model has been abandoned
    assert fleet.end("b") == []


@pytest.mark.parametrize(
    ("given", "needs", "error"),
    [
        ([Resource("R", 3, -1)], [{R: 4}],
         'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model instances, the '
         "minimum required count is 4"),
        ([Resource("R", 9, 1)], [{R: 4}], 'Resource count for "R" is limited to 0'),
        ([Resource("R", 9, 0)], [{ResourceKey(GLOBAL, "G"): 1}], 'Resource count for "G" is limited to 0'),
        ([], [{R: 1}, {ResourceKey(GLOBAL, "R"): 1}],
         'Resource "R" is present as both global and device-specific resource in the model configuration.'),
    ],
)  # fmt: skip
def test_instances_that_could_never_run_are_refused(
    given: list[Resource], needs: list[dict[ResourceKey, int]], error: str
) -> None:
    limiter = InstanceRateLimiter(given)
    *first, last = [LimitedInstance(need, 0, lambda: True) for need in needs]
    limiter.register(first)
    before = dict(limiter.pool)
    with pytest.raises(ConchError, match=error):
        limiter.register([last])
    assert dict(limiter.pool) == before


def test_most_that_is_given_of_a_resource_counts() -> None:
    fleet = Fleet(Resource("R", 3, 0), Resource("R", 5, -1), Resource("G", 2, 0), Resource("G", 7, 3))
    fleet.add("a", {R: 1, ResourceKey(GLOBAL, "G"): 1})
    assert fleet.limiter.pool == {R: 5, ResourceKey(GLOBAL, "G"): 7}
