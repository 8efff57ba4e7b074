"""Outputs that a model gives in vain, and that it owes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conch.backends.python.outputs import OutputWatch
from conch.backends.python.tensor import Tensor
from tests.unit.backends.python.worker import LaunchWorker

Look = Callable[..., list[str]]


@pytest.fixture
def look() -> Look:
    """Look at responses with these outputs; returns what has been warned of so far."""
    warnings: list[str] = []
    watch = OutputWatch("m", warnings.append)
    watch.declare({"output": [{"name": "A"}, {"name": "B"}]})

    def look(*names: str, wanted: Any = ("A", "B"), whole: bool = True) -> list[str]:
        watch.look([Tensor(name, np.zeros(1, np.float32)) for name in names], set(wanted), whole)
        return warnings

    return look


def test_output_that_is_not_declared_is_told_once(look: Look) -> None:
    look("A", "B", "EXTRA")
    assert look("A", "B", "EXTRA") == [
        "model 'm' gave the output 'EXTRA', which its configuration does not declare (it declares 'A', 'B'); "
        "clients do not get it"
    ]


def test_output_that_does_not_come_is_told_once(look: Look) -> None:
    look("A")
    assert look("A") == [
        "model 'm' did not give the output 'B', which its configuration declares and a request wanted; "
        "its response came without it"
    ]


def test_outputs_that_are_as_they_should_be_are_not_told(look: Look) -> None:
    look("B", "A")
    look("A", "B", wanted=("A",))
    look("A", wanted=("A",))
    assert look("A", whole=False) == []


def test_models_that_make_up_names_are_told_a_few_times(look: Look) -> None:
    for number in range(100):
        look("A", "B", f"N{number}")
    assert len(look("A", "B")) == 16


def test_worker_has_the_warning_logged_once_for_all_instances(launch: LaunchWorker) -> None:
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("EXTRA", np.zeros(1, np.float32))]) for _ in requests
            ]
    """
    worker = launch(source, output=[{"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]}])
    assert worker.infer("x", "y")["responses"][0]["outputs"] == {}
    warnings = [one for one in worker.logged if one["level"] == "WARNING"]
    assert [("EXTRA" in one["message"], "'OUT'" in one["message"], one["once"]) for one in warnings] == [
        (True, True, True), (False, True, True),
    ]  # fmt: skip
