"""The terminal application of ``conch top``."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime
from time import monotonic
from typing import Any, ClassVar, Final

from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.widgets import DataTable, Footer, Input, Static

from conch.core.errors import ConchError
from conch.measure.perf.server.statistics import SERVER_STAGES
from conch.measure.top import text
from conch.measure.top.counts import ModelKey
from conch.measure.top.figures import ServerHistory, TopModel, TopServer
from conch.measure.top.source import ServerSource

_STATES: Final = {
    "READY": "green",
    "NOT READY": "bold red",
    "UNAVAILABLE": "red",
    "LOADING": "yellow",
    "UNLOADED": "dim",
}
_TITLES: Final = {"queue": "queue", "compute_input": "input", "compute_infer": "compute", "compute_output": "output"}
_COLORS: Final = {"queue": "yellow", "compute_input": "blue", "compute_infer": "cyan", "compute_output": "magenta"}
_NO_HISTOGRAMS: Final = "p50 and p99 need a server with --metrics-config=histogram_latencies=true"
_NO_SUMMARIES: Final = "p50 and p99 need --metrics-config summary_latencies=true"


class TopTable(DataTable[Text]):
    """The table of models; Enter shows the detail of the model at the cursor."""

    BINDINGS: ClassVar[list[Any]] = [Binding("enter", "select_cursor", "Detail")]


class TopApp(App[None]):
    """Shows the models of the server behind ``source``, read every ``interval`` seconds."""

    TITLE = "conch top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 3; padding: 0 1; }
    #notice { height: auto; padding: 0 1; display: none; background: $error; color: $text; text-style: bold; }
    #notice.shown { display: block; }
    #models { height: 1fr; }
    #models.lost { opacity: 50%; }
    #filter { display: none; height: 3; }
    #filter.shown { display: block; }
    #detail { height: auto; max-height: 12; padding: 0 1; border-top: solid $primary; display: none; }
    #detail.shown { display: block; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        Binding("q", "quit", "Quit"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "clear", "Clear", show=False),
        Binding("space", "pause", "Pause"),
        *(
            Binding(column.key, f"sort('{column.title}')", f"by {column.title}", show=column.key in "rpwm")
            for column in text.COLUMNS
            if column.key
        ),
        Binding("i", "invert", "Invert", show=False),
    ]

    def __init__(self, source: ServerSource, where: str, interval: float = 1.0) -> None:
        super().__init__()
        self._source = source
        self._where = where
        self._interval = interval
        self._history = ServerHistory()
        self._figures = TopServer(())
        self._server = ""
        self._column = text.COLUMNS[3]
        self._reverse = True
        self._pattern = ""
        self._paused = False
        #: When the server stopped responding (local time), and why.
        self._lost = ""
        self._shown: list[TopModel] = []

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="notice")
        yield Input(placeholder="part of a name or a state", id="filter")
        yield TopTable(id="models", cursor_type="row", zebra_stripes=True)
        with Vertical(id="detail"):
            yield Static(id="figures")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#models", DataTable).focus()
        self.run_worker(self._read_forever(), exclusive=True)

    def on_resize(self) -> None:
        self._draw()

    async def _read_forever(self) -> None:
        while True:
            began = monotonic()
            await self._read()
            await asyncio.sleep(max(0.05, self._interval - (monotonic() - began)))

    async def _read(self) -> None:
        try:
            reading = await asyncio.to_thread(self._source.read)
        except ConchError as error:
            if not self._lost:
                self._lost = f"{datetime.now():%H:%M:%S}: {error.message}"
                self._source.forget()
        else:
            if self._lost:
                self._history = ServerHistory()  # its counters may have been reset
            self._lost = ""
            self._server = "conch" if reading.counts.conch else reading.server
            figures = self._history.add(reading.time, reading.counts, reading.models, reading.instances)
            if self._paused:
                return
            self._figures = figures
        self._draw()

    # Drawing

    def _draw(self) -> None:
        with suppress(NoMatches):  # only some widgets exist while the screen is composed or removed
            table = self.query_one("#models", DataTable)
            self.query_one("#head", Static).update(self._head())
            notice = self.query_one("#notice", Static)
            notice.set_class(bool(self._lost), "shown")
            notice.update(
                f"{self._where} has not responded since {self._lost}. Trying again every {self._interval:g} s."
            )
            table.set_class(bool(self._lost), "lost")
            self._draw_table(table)
            self._draw_detail()

    def _head(self) -> Text:
        figures = self._figures
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(self._server or "conch top", "bold")
        line.append(f"  {self._where}", "dim")
        line.append("  paused" if self._paused else "", "bold yellow")
        ready, loaded = figures.ready, sum(model.loaded for model in figures.models)
        line.append("\nModels ", "dim").append(f"{ready} of {loaded} ready", "green" if ready == loaded else "bold red")
        if others := len(figures.models) - loaded:
            line.append(f", {others} not loaded", "dim")
        line.append("   Req/s ", "dim").append(text.number(figures.rate), "bold")
        line.append("   Fail/s ", "dim").append(text.number(figures.failing), "bold red" if figures.failing else "")
        line.append("   Waiting ", "dim").append(text.number(figures.waiting), "yellow" if figures.waiting else "")
        for title, value in {"CPU": figures.cpu, "GPU": figures.gpu, "RAM": figures.memory}.items():
            if value is not None:
                line.append(f"   {title} ", "dim").append(text.share(value), "bold red" if value > 0.95 else "")
        if figures.model_memory is not None:
            line.append("   Models' memory ", "dim").append(text.size(figures.model_memory))
        peak = f" peak {text.number(max(self._history.rates, default=0.0))}/s"
        drawn = text.chart(self._history.rates, max(10, self.size.width - 2 - len(peak)))
        line.append("\n").append(drawn, "cyan").append(peak, "dim")
        if self._lost:
            line.stylize("dim")
        return line

    def _draw_table(self, table: DataTable[Text]) -> None:
        """Show the models in order. The cursor stays on its model, or in the first row while no detail is shown."""
        chosen = self._chosen(table) if table.cursor_row or self.query_one("#detail").has_class("shown") else None
        self._shown = text.arranged(self._figures.models, self._pattern, self._column, self._reverse)
        columns = text.fitting(self._shown, self.size.width - 2)  # beside the scroll bar
        where = table.scroll_offset
        table.clear(columns=True)
        for column in columns:
            arrow = ("▼" if self._reverse else "▲") if column is self._column else ""
            table.add_column(Text(f"{column.title}{arrow}", justify=_side(column)), key=column.title)
        for model in self._shown:
            table.add_row(*(self._cell(model, column) for column in columns), key="\0".join(model.key))
        keys = [model.key for model in self._shown]
        if chosen in keys:
            table.move_cursor(row=keys.index(chosen), animate=False, scroll=False)
        table.scroll_to(where.x, where.y, animate=False)

    def _chosen(self, table: DataTable[Text]) -> ModelKey | None:
        row = table.cursor_row
        return self._shown[row].key if 0 <= row < len(self._shown) else None

    def _cell(self, model: TopModel, column: text.TopColumn) -> Text:
        style: str | Style = "" if model.loaded else "dim"
        if column.title == "State":
            style = _STATES.get(model.state, "")
        elif (column.title == "Fail/s" and model.failing) or (column.title == "Restarts" and model.restarts):
            style = "bold red"
        elif column.title == "Waiting" and model.waiting:
            style = "yellow"
        content = column.text(model)
        return Text(content, "dim" if content == text.NONE else style, justify=_side(column))

    def _draw_detail(self) -> None:
        detail = self.query_one("#detail")
        key = self._chosen(self.query_one("#models", DataTable))
        model = next((model for model in self._shown if model.key == key), None)
        if model is not None and detail.has_class("shown"):
            self.query_one("#figures", Static).update(self._detail(model))

    def _detail(self, model: TopModel) -> Text:
        width = max(20, self.size.width - 2)
        lines = Text(no_wrap=True, overflow="ellipsis")
        lines.append(model.name, "bold").append(f"  version {model.version or text.NONE}  ", "dim")
        lines.append(model.state, _STATES.get(model.state, ""))
        lines.append(f"  {model.reason.splitlines()[0]}" if model.reason else "", "red")
        if not model.loaded:
            return lines
        _pairs(lines, "\nDuration", {
            "mean": text.milliseconds(model.mean), "p50": text.milliseconds(model.median),
            "p99": text.milliseconds(model.p99), "mean batch": text.number(model.batch),
            "cache hits": text.share(model.cache_hits),
        })  # fmt: skip
        if model.parts:
            lines.append("\n         ")
            cells = text.bar([model.parts[part] for part in SERVER_STAGES], max(10, width - 9))
            for part, count in zip(SERVER_STAGES, cells, strict=True):
                lines.append("█" * count, _COLORS[part])
            lines.append("\n         ")
            for part in SERVER_STAGES:
                lines.append("■ ", _COLORS[part])
                lines.append(f"{_TITLES[part]} {text.milliseconds(model.parts[part])}   ")
        _pairs(lines, "\nRequests", {
            "per s": text.number(model.rate), "waiting": text.number(model.waiting),
            "instances": text.number(model.instances),
            **{f"failed {reason}": text.number(count) for reason, count in model.failures.items() if count},
        })  # fmt: skip
        if model.generation:
            _pairs(lines, "\nText    ", {
                "tokens/s": text.number(model.tokens), "running": text.number(model.generation.get("running")),
                "waiting": text.number(model.generation.get("waiting")),
                "KV cache": text.share(model.generation.get("kv_cache")),
                "first token": text.milliseconds(model.first_token),
                "between tokens": text.milliseconds(model.inter_token),
            })  # fmt: skip
        elif model.tokens:
            _pairs(lines, "\nTokens  ", {"per s": text.number(model.tokens)})
        if model.memory is not None:
            kinds = {kind.replace("_", " "): text.size(bytes) for kind, bytes in model.memory_by_kind.items() if bytes}
            _pairs(lines, "\nMemory  ", {"": text.size(model.memory), **kinds})
        if model.restarts:
            reasons = {reason: text.number(count) for reason, count in model.restarts_by_reason.items() if count}
            _pairs(lines, "\nRestarts", reasons, "bold red")
        if model.loaded and model.rate and model.p99 is None:
            lines.append(f"\n{_NO_HISTOGRAMS if model.memory is not None else _NO_SUMMARIES}", "dim italic")
        lines.append("\nReq/s    ", "dim").append(text.chart(model.history, width - 9), "cyan")
        return lines

    # Actions

    def action_sort(self, title: str) -> None:
        """Sort by a column; once more inverts the order."""
        column = next(column for column in text.COLUMNS if column.title == title)
        self._reverse = not self._reverse if column is self._column else column.title not in ("Model", "State")
        self._column = column
        self._draw()

    def action_invert(self) -> None:
        self._reverse = not self._reverse
        self._draw()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._draw()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def action_clear(self) -> None:
        """Close the detail, or else clear the filter."""
        detail, field = self.query_one("#detail"), self.query_one("#filter", Input)
        if self.focused is not field and detail.has_class("shown"):
            detail.remove_class("shown")
            return
        field.value = ""
        field.remove_class("shown")
        self.query_one("#models", DataTable).focus()

    def action_detail(self) -> None:
        self.query_one("#detail").toggle_class("shown")
        self._draw_detail()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._pattern = event.value
        self._draw()

    def on_input_submitted(self) -> None:
        field = self.query_one("#filter", Input)
        field.set_class(bool(field.value), "shown")
        self.query_one("#models", DataTable).focus()

    def on_data_table_row_selected(self) -> None:
        self.action_detail()

    def on_data_table_row_highlighted(self) -> None:
        self._draw_detail()


def _side(column: text.TopColumn) -> Any:
    return "left" if column.title in ("Model", "State") else "right"


def _pairs(lines: Text, title: str, values: dict[str, str], style: str = "") -> None:
    lines.append(f"{title} ", "dim")
    for name, value in values.items():
        if value != text.NONE:
            lines.append(f"{name} " if name else "", "dim").append(f"{value}   ", style)
