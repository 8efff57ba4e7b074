"""The text of an error reaches every client, whatever it was made of."""

from __future__ import annotations

from conch.core.errors import did_you_mean, error_text, invalid


def test_half_a_character_of_a_file_s_name_is_written_out() -> None:
    assert invalid("a\udcff é.gguf").message == "a\\udcff é.gguf"
    assert str(invalid("a\udcff")) == "a\\udcff"


def test_text_of_an_error_names_its_type_unless_it_was_written_for_clients() -> None:
    error = ValueError("no such axis.\nSee the manual.")
    assert error_text(error) == "ValueError: no such axis.\nSee the manual."
    assert error_text(error, short=True) == "ValueError: no such axis"
    assert error_text(KeyError(), short=True) == "KeyError: KeyError"
    assert error_text(invalid("no such model. Load it.")) == "no such model. Load it."
    assert error_text(invalid("no such model. Load it."), short=True) == "no such model. Load it."


def test_an_unknown_name_is_reported_with_the_most_similar_name_whatever_its_case() -> None:
    assert did_you_mean("TEMPERATUR", ["top_p", "Temperature"]) == "did you mean 'Temperature'?"
    assert did_you_mean("colour", ["top_p", "Temperature"], "it has top_p") == "it has top_p"
    assert did_you_mean("temperatures", ["temperature"], likeness=0.99) == ""


def test_the_suggestion_for_an_alias_is_the_name_it_stands_for() -> None:
    known = {"check": "conch check", "lint": "conch check"}
    assert did_you_mean("Lint", known, shown=known.__getitem__) == "did you mean 'conch check'?"


def test_a_name_that_is_too_long_to_compare_is_like_no_other() -> None:
    assert did_you_mean("temperature" * 10_000_000, ["temperature"], likeness=0.0) == ""
