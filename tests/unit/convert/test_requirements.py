"""The packages without which a conversion does not begin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from conch.cli import main
from conch.convert.plan import Plan
from conch.convert.run import needed, require_packages
from conch.core.errors import ConchError

NETWORKS = ["torch", "transformers", "tokenizers", "altair", "vl_convert"]
GRAPHS = ["onnx", "onnxscript", "onnxruntime"]


def plan(**given: Any) -> Plan:
    return Plan(**{"model": "org/model", "repository": Path("models"), **given})


@pytest.mark.parametrize(
    ("given", "modules"),
    [
        ({}, [*GRAPHS, "openvino", "nncf"]),
        ({"quantize": ("none",)}, [*GRAPHS, "openvino"]),
        ({"backends": ("onnxruntime",)}, GRAPHS),
        ({"backends": ("openvino",), "quantize": ("bf16",)}, [*GRAPHS, "openvino"]),
        ({"layout": "triton"}, GRAPHS),
        ({"backends": ("torch",)}, []),
        ({"backends": ("unknown",)}, []),
    ],
)
def test_encoders_need_what_their_variants_do(given: dict[str, Any], modules: list[str]) -> None:
    assert needed(plan(**given), "text-classification") == [*NETWORKS, *modules]


@pytest.mark.parametrize(
    ("given", "modules"),
    [({}, ["nncf"]), ({"quantize": ("fp16",)}, []), ({"backends": ("openvino",), "quantize": ("int4-awq",)}, ["nncf"])],
)
def test_language_models_need_no_onnx(given: dict[str, Any], modules: list[str]) -> None:
    assert needed(plan(**given), "text-generation") == [*NETWORKS, "openvino", *modules]


@pytest.fixture
def core_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (*NETWORKS, *GRAPHS, "openvino", "nncf"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "tokenizers, altair, vl-convert-python, openvino and nncf: "),
        (
            {"backends": ("onnx",), "quantize": ("int8",)},
            "tokenizers, altair, vl-convert-python, onnx, onnxscript and onnxruntime: ",
        ),
        (
            {"backends": ("torch", "openvino"), "quantize": ("none",)},
            "tokenizers, altair, vl-convert-python and openvino: ",
        ),
    ],
)
def test_before_the_task_is_known_what_any_task_needs_is_required(
    core_only: None, given: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConchError, match=expected):
        require_packages(plan(**given))


def test_command_stops_before_it_reads_anything(
    core_only: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "-m", str(tmp_path / "no checkpoint"), "--name", "x", "-o", str(tmp_path / "models")]) == 1

    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.rstrip().endswith('[convert]"')
    assert not (tmp_path / "models").exists()
