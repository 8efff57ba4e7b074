"""What tells answers of one model version from those of another one, in caches that outlive both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from conch.config.schema import ModelConfig
from conch.repository import fingerprint as identity
from conch.repository.fingerprint import Dependency, Identity, identity_of, joint_identity

CONFIG = ModelConfig(name="m")
#: The beginning of a load that began after all files were written.
LATER = 1 << 62


def identify(
    places: list[Path],
    config: ModelConfig = CONFIG,
    *dependencies: Dependency,
    began: int = LATER,
    facts: Mapping[str, str] = MappingProxyType({}),
) -> Identity:
    return identity_of(places, 1, config, began=began, facts=facts, dependencies=dependencies)


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """The directories of a model and of its backend."""
    for path in ("m/1/data", "m/2/data", "m/labels.txt", "backend/model.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("old")
    return [tmp_path / "m", tmp_path / "backend"]


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (lambda model, backend: (model / "1" / "data").write_text("new"), True),
        (lambda model, backend: (model / "labels.txt").write_text("new"), True),
        (lambda model, backend: (backend / "model.py").write_text("new"), True),
        (lambda model, backend: (model / "2" / "data").write_text("new"), False),
        (lambda model, backend: os.utime(model / "1" / "data", (1, 1)), False),
    ],
    ids=["version", "model", "backend", "other version", "time of a small file"],
)
def test_files_of_the_version_and_of_its_backend_count(
    places: list[Path], change: Callable[[Path, Path], object], counts: bool
) -> None:
    before = identify(places)
    assert identify(places) == before
    change(*places)
    assert (identify(places) != before) is counts


def test_the_configuration_counts(places: list[Path]) -> None:
    assert identify(places) != identify(places, ModelConfig(name="m", max_batch_size=8))


def test_large_files_count_by_their_time(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "MOST_BYTES_READ", 2)
    before = identify(places)
    os.utime(places[0] / "1" / "data", (1, 1))
    assert identify(places) != before


def elsewhere(places: list[Path], kind: str) -> Dependency:
    """A checkpoint outside of the model's directory: a folder, or one file of it."""
    weights = places[0].parent / "trained" / "weights"
    weights.parent.mkdir(exist_ok=True)
    weights.write_text("old")
    return Dependency("path", str(weights if kind == "file" else weights.parent))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_checkpoint_elsewhere_counts(places: list[Path], kind: str) -> None:
    checkpoint = elsewhere(places, kind)
    before = identify(places, CONFIG, checkpoint)
    assert identify(places) != before == identify(places, CONFIG, checkpoint)
    (places[0].parent / "trained" / "weights").write_text("new")
    assert identify(places, CONFIG, checkpoint) != before and not before.unknown


def test_a_checkpoint_of_the_hub_counts_by_its_commit(places: list[Path]) -> None:
    commits = [Dependency("revision", f"org/name@{commit}") for commit in ("abc", "abd", "abc")]
    first, second, third = (identify(places, CONFIG, commit) for commit in commits)
    assert first == third != second


def test_what_a_model_runs_with_counts(places: list[Path]) -> None:
    assert identify(places, facts={"engine": "torch 2.8"}) != identify(places, facts={"engine": "torch 2.9"})


@pytest.mark.parametrize(
    ("dependency", "unknown"),
    [
        (Dependency("unknown", "'tokenizer' of model.json"), "'tokenizer' of model.json"),
        (Dependency("path", "/nonexistent/weights"), "No such file or directory: /nonexistent/weights"),
    ],
)
def test_what_is_not_known_is_reported(places: list[Path], dependency: Dependency, unknown: str) -> None:
    assert identify(places, CONFIG, dependency).unknown == unknown


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_that_changed_during_the_load_leaves_open_what_was_loaded(places: list[Path], kind: str) -> None:
    newest = max(path.stat().st_ctime_ns for place in places for path in place.rglob("*"))
    assert not identify(places, began=newest).unknown
    assert identify(places, began=1).unknown.startswith("a file that changed while the model was being loaded: ")
    while (checkpoint := elsewhere(places, kind)) and (
        places[0].parent / "trained" / "weights"
    ).stat().st_ctime_ns <= newest:
        pass  # until the clock of the file system has moved
    assert identify(places, CONFIG, checkpoint, began=newest).unknown.startswith("a file that changed")


def test_an_ensemble_answers_from_its_steps() -> None:
    own, old, new = Identity(b"own"), Identity(b"old"), Identity(b"new")
    assert joint_identity(own, [("a", old)]) != joint_identity(own, [("a", new)])
    assert joint_identity(own, [("a", old)]) == joint_identity(own, [("a", old)])
    unknown = joint_identity(own, [("a", old), ("b", Identity(unknown="what other servers run"))]).unknown
    assert unknown == "model 'b', which depends on what other servers run"
