"""What a conversion is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conch.convert.plan import Plan, default_name
from conch.core.errors import ConchError
from conch.measure.texts.shapes import Shape


def plan(**given: Any) -> Plan:
    return Plan(**{"model": "org/some model.v1", "repository": Path("models"), **given})


def test_name_comes_from_the_model(tmp_path: Path) -> None:
    assert default_name("org/name") == "name"
    assert default_name("org/some model.v1") == "some-model.v1"
    (tmp_path / "folder").mkdir()
    assert default_name(f"{tmp_path}/folder/") == "folder"


def test_folders_are_those_of_the_layout() -> None:
    assert plan(name="n").folders == ("n",)
    assert plan(name="n", layout="triton").folders == ("n_onnx_tokenize", "n_onnx_model", "n_onnx_inference")


def test_usual_lengths_are_cut_to_what_the_model_takes() -> None:
    assert plan(batch_sizes=(1,)).shapes(256) == [Shape(1, 16), Shape(1, 128), Shape(1, 256)]
    assert plan(batch_sizes=(1,)).shapes(64) == [Shape(1, 16), Shape(1, 64)]


def test_length_that_is_asked_for_and_too_long_is_refused() -> None:
    with pytest.raises(ConchError, match="--seq-len 384 is more than the model accepts: at most 256 tokens"):
        plan(sequence_lengths=(16, 384)).shapes(256)


def test_repeated_lengths_are_measured_once() -> None:
    assert plan(batch_sizes=(8,), sequence_lengths=(16, 128, 128)).shapes(512) == [Shape(8, 16), Shape(8, 128)]


def test_quantisation_is_the_default_where_a_backend_has_it() -> None:
    assert plan().precisions == ("int8",)
    assert plan(backends=("pytorch",)).precisions == ()
    assert plan(quantize=("none",)).precisions == ()


def test_trio_needs_no_openvino() -> None:
    assert plan().engines == ("torch", "onnx", "openvino")
    assert plan(layout="triton").engines == ("torch", "onnx")


def test_backends_have_the_names_of_other_converters_too() -> None:
    assert plan(backends=("tensorrt", "onnx", "pytorch", "torch")).engines == ("tensorrt", "onnx", "torch")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": ".hidden"}, "--name"),
        ({"name": "a/b"}, "--name"),
        ({"batch_sizes": (0,)}, "--batch-size"),
        ({"sequence_lengths": (1,)}, "--seq-len"),
        ({"layout": "triton", "backends": ("openvino",)}, "add onnx to --backend"),
        ({"backends": ("torch", "onxx")}, "backend 'onxx' is unknown: choose from torch, onnx, openvino, tensorrt"),
        ({"quantize": ("int3",)}, "precision 'int3' is unknown: choose from int8, int8-static, int4"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError, match=message):
        plan(**given).check()


def test_the_command_repeats_the_conversion() -> None:
    assert plan().command == "conch convert -m 'org/some model.v1'"
    repeated = plan(
        repository=Path("r"), quantize=("none",), batch_sizes=(1, 8), seconds=7.5, keep="auto", trust_remote_code=True
    )
    assert repeated.command == (
        "conch convert -m 'org/some model.v1' -o r --trust-remote-code --quantize none --keep auto --batch-size 1 8"
        " --seconds 7.5"
    )
