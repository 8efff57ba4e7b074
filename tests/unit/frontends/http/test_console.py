"""The console's event stream and pages, with a server that does what a test says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conch.core.errors import Code, ConchError
from conch.frontends import api_keys
from conch.frontends.api_keys import ApiKeys
from conch.frontends.http.console import events
from conch.frontends.http.console.routes import Console
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.loop_budget import YieldingLister
from conch.server.models.states import ModelTable
from conch.server.overview import Overview
from tests.events import until
from tests.unit.frontends.http.site import WrittenConnection


class FakeServer:
    """A server without models of its own; ``models`` are the versions by name."""

    def __init__(self) -> None:
        self.overview = Overview(ModelTable())
        self.settings = SimpleNamespace(id="fake", model_control_mode="none", model_repository=())
        self.ready, self.exiting = True, False
        self.ledger = self.repository = self
        self.models: dict[str, list[Any]] = {}

    def refresh(self) -> None:
        pass

    async def free(self) -> None:
        return None

    async def listed(self) -> list[str]:
        return ["unloaded"]

    def versions_of(self, name: str) -> list[Any]:
        return self.models.get(name, [])


class Page(WrittenConnection):
    """The connection of a page; ``unread`` are the bytes that it has not read."""

    unread = 0
    aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True

    @property
    def events(self) -> list[tuple[str, Any]]:
        text = self.written.partition(b"\r\n\r\n")[2].decode()
        names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
        values = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
        return list(zip(names, values, strict=True))


class Browser:
    """Opens pages of a console."""

    def __init__(self, console: Console) -> None:
        self._handlers = {endpoint.pattern: endpoint.handlers[b"GET"] for endpoint in console.endpoints}

    def open(self, key: str = "") -> tuple[Page, HttpExchange]:
        page = Page()
        headers = {b"authorization": f"Bearer {key}".encode()} if key else {}
        exchange = HttpExchange(page, b"GET", b"/console/events", headers, True)  # type: ignore[arg-type]
        self._handlers["/console/events"](exchange)
        return page, exchange

    def get(self, path: str, name: str, version: int = -1) -> Page:
        page = Page()
        [handler] = [handler for pattern, handler in self._handlers.items() if pattern.endswith(path)]
        handler(HttpExchange(page, b"GET", b"/console/models", {}, True), name, version)  # type: ignore[arg-type]
        return page


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("ada=ka\nbob=kb\n")
    return path


@pytest.fixture
async def browser(server: FakeServer, keys: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Browser]:
    monkeypatch.setattr(events, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(api_keys, "LOOK_SECONDS", 0.0)
    console = Console(server, YieldingLister(), ApiKeys.read(str(keys), {}))  # type: ignore[arg-type]
    console.start()
    yield Browser(console)
    await console.close()


async def test_page_gets_everything_and_then_changes(browser: Browser) -> None:
    page, _ = browser.open("ka")
    assert [name for name, _ in page.events] == ["server", "history", "models"]
    await until(lambda: [data for name, data in page.events if name == "tick" and data["changed"]])
    rows = [row for name, data in page.events if name == "tick" for row in data["changed"]]
    assert rows == [{"key": "unloaded/", "name": "unloaded", "state": ""}]  # once: it does not change again


async def test_page_beyond_the_limit_is_refused_until_another_one_closes(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MOST_PAGES", 2)
    (_, first), (second, _) = browser.open("ka"), browser.open("ka")
    with pytest.raises(ConchError, match="2 pages of the console are open") as refused:
        browser.open("ka")
    assert refused.value.code is Code.UNAVAILABLE
    first.disconnect()
    third, _ = browser.open("ka")
    await until(lambda: all(any(name == "tick" for name, _ in page.events) for page in (second, third)))


async def test_page_that_does_not_read_is_closed_and_others_go_on(browser: Browser) -> None:
    (slow, _), (other, _) = browser.open("ka"), browser.open("ka")
    slow.unread = events.UNREAD_LIMIT + 1
    await until(lambda: slow.aborted)
    assert not other.aborted
    count = len(other.events)
    await until(lambda: len(other.events) > count)


async def test_removed_key_ends_the_streams_of_its_pages(browser: Browser, keys: Path) -> None:
    (ada, _), (bob, _) = browser.open("ka"), browser.open("kb")
    keys.write_text("ada=ka\nada=another\n")
    await until(lambda: bob.ended)
    assert bob.written.endswith(b"0\r\n\r\n")
    count = len(ada.events)
    await until(lambda: len(ada.events) > count)
    assert not ada.ended


async def test_end_of_the_server_ends_all_streams(server: FakeServer) -> None:
    console = Console(server, YieldingLister(), ApiKeys())  # type: ignore[arg-type]
    console.start()
    pages = [Browser(console).open()[0] for _ in range(3)]
    await console.close()
    assert all(page.ended for page in pages)


async def test_server_that_cannot_list_its_repository_goes_on(
    server: FakeServer, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails() -> list[str]:
        raise OSError("no network")

    monkeypatch.setattr(server, "listed", fails)
    page, _ = browser.open("ka")
    await until(lambda: sum(name == "tick" for name, _ in page.events) > 2)


async def test_name_of_models_in_two_repositories_has_no_page(server: FakeServer, browser: Browser) -> None:
    server.models["m"] = [SimpleNamespace(name="m", key=f"/{place}::m", version=1) for place in "ab"]
    with pytest.raises(ConchError, match="There are 2 identifiers of model 'm'"):
        browser.get("/statistics", "m")
    with pytest.raises(ConchError, match="model 'n' is not loaded"):
        browser.get("/statistics", "n")
    with pytest.raises(ConchError, match="model 'm' is not loaded"):
        browser.get("/statistics", "m", 7)
