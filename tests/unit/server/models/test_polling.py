"""Which models are loaded again although the files in their directories are the same."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from conch.core.errors import ConchError, invalid, unavailable
from conch.repository.errors import NotFoundError, PollError
from conch.repository.scan import ModelRepository
from conch.server.models.polling import RepositoryPolling, Retries
from tests.unit.server.loads import House, until


def lost(name: str) -> ConchError:
    return PollError.of(name, unavailable("the store is away"), passing=True)


def looks_until_due(retries: Retries) -> int:
    return next(count for count in range(1, 100) if retries.due())


def test_what_could_not_be_downloaded_is_tried_again_less_and_less_often() -> None:
    retries = Retries()
    counts = []
    for _ in range(8):
        retries.note(["m"], {"m": lost("m")})
        counts.append(looks_until_due(retries))
    assert counts == [1, 2, 4, 8, 16, 32, 32, 32]
    retries.note(["m"], {})
    assert not any(retries.due() for _ in range(40))
    retries.note(["m"], {"m": lost("m")})
    assert retries.due() == ["m"]
    assert not any(retries.due() for _ in range(40))  # it is being loaded


def test_what_is_broken_or_gone_is_not_tried_again() -> None:
    retries = Retries()
    retries.note(["broken", "absent", "gone"], {
        "broken": PollError.of("broken", invalid("no configuration")),
        "absent": NotFoundError("absent"),
        "gone": lost("gone"),
    })  # fmt: skip
    retries.forget("gone")
    assert not any(retries.due() for _ in range(40))


def test_what_failed_beside_it_is_tried_again_when_it_is_there() -> None:
    retries = Retries()
    retries.note(["step", "ensemble", "fine"], {"step": lost("step"), "ensemble": invalid("no step")})
    assert retries.due() == ["step"]
    retries.note(["step"], {"step": lost("step")})
    assert [retries.due(), retries.due()] == [[], ["step"]]
    retries.note(["step"], {})
    assert retries.due() == ["ensemble"]
    retries.note(["ensemble"], {"ensemble": invalid("no step")})
    assert not any(retries.due() for _ in range(40))


async def test_model_is_loaded_again_when_its_checkpoint_elsewhere_has_changed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (tmp_path / "models").mkdir()
    house = House(tmp_path / "models")
    house.loader.external["m"] = checkpoint
    house.write("m")
    polling = RepositoryPolling(ModelRepository([house.root]), house.lifecycle, 0.001)
    await polling.record_state()
    await house.lifecycle.load("m")
    polling.start()
    (checkpoint / "model.safetensors").write_text("retrained")
    await until(lambda: len(house.loader.made) == 2)
    polling.stop()


async def test_a_change_that_is_seen_while_the_server_stops_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conch")
    house = House(tmp_path)
    polling = RepositoryPolling(ModelRepository([tmp_path]), house.lifecycle, 0)
    await house.lifecycle.close()
    house.write("m")

    polling.start()
    await until(lambda: "did not load" in caplog.text or "failed" in caplog.text)
    polling.stop()

    assert not [record for record in caplog.records if record.levelno > logging.INFO]
