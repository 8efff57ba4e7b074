"""A page as a PDF document, with the same content as the HTML; charts are pictures.

Text is in Helvetica where that has all its characters, else in a font of the machine.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, Final, TypeVar

from conch.extras import load
from conch.reports.fonts import Lettering, lettering_for
from conch.reports.page import (
    Block,
    Bullets,
    Chart,
    CodeBlock,
    Note,
    Page,
    Paragraph,
    Properties,
    Row,
    Section,
    Table,
    Tile,
    Tiles,
)  # fmt: skip
from conch.reports.theme import chart_config

_INK: Final = (28, 35, 48)
_FAINT: Final = (91, 101, 117)
_LINE: Final = (216, 221, 230)
_SOFT: Final = (244, 246, 249)
_PAPER: Final = (255, 255, 255)
_FILLS: Final = {"": _PAPER, "good": (228, 243, 236), "bad": (251, 233, 228), "muted": _PAPER}
_INKS: Final = {"": _INK, "good": (0, 105, 76), "bad": (163, 59, 0), "muted": _FAINT}
_NOTES: Final = {
    "info": (_SOFT, (0, 114, 178), ""),
    "warning": ((255, 244, 214), (230, 159, 0), "Warning: "),
    "error": ((251, 233, 228), (213, 94, 0), "Error: "),
}
#: Pixels of pictures for each of a chart's.
_SCALE: Final = 2.5
_Item = TypeVar("_Item")
#: How many figures in large type stand in a row.
_TILES: Final = 5
#: Between two charts in a row (mm).
_GAP: Final = 6.0


def pdf(page: Page) -> bytes:
    """The document, A4; raises UNSUPPORTED where the extra is missing."""
    writer = _PdfWriter(page)
    writer.write()
    return bytes(writer.document.output())


def texts_of(page: Page) -> Iterator[str]:
    """Every text of a page, for the choice of a font."""
    yield from (page.title, page.lead, page.footer)
    for section in (Section("", page.opening), *page.sections):
        yield section.title
        for block in section.blocks:
            match block:
                case Bullets(items):
                    yield from items
                case Properties(items):
                    for pair in items:
                        yield from pair
                case Tiles(items):
                    for tile in items:
                        yield from (tile.value, tile.label, tile.detail)
                case Table(caption, columns, rows):
                    yield caption
                    yield from (column.heading for column in columns)
                    for row in rows:
                        yield from row.cells
                case Chart():
                    yield from (block.title, block.caption)
                case CodeBlock(text, caption):
                    yield from (text, caption)
                case Note(_, text) | Paragraph(text):
                    yield text


class _PdfWriter:
    """Writes a page into ``document``, from the top down."""

    def __init__(self, page: Page) -> None:
        fpdf = load("A report as PDF", "fpdf")
        self._page = page
        self._links: dict[str, int] = {}
        outer = self

        class NumberedPages(fpdf.FPDF):  # type: ignore[name-defined]  # fpdf2 calls its footer
            def footer(self) -> None:
                outer.foot()

        self.document = NumberedPages(format="A4")
        self._letters: Lettering = lettering_for(self.document, texts_of(page))
        self.document.set_title(self._letters.fit(page.title))
        self.document.set_margins(16, 15, 16)
        self.document.set_auto_page_break(True, margin=18)
        self.document.add_page()

    def write(self) -> None:
        """The whole document."""
        for section in self._page.sections:
            if section.anchor:
                self._links[section.anchor] = self.document.add_link()
        self._text(self._page.title, size=20, style="B", after=1.5, align="L")
        self._text(self._page.lead, size=12, after=3)
        self._blocks(self._page.opening)
        for section in self._page.sections:
            # A heading is not left alone at the end of a page.
            first = section.blocks[0] if section.blocks else None
            self._room(110 if isinstance(first, Chart) else 35)
            self.document.ln(5)
            if section.anchor:
                self.document.set_link(
                    self._links[section.anchor], y=self.document.get_y(), page=self.document.page_no()
                )
            self.document.start_section(self._letters.fit(section.title))
            self._text(section.title, size=14, style="B", after=1.5, align="L")
            self._blocks(section.blocks)

    def foot(self) -> None:
        """The last line of each page: what wrote it, and the page's number."""
        self.document.set_y(-12)
        self._font(8, colour=_FAINT)
        self.document.cell(self.document.epw * 0.85, 5, self._letters.fit(self._page.footer))
        self.document.cell(0, 5, str(self.document.page_no()), align="R")

    def _blocks(self, blocks: Sequence[Block]) -> None:
        for narrow, together in groupby(blocks, lambda block: isinstance(block, Chart) and not block.wide):
            if narrow:
                charts = [block for block in together if isinstance(block, Chart)]
                for pair in _in_rows(charts, 2):
                    self._charts(pair)
            else:
                for block in together:
                    self._block(block)

    def _block(self, block: Block) -> None:
        match block:
            case Paragraph(text):
                self._text(text, after=2)
            case Bullets(items):
                for item in items:
                    self._text(f"{self._letters.bullet} {item}", after=0.6)
                self.document.ln(1.5)
            case Note():
                self._note(block)
            case Tiles(items):
                for tiles in _in_rows(items, _TILES):
                    self._tiles(tiles, min(_TILES, max(4, len(items))))
            case Properties(items):
                self._properties(items)
            case CodeBlock():
                self._code(block)
            case Table():
                self._table(block)
            case Chart():
                self._charts([block])

    def _text(
        self, text: str, *, size: float = 9.5, style: str = "", after: float = 0.0, align: str = "L",
        colour: tuple[int, int, int] = _INK,
    ) -> None:  # fmt: skip
        self._font(size, style, colour)
        self.document.multi_cell(0, size * 0.5, self._letters.fit(text), align=align, new_x="LMARGIN", new_y="NEXT")
        self.document.ln(after)

    def _note(self, note: Note) -> None:
        fill, edge, kind = _NOTES[note.kind]
        self._font(9.5)
        document, text = self.document, self._letters.fit(kind + note.text)
        lines = document.multi_cell(document.epw - 4, 4.75, text, align="L", dry_run=True, output="LINES")
        self._room(min(4.75 * len(lines) + 4, 60))
        top, page = document.get_y(), document.page_no()
        document.set_fill_color(*fill)
        document.set_x(document.l_margin + 1.2)
        document.multi_cell(
            document.epw - 1.2, 4.75, text, align="L", fill=True, padding=(1.2, 2), new_x="LMARGIN", new_y="NEXT"
        )
        if document.page_no() == page:
            document.set_fill_color(*edge)
            document.rect(document.l_margin, top, 1.2, document.get_y() - top, style="F")
        document.ln(2)

    def _tiles(self, tiles: Sequence[Tile], places: int) -> None:
        document, width, height = self.document, self.document.epw / places, 19.0
        self._room(height + 3)
        top = document.get_y()
        for number, tile in enumerate(tiles):
            left = document.l_margin + number * width
            document.set_fill_color(*_SOFT)
            document.rect(left, top, width - 2.5, height, style="F")
            for text, size, style, colour, offset in (
                (tile.label, 8.0, "", _FAINT, 1.5), (tile.value, 14.0, "B", _INKS[tile.tone], 6.0),
                (tile.detail, 7.5, "", _FAINT, 13.0),
            ):  # fmt: skip
                fitted, space = self._letters.fit(text), width - 6.5
                self._font(size, style, colour)
                while size > 5 and document.get_string_width(fitted) > space:
                    size -= 0.25
                    self._font(size, style, colour)
                document.set_xy(left + 2, top + offset)
                document.cell(space, 5, fitted)
        document.set_xy(document.l_margin, top + height + 3)

    def _properties(self, items: Sequence[tuple[str, str]]) -> None:
        document = self.document
        self._font(9.5)
        names = [self._letters.fit(name) for name, _ in items]
        width = min(max((document.get_string_width(name) for name in names), default=0) + 5, document.epw / 3)
        for name, (_, value) in zip(names, items, strict=True):
            self._room(6)
            top = document.get_y()
            self._font(9.5, colour=_FAINT)
            document.multi_cell(width, 4.9, name, align="L", new_x="RIGHT", new_y="TOP")
            self._font(9.5)
            document.set_xy(document.l_margin + width, top)
            document.multi_cell(0, 4.9, self._letters.fit(value), align="L", new_x="LMARGIN", new_y="NEXT")
        document.ln(2)

    def _code(self, block: CodeBlock) -> None:
        if block.caption:
            self._room(16)
            self._text(block.caption, size=9, colour=_FAINT, after=0.8)
        document = self.document
        document.set_fill_color(*_SOFT)
        document.set_text_color(*_INK)
        document.set_font(self._letters.fixed, "", 8)
        document.multi_cell(
            0, 4, self._letters.fit(block.text), align="L", fill=True, padding=(1.5, 2), wrapmode="CHAR",
            new_x="LMARGIN", new_y="NEXT",
        )  # fmt: skip
        document.ln(3)

    def _table(self, table: Table) -> None:
        document = self.document
        size = 8.0 if len(table.columns) <= 9 else 7.0 if len(table.columns) <= 12 else 6.0
        self._room(24)
        self._text(table.caption, size=9, colour=_FAINT, after=0.8)
        self._font(size)
        fpdf = load("A report as PDF", "fpdf")
        document.set_draw_color(*_LINE)
        document.set_line_width(0.2)
        with document.table(
            borders_layout="HORIZONTAL_LINES", col_widths=self._widths(table, size), line_height=size * 0.47,
            text_align=["RIGHT" if column.number else "LEFT" for column in table.columns], padding=(0.9, 0.9),
            headings_style=fpdf.FontFace(emphasis="BOLD", color=_INK, fill_color=_PAPER), v_align="TOP",
        ) as made:  # fmt: skip
            made.row([self._letters.fit(column.heading) for column in table.columns])
            for row in table.rows:
                self._row(made, row)
        document.ln(3)

    def _row(self, made: Any, row: Row) -> None:
        fpdf = load("A report as PDF", "fpdf")
        style = fpdf.FontFace(color=_INKS[row.tone] if row.tone != "good" else _INK, fill_color=_FILLS[row.tone])
        line = made.row(style=style)
        for number, cell in enumerate(row.cells):
            link = self._links.get(row.target) if number == 0 and row.target else None
            line.cell(self._letters.fit(cell), link=link)

    def _widths(self, table: Table, size: float) -> tuple[float, ...]:
        """A share for each column: what its longest cell takes, but no less than its longest word, nor too much."""
        document, letters = self.document, self._letters
        wanted, least = [], []
        for number, column in enumerate(table.columns):
            cells = [letters.fit(row.cells[number]) for row in table.rows]
            self._font(size, "B")
            words = [document.get_string_width(word) for word in letters.fit(column.heading).split()]
            self._font(size)
            whole = [document.get_string_width(cell) for cell in cells]
            parts = (
                whole if column.number else [document.get_string_width(word) for cell in cells for word in cell.split()]
            )
            least.append(min(max([*words, *parts], default=0), document.epw / 3) + 2.6)
            wanted.append(max([least[-1] - 2.6, *whole]) + 2.6)
        spare = document.epw - sum(least)
        if spare <= 0:
            return tuple(least)
        missing = [more - some for more, some in zip(wanted, least, strict=True)]
        share = min(1.0, spare / sum(missing)) if sum(missing) else 0.0
        widths = [some + share * more for some, more in zip(least, missing, strict=True)]
        rest = max(0.0, document.epw - sum(widths)) / len(widths)
        return tuple(width + rest for width in widths)

    def _charts(self, charts: Sequence[Chart]) -> None:
        """One chart across the page, or two beside each other."""
        document = self.document
        width = document.epw if charts[0].wide else (document.epw - _GAP) / 2
        pictures = [_picture(chart) for chart in charts]
        heights = [width * tall / broad for _, broad, tall in pictures]
        self._room(max(heights) + 12)
        top = document.get_y()
        bottoms = []
        for number, (chart, (picture, _, _), height) in enumerate(zip(charts, pictures, heights, strict=True)):
            left = document.l_margin + number * (width + _GAP)
            document.set_xy(left, top)
            self._font(9.5, "B")
            document.multi_cell(width, 5, self._letters.fit(chart.title), align="L", new_x="LEFT", new_y="NEXT")
            document.image(io.BytesIO(picture), x=left, y=document.get_y(), w=width, h=height, alt_text=chart.alt)
            document.set_xy(left, document.get_y() + height)
            if chart.caption:
                self._font(8, colour=_FAINT)
                document.multi_cell(width, 4, self._letters.fit(chart.caption), align="L", new_x="LEFT", new_y="NEXT")
            bottoms.append(document.get_y())
        document.set_xy(document.l_margin, max(bottoms))
        document.ln(3)

    def _font(self, size: float, style: str = "", colour: tuple[int, int, int] = _INK) -> None:
        self.document.set_font(self._letters.family, style, size)
        self.document.set_text_color(*colour)

    def _room(self, height: float) -> None:
        """Go to the next page unless so much is left of this one (mm)."""
        if self.document.get_y() + height > self.document.page_break_trigger:
            self.document.add_page()


def _picture(chart: Chart) -> tuple[bytes, int, int]:
    """A PNG, its width and its height (pixels)."""
    converter = load("A report with charts", "vl_convert")
    config = chart_config(dark=False, wide=chart.wide) | {"background": "white"}
    picture: bytes = converter.vegalite_to_png(dict(chart.spec), config=config, scale=_SCALE)
    # The header of a PNG has both as 32-bit numbers behind 16 bytes.
    return picture, int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")


def _in_rows(items: Sequence[_Item], count: int) -> Iterator[Sequence[_Item]]:
    rest = iter(items)
    while row := list(islice(rest, count)):
        yield row
