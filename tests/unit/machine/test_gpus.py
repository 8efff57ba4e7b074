from pathlib import Path

import pytest

from conch.config.pbtxt import parse
from conch.machine.facts import environment_for, visible_gpus
from conch.server.execution.starting import WorkerPlacement, compare_placements, placements_of


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    return tmp_path / "gpus"


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, (0, 1, 2, 3)), ("2,3", (0, 1)), ("", ()), ("-1", ()), ("1,-1,2", (0,))]
)
def test_gpus_are_numbered_as_cuda_does(driver: Path, visible: str | None, gpus: tuple[int, ...]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environment, driver) == gpus


def test_machine_without_a_driver_has_no_gpus(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path / "absent") == ()


@pytest.mark.parametrize(
    ("visible", "gpu", "seen"), [(None, 1, "1"), ("2,3", 1, "3"), ("GPU-abc,GPU-def", 0, "GPU-abc")]
)
def test_instance_sees_its_device_alone(visible: str | None, gpu: int, seen: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment_for(gpu, environment)["CUDA_VISIBLE_DEVICES"] == seen


def test_instances_are_numbered_within_their_group() -> None:
    config = parse(
        'backend: "python" '
        'instance_group [{name: "a" kind: KIND_GPU count: 2 gpus: [0, 1]}, {name: "b" kind: KIND_CPU count: 1}]',
        "x",
    )
    assert list(placements_of(config)) == [
        WorkerPlacement("a_0", "GPU", 0),
        WorkerPlacement("a_1", "GPU", 0),
        WorkerPlacement("a_2", "GPU", 1),
        WorkerPlacement("a_3", "GPU", 1),
        WorkerPlacement("b_0", "CPU", 0),
    ]


def test_instances_of_a_native_backend_share_a_worker_on_each_device() -> None:
    config = parse(
        'backend: "huggingface" '
        'instance_group [{name: "a" kind: KIND_GPU count: 2 gpus: [0, 1]}, {name: "b" kind: KIND_CPU count: 3}]',
        "x",
    )
    assert list(placements_of(config)) == [
        WorkerPlacement("a_0", "GPU", 0, count=2),
        WorkerPlacement("a_2", "GPU", 1, count=2),
        WorkerPlacement("b_0", "CPU", 0, count=3),
    ]


def placement(name: str, kind: str = "CPU", signature: bytes = b"") -> WorkerPlacement:
    return WorkerPlacement(name, kind, signature=signature)


def test_workers_run_on_under_their_names_where_equal_ones_are_wanted() -> None:
    running = [placement("a_0"), placement("b_0", "MODEL")]

    kept, new = compare_placements(running, [placement("b_0"), placement("c_0", "MODEL"), placement("c_1", "MODEL")])

    assert kept == running
    assert new == [placement("c_1", "MODEL")]


def test_new_worker_never_has_the_name_of_one_that_runs_on() -> None:
    kept, new = compare_placements([placement("a_0")], [placement("b_0"), placement("a_0", "MODEL")])

    assert kept == [placement("a_0")]
    assert new == [placement("b_0", "MODEL")]


def test_worker_with_other_resources_is_another_one() -> None:
    kept, new = compare_placements([placement("a_0", signature=b"1")], [placement("a_0", signature=b"2")])

    assert not kept
    assert new == [placement("a_0", signature=b"2")]
