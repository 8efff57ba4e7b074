"""What loads need, before anything is loaded."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from conch.config.schema import ModelConfig
from conch.repository.errors import NotFoundError, PollError
from conch.repository.model_files import ModelFiles
from conch.repository.scan import ModelRepository
from conch.server.models.capacity import Capacity, Footprint
from conch.server.models.memory import MemoryLedger
from conch.server.models.on_demand import LoadFootprints
from tests.unit.server.loads import House

MIB = 1 << 20


def footprints(house: House) -> LoadFootprints:
    return LoadFootprints(ModelRepository([house.root]), MemoryLedger(house.table))


async def test_model_needs_a_place_and_the_memory_of_its_worker_and_its_weights(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.write("m")
    (tmp_path / "m" / "1" / "model.safetensors").write_bytes(bytes(MIB))
    assert await footprints(house).of("m") == {"m": Footprint(Capacity(models=1, memory=33 * MIB))}


async def test_ensemble_needs_its_members_and_nothing_itself(tmp_path: Path) -> None:
    house = House(tmp_path)
    for name in ("a", "b"):
        house.write(name)
    house.write_ensemble("inner", "a", "b")
    house.write_ensemble("outer", "inner", "a", "missing")
    one = Footprint(Capacity(models=1, memory=32 * MIB))
    assert await footprints(house).of("outer") == {
        "outer": Footprint(Capacity(), frozenset({"inner", "a", "missing"})),
        "inner": Footprint(Capacity(), frozenset({"a", "b"})),
        "a": one,
        "b": one,
    }


async def test_model_that_does_not_exist_is_distinguished_from_one_that_is_wrong(tmp_path: Path) -> None:
    house = House(tmp_path)
    with pytest.raises(NotFoundError):
        await footprints(house).of("nobody")
    house.write("wrong", "no configuration")
    with pytest.raises(PollError, match="Poll failed for model directory 'wrong': "):
        await footprints(house).of("wrong")


class StaleRepository(ModelRepository):
    """On a network file system that has lost it."""

    def describe(self, name: str, override: ModelConfig | None = None) -> ModelFiles:
        raise OSError(errno.ESTALE, "Stale file handle")


async def test_model_whose_files_cannot_be_read_is_left_to_its_load(tmp_path: Path) -> None:
    footprints = LoadFootprints(StaleRepository([tmp_path]), MemoryLedger(House(tmp_path).table))
    assert await footprints.of("m") == {"m": Footprint(Capacity(models=1))}


async def test_loaded_model_needs_what_it_was_measured_to_take(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.write("m")
    await house.lifecycle.load("m")
    model = house.table.find("m")
    assert footprints(house).measured([model]).capacity.models == 1
    assert footprints(house).measured([model]).capacity.memory == model.statistics.memory.host
