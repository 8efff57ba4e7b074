"""Runs the model in this process, without a server: `pytest` here or from anywhere."""

from pathlib import Path

import pytest

MODEL = Path(__file__).parent


def test_everybody_is_greeted(load_model):
    model = load_model(MODEL)
    assert model(name=["Ada", "Alan"]).texts("greeting") == ["Hello, Ada!", "Hello, Alan!"]


def test_the_greeting_is_a_parameter(load_model):
    model = load_model(MODEL, parameters={"greeting": "Welcome"})
    assert model(name="Ada").texts("greeting") == ["Welcome, Ada!"]


def test_an_empty_name_fails_its_request_and_no_other(load_model):
    greeted, refused = load_model(MODEL).batch([{"name": "Ada"}, {"name": " "}])
    assert greeted.texts("greeting") == ["Hello, Ada!"]
    assert refused.error.message == "a name is empty"


def test_a_request_that_does_not_fit_the_configuration_is_refused(load_model):
    with pytest.raises(Exception, match="unexpected inference input 'nam'"):
        load_model(MODEL)(nam="Ada")
