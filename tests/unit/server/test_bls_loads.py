"""Loads that models request of the server while they are loaded themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from conch.core.errors import ConchError
from conch.server.bls import BlsModels
from tests.unit.fake_clock import settle


class Loads:
    """Loads that last until the test ends."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def load_with(self, name: str, parameters: Mapping[str, object]) -> None:
        self.names.append(name)
        await asyncio.Event().wait()


async def test_load_that_would_wait_for_itself_is_refused_whoever_else_waits() -> None:
    loads = Loads()
    models = BlsModels(loads)  # type: ignore[arg-type]
    waiting = [
        asyncio.create_task(models.load(name, {}, starting))
        for name, starting in (("shared", "first"), ("shared", "second"), ("shared", "second"), ("last", "shared"))
    ]
    await settle()
    assert loads.names == ["shared", "shared", "shared", "last"]
    for name in ("first", "second", "shared", "last"):
        with pytest.raises(ConchError, match=rf"^model '{name}' waits for this load while it is being loaded itself$"):
            await asyncio.wait_for(models.load(name, {}, "last"), 60)
    waiting.pop(1).cancel()
    await settle()
    with pytest.raises(ConchError, match=r"^model 'second' waits for this load"):
        await asyncio.wait_for(models.load("second", {}, "shared"), 60)
    waiting.pop(1).cancel()
    await settle()
    again = asyncio.create_task(models.load("second", {}, "shared"))
    await settle()
    assert loads.names[-1] == "second" and not again.done()
    for task in (*waiting, again):
        task.cancel()
    await asyncio.gather(*waiting, again, return_exceptions=True)
