"""Runs the model in this process; functions replace the models that it calls."""

from pathlib import Path

import numpy as np
import pytest

from conch.core.errors import ConchError

MODEL = Path(__file__).parent


def test_the_verdict_follows_the_length(load_model):
    def length(text):
        return {"length": np.array([[5], [50]], np.int32)}

    model = load_model(MODEL, models={"${name}_length": length})
    assert model(text=["any", "other"]).texts("verdict") == ["short", "long"]


def test_both_models_fit_together(load_model):
    length = load_model(MODEL.with_name("${name}_length"))
    model = load_model(MODEL, models={"${name}_length": length})
    assert model(text=["a few words", "more than a few of them"]).texts("verdict") == ["short", "long"]


def test_an_error_of_the_other_model_is_passed_on(load_model):
    def length(text):
        raise ConchError("out of order")

    with pytest.raises(ConchError, match="out of order"):
        load_model(MODEL, models={"${name}_length": length})(text="any")
