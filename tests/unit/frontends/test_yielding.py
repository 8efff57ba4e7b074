"""Long enumerations: other work runs in between, and clients are served in rotation."""

import asyncio
from collections.abc import Iterator

import pytest

from conch.frontends import loop_budget as module
from conch.frontends.loop_budget import YieldingLister


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every item takes a whole slice."""
    monkeypatch.setattr(module, "SLICE", 0.0)


@pytest.mark.usefixtures("impatient")
async def test_others_have_turns_while_items_are_gone_through() -> None:
    lister, seen = YieldingLister(), []

    def items() -> Iterator[int]:
        for number in range(5):
            asyncio.get_running_loop().call_soon(seen.append, number)
            yield len(seen)

    assert await lister.all(items()) == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("impatient")
async def test_one_client_is_served_after_the_other() -> None:
    lister, seen = YieldingLister(), []

    def items(client: str) -> Iterator[str]:
        for _ in range(3):
            seen.append(client)
            yield client

    await asyncio.gather(*(lister.all(items(client)) for client in "abc"))
    assert "".join(seen) == "aaabbbccc"


async def test_a_client_that_fails_or_is_gone_does_not_keep_the_others() -> None:
    lister = YieldingLister()
    gone = asyncio.ensure_future(lister.one(asyncio.sleep(3600)))
    failing = asyncio.ensure_future(lister.all(1 // number for number in (0,)))
    last = asyncio.ensure_future(lister.all("x"))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(ZeroDivisionError):
        await failing
    assert await last == ["x"]


async def test_no_enumeration_waits_for_work_that_hangs() -> None:
    lister = YieldingLister()
    hangs = asyncio.ensure_future(lister.one(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert await lister.all("x") == ["x"]
    hangs.cancel()
