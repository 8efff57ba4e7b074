"""The addresses that ``conch top`` accepts."""

from __future__ import annotations

import pytest

from conch.cli import main
from conch.core.errors import ConchError
from conch.measure.top.source import TopAddress


@pytest.mark.parametrize(
    ("url", "metrics", "place"),
    [
        ("localhost:8000", "", ("http://localhost:8000", "http://localhost:8002/metrics")),
        ("models", "", ("http://models:8000", "http://models:8002/metrics")),
        ("https://a.example:443/prefix", "", ("https://a.example:443/prefix", "http://a.example:8002/metrics")),
        ("a.example/prefix/", "", ("http://a.example:8000/prefix", "http://a.example:8002/metrics")),
        ("https://[::1]/prefix", "", ("https://[::1]:8000/prefix", "http://[::1]:8002/metrics")),
        ("[::1]:8000", "", ("http://[::1]:8000", "http://[::1]:8002/metrics")),
        ("a:1", "b:2", ("http://a:1", "http://b:2/metrics")),
        ("a:1", "https://b/x/metrics", ("http://a:1", "https://b/x/metrics")),
    ],
)
def test_missing_parts_of_urls_are_completed(url: str, metrics: str, place: tuple[str, str]) -> None:
    found = TopAddress.of(url, metrics, {})
    assert (found.url, found.metrics_url) == place


@pytest.mark.parametrize("url", ["", "http://", "localhost:many"])
def test_an_address_without_a_host_or_port_is_refused(url: str) -> None:
    with pytest.raises(ConchError, match="is not the address of a server"):
        TopAddress.of(url, "", {})


@pytest.mark.extras
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "conch top needs a terminal"),
        (("-H", "nothing"), "--header is <name>: <value>; got 'nothing'"),
        (("-u", ":"), "is not the address of a server"),
    ],
)
def test_what_prevents_a_start_is_told(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str) -> None:
    assert main(["top", *flags]) == 1
    assert said in capsys.readouterr().err
