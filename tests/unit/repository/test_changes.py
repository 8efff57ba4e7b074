"""Fingerprints of model directories, and what changed between two looks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conch.repository.fingerprint import Fingerprint, take_external, take_fingerprint
from conch.repository.scan import ModelRepository
from conch.server.models.polling import Changes, Watch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "m"
    for path in ("config.pbtxt", "1/model.py", "2/sub/weights.bin", "labels.txt", "configs/big.pbtxt"):
        write(directory / path, "x")
    return directory


def write(path: Path, text: str, time: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time, time))


def differences(before: Fingerprint, after: Fingerprint) -> tuple[bool, list[int], bool]:
    versions = sorted({*before.versions, *after.versions})
    return (
        before.config != after.config,
        [version for version in versions if before.versions.get(version) != after.versions.get(version)],
        before.rest != after.rest,
    )


def test_nothing_changed_gives_the_same_fingerprint(model: Path) -> None:
    assert take_fingerprint(model) == take_fingerprint(model)


@pytest.mark.parametrize(
    ("path", "difference"),
    [
        ("config.pbtxt", (True, [], False)),
        ("1/model.py", (False, [1], False)),
        ("2/sub/weights.bin", (False, [2], False)),
        ("3/model.py", (False, [3], False)),
        ("labels.txt", (False, [], True)),
        ("warmup/data", (False, [], True)),
        ("configs/big.pbtxt", (False, [], False)),
        ("1/__pycache__/model.cpython-311.pyc", (False, [], False)),
        ("1/.model.py.swp", (False, [], False)),
    ],
)
def test_change_is_seen_where_it_is(model: Path, path: str, difference: tuple[bool, list[int], bool]) -> None:
    before = take_fingerprint(model)

    write(model / path, "x", time=2)

    assert differences(before, take_fingerprint(model)) == difference


@pytest.mark.parametrize("name", ["01", "²", "-1"])
def test_file_in_a_directory_that_is_almost_a_number_is_in_no_version(model: Path, name: str) -> None:
    before = take_fingerprint(model)
    write(model / name / "model.py", "x")
    assert differences(before, take_fingerprint(model)) == (False, [], True)


def test_change_of_size_alone_is_seen(model: Path) -> None:
    before = take_fingerprint(model)
    write(model / "1/model.py", "longer")

    assert not before.same_version(take_fingerprint(model), 1)
    assert before.same_version(take_fingerprint(model), 2)


def test_new_empty_version_is_seen(model: Path) -> None:
    before = take_fingerprint(model)
    (model / "7").mkdir()

    assert differences(before, take_fingerprint(model)) == (False, [7], False)


def test_named_configuration_counts_when_it_is_used(model: Path) -> None:
    before = take_fingerprint(model, "big")
    write(model / "configs/big.pbtxt", "y", time=2)

    assert differences(before, take_fingerprint(model, "big")) == (True, [], False)


def test_configuration_does_not_count_as_a_file_of_a_version(model: Path) -> None:
    before = take_fingerprint(model)
    write(model / "config.pbtxt", "y", time=2)

    assert before.same_version(take_fingerprint(model), 1)


def test_links_are_followed_and_loops_end(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "blobs" / "w", "x")
    (model / "1" / "weights").symlink_to(tmp_path / "blobs")
    (model / "1" / "loop").symlink_to(model)
    (model / "1" / "broken").symlink_to(tmp_path / "nope")
    before = take_fingerprint(model)

    write(tmp_path / "blobs" / "w", "y", time=2)

    assert differences(before, take_fingerprint(model)) == (False, [1], False)


def test_watch_reports_what_came_went_and_changed(tmp_path: Path) -> None:
    for name in ("kept", "changed", "gone"):
        write(tmp_path / name / "1" / "model.py", "x")
    watch = Watch(ModelRepository([tmp_path]))

    assert watch.poll() == Changes(added=("changed", "gone", "kept"))
    assert not watch.poll()

    write(tmp_path / "changed" / "1" / "model.py", "x", time=2)
    write(tmp_path / "new" / "1" / "model.py", "x")
    (tmp_path / "gone").rename(tmp_path / ".gone")

    assert watch.poll() == Changes(added=("new",), removed=("gone",), modified=("changed",))
    assert not watch.poll()


def test_model_that_becomes_ambiguous_is_reported_as_modified(tmp_path: Path) -> None:
    write(tmp_path / "one" / "m" / "1" / "model.py", "x")
    (tmp_path / "two").mkdir()
    watch = Watch(ModelRepository([tmp_path / "one", tmp_path / "two"]))
    watch.poll()

    (tmp_path / "two" / "m").mkdir()
    assert watch.poll() == Changes(modified=("m",))
    (tmp_path / "two" / "m").rmdir()
    assert watch.poll() == Changes(modified=("m",))


def test_model_whose_checkpoint_elsewhere_changed_is_modified_once_for_each_change(tmp_path: Path) -> None:
    write(tmp_path / "models" / "m" / "1" / "model.json", "x")
    write(tmp_path / "models" / "n" / "1" / "model.json", "x")
    weights = tmp_path / "checkpoint" / "model.safetensors"
    write(weights, "x")
    loaded = take_external([weights.parent])
    watch = Watch(ModelRepository([tmp_path / "models"]))
    watch.poll()
    assert not watch.poll({"m": loaded, "n": {}})

    write(weights, "x", time=2)
    assert watch.poll({"m": loaded, "n": {}}) == Changes(modified=("m",))
    assert not watch.poll({"m": loaded, "n": {}})  # its load failed, or is under way

    write(weights, "x", time=3)
    assert watch.poll({"m": loaded, "n": {}}) == Changes(modified=("m",))
    assert not watch.poll({"m": take_external([weights.parent])})


def test_external_files_are_single_files_or_folders_or_nothing(tmp_path: Path) -> None:
    file, absent = tmp_path / "model.gguf", tmp_path / "absent"
    write(file, "x")
    found = take_external([file, tmp_path, absent])
    assert found[file] == found[tmp_path] != found[absent] == frozenset()
