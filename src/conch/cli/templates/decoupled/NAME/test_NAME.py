"""Runs the model in this process, without a server: `pytest` here or from anywhere."""

from pathlib import Path

from conch.testing import ModelRequest

MODEL = Path(__file__).parent


def test_every_word_is_a_response(load_model):
    replies = list(load_model(MODEL).stream(text="one two three"))
    assert [reply.texts("word") for reply in replies] == [["one"], ["two"], ["three"]]
    assert [int(reply["index"][0]) for reply in replies] == [0, 1, 2]


def test_no_words_are_no_responses(load_model):
    assert list(load_model(MODEL).stream(text=" ")) == []


def test_a_cancelled_request_ends_early(load_model):
    assert list(load_model(MODEL).stream(ModelRequest({"text": "one two"}, cancelled=True))) == []
