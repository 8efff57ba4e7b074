"""The backend ``pytorch``: TorchScript and ``torch.export`` programs, and the names of their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conch.backends.base.arrays import DTYPES, Strings
from conch.backends.graphs.pytorch import PyTorchBackend, indices, torch_settings
from conch.core.errors import Code, ConchError
from tests.torch_programs import (
    Accumulate,
    AddSub,
    Failing,
    Keyed,
    OptionalScale,
    Shout,
    classifier,
    save_exported,
    save_script,
)
from tests.unit.backends.tensor_backends import initialise, parameters, start, sums_at_once, tensor

PAIR = np.array([[1, 2]], np.float32)


def script(folder: Path, module: torch.nn.Module, inputs: list[Any], outputs: list[Any], **config: Any) -> Any:
    save_script(module, folder / "model.pt")
    return initialise(PyTorchBackend, folder, {"input": inputs, "output": outputs, **config}, filename="model.pt")


def fp32(*names: str) -> list[dict[str, Any]]:
    return [tensor(name, "TYPE_FP32", -1, 2) for name in names]


@pytest.mark.parametrize(
    ("inputs", "difference"),
    [
        (("b", "a"), 9),  # by the arguments' names
        (("x__1", "x__0"), 9),  # by number
        (("left", "right"), -9),  # in order
        (("b", "x__0"), -9),  # two rules are none
    ],
)
def test_inputs_are_arguments_by_name_by_number_or_in_order(
    tmp_path: Path, inputs: tuple[str, str], difference: int
) -> None:
    backend = start(script(tmp_path, AddSub(), fp32(*inputs), fp32("OUTPUT__0", "OUTPUT__1")))
    first, second = PAIR, PAIR + 9
    found = backend.infer(dict(zip(inputs, (first, second), strict=True)), frozenset({"OUTPUT__1"}))
    assert {name: value.tolist() for name, value in found.items()} == {"OUTPUT__1": [[difference] * 2]}


@pytest.mark.parametrize(("names", "which"), [(("OUTPUT__1", "OUTPUT__0"), 1), (("sum", "difference"), 0)])
def test_outputs_are_results_by_number_or_in_order(tmp_path: Path, names: tuple[str, str], which: int) -> None:
    backend = start(script(tmp_path, AddSub(), fp32("a", "b"), fp32(*names)))
    found = backend.infer({"a": PAIR, "b": PAIR}, frozenset({names[0]}))
    assert found[names[0]].tolist() == [[[2, 4]], [[0, 0]]][which]


def test_names_that_follow_one_rule_alone_are_taken_by_it() -> None:
    assert indices(["b", "a"], ["a", "b"]) == [1, 0]
    assert indices(["INPUT__2", "INPUT__0"], ["a", "b"]) == [2, 0]
    assert indices(["b", "INPUT__0"], ["a", "b"]) == [0, 1]
    assert indices(["__1", "x"], []) == [0, 1]


def test_input_left_out_is_an_optional_argument(tmp_path: Path) -> None:
    optional = [*fp32("a"), {**fp32("scale")[0], "optional": True}]
    backend = start(script(tmp_path, OptionalScale(), optional, fp32("OUTPUT__0")))
    assert backend.infer({"a": PAIR}, frozenset({"OUTPUT__0"}))["OUTPUT__0"].tolist() == [[1, 2]]
    assert backend.infer({"a": PAIR, "scale": PAIR}, frozenset({"OUTPUT__0"}))["OUTPUT__0"].tolist() == [[1, 4]]


def test_dictionaries_are_taken_and_given_by_their_keys(tmp_path: Path) -> None:
    backend = start(script(tmp_path, Keyed(), fp32("right", "left"), fp32("left", "sum", "absent")))
    found = backend.infer({"right": PAIR, "left": PAIR + 1}, frozenset({"left", "sum"}))
    assert {name: value.tolist() for name, value in found.items()} == {"left": [[2, 3]], "sum": [[3, 5]]}
    with pytest.raises(ConchError, match=r"the model returned no 'absent', only sum, left"):
        backend.infer({"right": PAIR, "left": PAIR}, frozenset({"absent"}))


@pytest.mark.parametrize(("batch", "shape"), [(0, (2,)), (4, (2, 1))])
def test_lists_of_strings_are_strings(tmp_path: Path, batch: int, shape: tuple[int, ...]) -> None:
    texts = [tensor("texts", "TYPE_STRING", 1)], [tensor("OUTPUT__0", "TYPE_STRING", 1)]
    backend = start(script(tmp_path, Shout(), *texts, max_batch_size=batch))
    found = backend.infer({"texts": Strings(shape, [b"a", "ü".encode()])}, frozenset({"OUTPUT__0"}))
    assert found["OUTPUT__0"] == Strings(shape, ["a!", "ü!"])


@pytest.mark.parametrize("data_type", ["TYPE_BF16", "TYPE_FP16", "TYPE_INT8", "TYPE_INT64", "TYPE_BOOL", "TYPE_UINT16"])
def test_every_datatype_comes_back_as_it_went(tmp_path: Path, data_type: str) -> None:
    io = [tensor("a", data_type, 3)], [tensor("OUTPUT__0", data_type, 3)]
    backend = start(script(tmp_path, OptionalScale(), *io))
    given = np.array([0, 1, 1], DTYPES[data_type.removeprefix("TYPE_")])
    given.flags.writeable = False  # as in a frame
    found = backend.infer({"a": given}, frozenset({"OUTPUT__0"}))["OUTPUT__0"]
    assert (found.dtype, found.tolist()) == (given.dtype, given.tolist())


def test_exported_program_completes_its_configuration(tmp_path: Path) -> None:
    network = classifier()
    save_exported(network, (torch.zeros(2, 3, 8, 8),), tmp_path / "model.pt2")
    backend = start(
        initialise(PyTorchBackend, tmp_path, filename="model.pt2", backend_config={"default-max-batch-size": "8"})
    )
    assert (backend.config["max_batch_size"], backend.config["dynamic_batching"]) == (8, {})
    assert backend.config["input"] == [tensor("image", "TYPE_FP32", 3, 8, 8)]
    assert backend.config["output"] == [tensor("OUTPUT__0", "TYPE_FP32", 5)]
    images = np.random.default_rng(0).random((3, 3, 8, 8), np.float32)
    found = backend.infer({"image": images}, frozenset({"OUTPUT__0"}))["OUTPUT__0"]
    with torch.no_grad():
        assert np.allclose(found, network(torch.from_numpy(images)).numpy(), atol=1e-6)


def test_exported_program_takes_its_inputs_by_any_rule(tmp_path: Path) -> None:
    save_exported(AddSub(), (torch.zeros(2, 2), torch.zeros(2, 2)), tmp_path / "model.pt2")
    for inputs, difference in ((("b", "a"), 9), (("INPUT__0", "INPUT__1"), -9)):
        config = {"input": fp32(*inputs), "output": fp32("OUTPUT__1")}
        backend = start(initialise(PyTorchBackend, tmp_path, config, filename="model.pt2"))
        rows = np.ones((2, 2), np.float32)
        found = backend.infer(dict(zip(inputs, (rows, rows + 9), strict=True)), frozenset({"OUTPUT__1"}))
        assert found["OUTPUT__1"].tolist() == [[difference] * 2] * 2


def test_torchscript_without_tensors_in_its_configuration_is_refused_with_its_arguments(tmp_path: Path) -> None:
    backend = script(tmp_path, AddSub(), [], [])
    with pytest.raises(ConchError, match=r"add them; forward takes a, b$") as caught:
        backend.complete()
    assert caught.value.code is Code.INVALID_ARG


def refusal(backend: Any, inputs: dict[str, Any] | None = None) -> ConchError:
    with pytest.raises(ConchError) as caught:
        start(backend)
        backend.infer(inputs, frozenset({"OUTPUT__0"}))
    return caught.value


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (fp32("a", "b", "c"), "'c' is not an argument: forward takes 2 argument(s): a, b"),
        (fp32("INPUT__0", "INPUT__2"), "'INPUT__2' is not an argument: forward takes 2 argument(s): a, b"),
        (fp32("INPUT__0", "x__0"), "two inputs are the same argument, forward takes 2 argument(s): a, b"),
        ([*fp32("a"), tensor("b", "TYPE_STRING", 1)], "TYPE_STRING is for arguments that are lists of strings"),
    ],
)
def test_inputs_that_forward_does_not_take_are_refused(tmp_path: Path, inputs: list[Any], reason: str) -> None:
    error = refusal(script(tmp_path, AddSub(), inputs, fp32("OUTPUT__0")))
    assert (error.code, reason in error.message) == (Code.INVALID_ARG, True)


def test_output_of_another_datatype_or_number_is_refused_as_by_triton(tmp_path: Path) -> None:
    backend = script(tmp_path, AddSub(), fp32("a", "b"), [tensor("OUTPUT__0", "TYPE_INT32", 2)])
    pair = {"a": PAIR, "b": PAIR}
    expected = "unexpected datatype TYPE_FP32 for inference output 'OUTPUT__0', expecting TYPE_INT32"
    assert refusal(backend, pair).message == expected
    backend = start(script(tmp_path, AddSub(), fp32("a", "b"), fp32("OUTPUT__2")))
    with pytest.raises(ConchError, match=r"refers to an output index which doesn't exist\. This model has 2 outputs"):
        backend.infer(pair, frozenset({"OUTPUT__2"}))


def test_exception_of_the_program_is_the_answer(tmp_path: Path) -> None:
    error = refusal(script(tmp_path, Failing(), fp32("a"), fp32("OUTPUT__0")), {"a": PAIR})
    assert error.message.startswith("PyTorch execute failure: ") and "[7, 7]" in error.message


@pytest.mark.parametrize("name", ["model.pt", "model.pt2"])
def test_file_that_is_no_program_or_not_there_is_named(tmp_path: Path, name: str) -> None:
    config = {"input": fp32("a"), "output": fp32("b")}
    backend = initialise(PyTorchBackend, tmp_path, config, filename=name)
    assert refusal(backend).message == f"unable to find '{tmp_path / name}' for model 'm'"
    (tmp_path / name).write_text("nothing of the kind")
    assert refusal(backend).message.startswith(f"failed to load '{name}': ")


def test_instances_run_the_program_at_the_same_time(tmp_path: Path) -> None:
    backend = script(tmp_path, AddSub(), fp32("a", "b"), fp32("sum", "difference"))
    assert backend.preloads({"count": 3})[0] == ("torch",)  # which workers of several models share
    assert all(sums_at_once(start(backend, count=3), 3))
    assert backend.threads == 4


def test_parameters_are_those_of_tritons_backend(tmp_path: Path) -> None:
    given = parameters(INFERENCE_MODE="false", DISABLE_OPTIMIZED_EXECUTION="TRUE", INTRA_OP_THREAD_COUNT="3")
    settings = torch_settings({"parameters": given})
    assert (settings.inference_mode, settings.optimized, settings.threads) == (False, False, 3)
    backend = start(script(tmp_path, AddSub(), fp32("a", "b"), fp32("OUTPUT__0"), parameters=given))
    assert backend.runtime_facts["threads"] == "3"
    assert backend.infer({"a": PAIR, "b": PAIR}, frozenset({"OUTPUT__0"}))["OUTPUT__0"].tolist() == [[2, 4]]
    for name, value in {"INFERENCE_MODE": "maybe", "INTER_OP_THREAD_COUNT": "-1"}.items():
        with pytest.raises(ConchError, match=f"failed to convert {name} '{value}' to "):
            torch_settings({"parameters": parameters(**{name: value})})


def test_configuration_with_both_is_not_completed(tmp_path: Path) -> None:
    backend = script(tmp_path, AddSub(), fp32("a", "b"), fp32("OUTPUT__0"))
    assert json.loads(backend.complete()) == backend.config


def test_controls_and_states_of_sequences_are_arguments_and_results(tmp_path: Path) -> None:
    sequences = {
        "control_input": [
            {"name": "start", "control": [{"kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0, 1]}]}
        ],
        "state": [{"input_name": "total", "output_name": "OUTPUT__1", "data_type": "TYPE_FP32", "dims": ["1"]}],
    }
    io = [tensor("value", "TYPE_FP32", 1)], [tensor("OUTPUT__0", "TYPE_FP32", 1)]
    backend = start(script(tmp_path, Accumulate(), *io, sequence_batching=sequences))
    inputs = {name: np.array([number], np.float32) for name, number in {"value": 3, "start": 0, "total": 4}.items()}
    found = backend.infer(inputs, frozenset({"OUTPUT__0", "OUTPUT__1"}))
    assert {name: value.tolist() for name, value in found.items()} == {"OUTPUT__0": [7], "OUTPUT__1": [7]}
