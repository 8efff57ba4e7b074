"""Which variant serves."""

from __future__ import annotations

from conch.convert.verdict import fastest


def test_fastest_is_chosen() -> None:
    assert fastest({"a": 1.0, "b": 3.0, "c": 2.0}) == "b"
    assert fastest({}) == ""
