"""What tells answers of one model version from those of another one, in caches that outlive both."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conch.config.schema import ModelConfig
from conch.repository import identity
from conch.repository.identity import identity_of

CONFIG = ModelConfig(name="m")


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
    before = identity_of(places, 1, CONFIG)
    assert identity_of(places, 1, CONFIG) == before
    change(*places)
    assert (identity_of(places, 1, CONFIG) != before) is counts


def test_the_configuration_counts(places: list[Path]) -> None:
    assert identity_of(places, 1, CONFIG) != identity_of(places, 1, ModelConfig(name="m", max_batch_size=8))


def test_large_files_count_by_their_time(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_MOST_BYTES_READ", 2)
    before = identity_of(places, 1, CONFIG)
    os.utime(places[0] / "1" / "data", (1, 1))
    assert identity_of(places, 1, CONFIG) != before
