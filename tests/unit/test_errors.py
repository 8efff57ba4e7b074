"""The text of an error reaches every client, whatever it was made of."""

from __future__ import annotations

from conch.errors import invalid


def test_half_a_character_of_a_file_s_name_is_written_out() -> None:
    assert invalid("a\udcff é.gguf").message == "a\\udcff é.gguf"
    assert str(invalid("a\udcff")) == "a\\udcff"
