"""Runs the steps of the ensemble in this process, one after the other; the server joins them."""

from pathlib import Path

MODELS = Path(__file__).parents[1]


def test_the_steps_fit_together(load_model):
    split, count = load_model(MODELS / "${name}_split"), load_model(MODELS / "${name}_count")
    words = split(text="one two  three")
    assert words.texts("words") == ["one", "two", "three"]
    assert count(words=words["words"])["count"].tolist() == [[3]]
