"""The screen of ``conch top``, with a server that the test plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from textual.widgets import DataTable, Input, Static

from conch.core.errors import unavailable
from conch.measure.top.counts import read_counts
from conch.measure.top.screen import TopApp
from conch.measure.top.source import TopReading

pytestmark = pytest.mark.extras

MODEL = (
    'nv_inference_request_success{{model="{name}",version="1"}} {count}\n'
    'nv_inference_request_duration_us{{model="{name}",version="1"}} {time}\n'
    'nv_inference_queue_duration_us{{model="{name}",version="1"}} {time}\n'
    'conch_model_memory_bytes{{model="{name}",version="1",kind="workers"}} 1048576\n'
    'conch_model_ready{{model="{name}",version="1"}} 1\n'
)


class PlayedServer:
    """A server with the models ``fast`` and ``slow``, whose counters grow with each reading."""

    def __init__(self) -> None:
        self.readings = 0
        self.gone = False
        self.forgotten = 0
        self.names = ["fast", "slow"]

    def read(self) -> TopReading:
        if self.gone:
            raise unavailable("connection refused")
        self.readings += 1
        count = self.readings * 10
        page = "# TYPE conch_model_ready gauge\n" + "".join(
            MODEL.format(name=name, count=count if name == "slow" else 5 * count, time=8000 * count)
            for name in self.names
        )
        index = [{"name": "lost", "version": "1", "state": "UNAVAILABLE", "reason": "no file\nmore"}]
        return TopReading(float(self.readings), "triton 2.51.0", read_counts(page), index, {"fast": 2})

    def forget(self) -> None:
        self.forgotten += 1


def lines(app: TopApp) -> list[str]:
    table: DataTable[Any] = app.query_one("#models", DataTable)
    return [" ".join(str(cell) for cell in table.get_row_at(row)) for row in range(table.row_count)]


def shown(app: TopApp, selector: str) -> str:
    return str(app.query_one(selector, Static).render())


async def until(pilot: Any, happens: Callable[[], bool]) -> None:
    for _ in range(1200):
        if happens():
            return
        await pilot.pause(0.05)
    raise AssertionError(happens)


async def test_the_screen_sorts_filters_shows_details_and_survives_the_end_of_the_server() -> None:
    server = PlayedServer()
    app = TopApp(server, "localhost:8000", 0.15)  # type: ignore[arg-type]
    async with app.run_test(size=(130, 30)) as pilot:
        await until(pilot, lambda: len(lines(app)) == 3 and "50" in lines(app)[0])
        assert lines(app) == [
            "fast 1 READY 50 0 · · 1.6 ms 0 · 2 1 MiB ·",
            "slow 1 READY 10 0 · · 8.0 ms 0 · · 1 MiB ·",
            "lost 1 UNAVAILABLE · · · · · · · · · ·",
        ]
        head = shown(app, "#head")
        assert head.startswith("conch  localhost:8000") and "2 of 2 ready, 1 not loaded   Req/s 60" in head
        await pilot.press("r")  # once more by the same column: inverted
        assert lines(app)[0].startswith("lost")
        await pilot.press("n")
        assert [line.split()[0] for line in lines(app)] == ["fast", "lost", "slow"]

        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: "slow  version 1  READY" in shown(app, "#figures"))
        detail = shown(app, "#figures")
        assert "queue 8.0 ms" in detail and "histogram_latencies=true" in detail
        await pilot.press("r")  # the cursor stays on its model
        assert shown(app, "#figures").startswith("slow")
        await pilot.press("up", "n", "escape")

        await pilot.press("slash", *"low")
        assert [line.split()[0] for line in lines(app)] == ["slow"]
        await pilot.press("enter", "escape")
        assert app.query_one("#filter", Input).value == "" and len(lines(app)) == 3

        server.gone = True
        await until(pilot, lambda: app.query_one("#notice").has_class("shown"))
        assert "localhost:8000 has not responded since" in shown(app, "#notice")
        assert "connection refused" in shown(app, "#notice") and len(lines(app)) == 3 and server.forgotten == 1
        server.gone, server.names = False, ["new"]
        await until(pilot, lambda: any(line.startswith("new") for line in lines(app)))
        assert not app.query_one("#notice").has_class("shown")

        await pilot.press("space")
        assert "paused" in shown(app, "#head")
        read = server.readings
        await until(pilot, lambda: server.readings > read + 2)
        server.names = ["newer"]
        read = server.readings
        await until(pilot, lambda: server.readings > read + 2)
        assert not any("newer" in line for line in lines(app))
        await pilot.press("space")
        await until(pilot, lambda: any("newer" in line for line in lines(app)))


async def test_nothing_fails_while_the_screen_is_removed() -> None:
    app = TopApp(PlayedServer(), "localhost:8000", 0.05)  # type: ignore[arg-type]
    async with app.run_test() as pilot:
        await until(pilot, lambda: len(lines(app)) > 1)
        for name in ("#head", "#notice", "#detail", "#models"):
            await app.query_one(name).remove()
            await pilot.press("n")


async def test_two_hundred_models_and_a_narrow_terminal_are_shown() -> None:
    server = PlayedServer()
    server.names = [f"model-{number:03}" for number in range(200)]
    app = TopApp(server, "localhost:8000", 0.15)  # type: ignore[arg-type]
    async with app.run_test(size=(60, 20)) as pilot:
        await until(pilot, lambda: len(lines(app)) == 201)
        table = app.query_one("#models", DataTable)
        assert table.virtual_size.width <= 60
        await pilot.press("end", "n")
        assert app.query_one("#models", DataTable).row_count == 201
