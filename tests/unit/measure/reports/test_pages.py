"""Pages are written whole: one file that loads nothing, with everything escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.measure.reports.charts import (
    Axis,
    Bar,
    Dot,
    Limit,
    Series,
    bar_chart,
    line_chart,
    percentile_chart,
)
from conch.measure.reports.files import check_files, check_reports
from conch.measure.reports.html import html
from conch.measure.reports.report import (
    Bullets,
    Chart,
    CodeBlock,
    Column,
    Note,
    Paragraph,
    Properties,
    Report,
    Row,
    Section,
    Table,
    Tile,
    Tiles,
)

EVIL = "</script><script>alert('µ')</script><img src=http://evil.example/x>"


def page(name: str = EVIL) -> Report:
    milliseconds = Axis(f"latency of {name} (ms)", logarithmic=True)
    dots = [Dot(20.1, 49.7, name, 45.0, 55.0), Dot(71.9, 897.0, name), Dot(80.0, 0.0), Dot(float("inf"), 1.0)]
    charts = [
        line_chart(
            name,
            [Series(name, dots), Series("b", dots)],
            Axis("infer/s"),
            milliseconds,
            alt=f"Rises for {name}.",
            labels=True,
            limits=[Limit("y", 100.0, name), Limit("x", 50.0, "x")],
        ),
        percentile_chart(name, [Series(name, [Dot(0.5, 1.0), Dot(0.99, 5.0)])], milliseconds, alt="Alt.", wide=False),
        bar_chart(name, [Bar(name, "queue", 1.0), Bar(name, "infer", 2.0)], Axis("ms"), alt="Alt.", stacked=True),
    ]
    blocks = [
        Paragraph(name),
        Bullets([name]),
        Note("warning", name),
        Tiles([Tile("71.9 infer/s", name, name, "good")]),
        Properties([(name, name)]),
        CodeBlock(name, name),
        Table(name, [Column(name), Column("p99 (ms)", number=True)], [Row([name, "1,413"], "good", "detail")]),
        *charts,
    ]
    return Report(name, name, [Section(name, blocks, "detail")], opening=[Note("error", name)], footer=name)


class Reader(HTMLParser):
    """Notes the elements, and what is text or a script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img", "link", "stop"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] not in ("script", "style"):
            self.texts.append(data)


@pytest.fixture(scope="module")
def read() -> Reader:
    return Reader(html(page()))


def test_a_page_loads_nothing(read: Reader) -> None:
    loading = [attributes for tag, attributes in read.tags if tag in ("img", "link", "iframe", "object", "use")]
    sources = [attributes["src"] for _, attributes in read.tags if "src" in attributes]
    assert loading == sources == []
    links = [str(attributes["href"]) for _, attributes in read.tags if "href" in attributes]
    assert links and all(link.startswith("#") for link in links)
    [policy] = [attributes["content"] for tag, attributes in read.tags if "http-equiv" in attributes and tag == "meta"]
    assert "default-src 'none'" in str(policy) and "http" not in str(policy)
    assert not re.search(r"@import|url\(", files("conch.measure.reports").joinpath("assets", "page.css").read_text())


def test_what_comes_from_others_is_shown_as_it_is(read: Reader) -> None:
    scripts = [attributes for tag, attributes in read.tags if tag == "script"]
    # A specification for each chart, the libraries, the themes, and what draws and sorts: none of the text's own.
    assert len(scripts) == 3 + 3
    assert "".join(read.texts).count(EVIL) >= 13


def test_the_libraries_are_embedded_once() -> None:
    text = html(page("falcon7b"))
    assert text.count("vegaEmbed=") == 1
    assert len(text) < 1_300_000
    assert "vegaEmbed=" not in html(Report("t", "l", [Section("s", [Paragraph("p")])]))


def test_charts_and_tables_say_what_they_show_to_those_who_cannot_see_them(read: Reader) -> None:
    assert [attributes.get("aria-label") for tag, attributes in read.tags if attributes.get("role") == "img"][:2] == [
        f"Rises for {EVIL}."
    ] * 2
    tags = [tag for tag, _ in read.tags]
    assert tags.count("caption") == tags.count("table") == 1
    assert all(attributes.get("scope") == "col" for tag, attributes in read.tags if tag == "th")


def test_values_that_an_axis_cannot_show_are_left_out() -> None:
    chart = line_chart("t", [Series("a", [Dot(1, 0), Dot(2, 3)])], Axis("x"), Axis("y", logarithmic=True), alt="a")
    assert [row["x"] for row in chart.spec["data"]["values"]] == [2]


def test_files_that_cannot_be_written_are_refused_before_the_work(tmp_path: Path) -> None:
    check_reports({"--html": tmp_path / "a.html", "--other": None})
    with pytest.raises(ConchError, match=r"--html .*a\.pdf: .* HTML and print that page from a browser"):
        check_reports({"--html": tmp_path / "a.pdf"})
    with pytest.raises(ConchError, match=r"--html .*a\.doc: the name must end in \.html"):
        check_reports({"--html": tmp_path / "a.doc"})
    with pytest.raises(ConchError, match=r"-f .*the folder .*none does not exist"):
        check_files({"-f": tmp_path / "none" / "a.csv"})
    with pytest.raises(ConchError, match=r"-f .*: is a folder"):
        check_files({"-f": tmp_path})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_cannot_be_replaced_in_a_folder_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").touch()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(ConchError, match=r"-f .*a\.csv: cannot be written: permission denied"):
        check_files({"-f": tmp_path / "a.csv"})
    check_files({"-f": Path("/dev/null")})


def test_gradients_of_pictures_have_names_of_their_own() -> None:
    """The charts that a script draws call theirs as pictures do, which are not shown then."""

    def chart(scheme: str) -> Chart:
        colour = {"field": "x", "type": "quantitative", "scale": {"scheme": scheme}}
        place = {"field": "x", "type": "quantitative"}
        values = [{"x": 1}, {"x": 2}]
        return Chart("t", {"data": {"values": values}, "mark": "point", "encoding": {"x": place, "color": colour}}, "a")

    text = html(Report("t", "l", [Section("s", [chart("blues"), chart("reds")])]))
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    named = re.findall(r'<linearGradient id="([^"]+)"', markup)

    assert len(set(named)) == len(named) == 2
    assert set(re.findall(r"url\(#([^)]+)\)", markup)) == set(named)
    assert all(name.startswith("still") for name in named)
