"""Fusing and quantising exported graphs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from transformers import BertConfig

from conch.convert.encoder import export, network, variants
from conch.convert.encoder.export import optimise
from conch.convert.encoder.network import ReferenceNetwork, open_session, run, verify_graph
from conch.core.errors import ConchError
from tests.convert_checkpoints import encoder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReferenceNetwork, Path]:
    folder = tmp_path_factory.mktemp("exported")
    loaded = network.load(encoder(folder / "checkpoint", BertConfig, "feature-extraction"))
    export.export(loaded, folder / "plain.onnx")
    return loaded, folder / "plain.onnx"


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def similarity(path: Path, loaded: ReferenceNetwork) -> float:
    """The cosine between a graph's answer and torch's."""
    arrays = loaded.example(3, 21, seed=9)
    one, other = (
        run(open_session(path), arrays)["last_hidden_state"],
        loaded.run(arrays)["last_hidden_state"],
    )
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


def test_attention_is_fused_and_normalisation_is_not(exported: tuple[ReferenceNetwork, Path], tmp_path: Path) -> None:
    loaded, plain = exported

    assert optimise(plain, loaded, tmp_path / "fused.onnx") == ""

    found = operators(tmp_path / "fused.onnx")
    assert (found["Attention"], found["InstanceNormalization"], found["SkipLayerNormalization"]) == (2, 4, 0)
    verify_graph(tmp_path / "fused.onnx", loaded)


def test_fused_normalisation_is_kept_for_a_gpu(
    exported: tuple[ReferenceNetwork, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, plain = exported
    monkeypatch.setattr(export, "on_gpu", lambda: True)

    assert optimise(plain, loaded, tmp_path / "fused.onnx") == ""

    assert operators(tmp_path / "fused.onnx")["SkipLayerNormalization"] == 4


def test_fused_graph_that_disagrees_is_not_used(
    exported: tuple[ReferenceNetwork, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, plain = exported

    def wrong(node: Any, ones: str, zeros: str) -> list[Any]:
        return [onnx.helper.make_node("Identity", [node.input[0]], [node.output[0]])]

    monkeypatch.setattr(export, "parts", wrong)

    assert optimise(plain, loaded, tmp_path / "fused.onnx") == ""

    assert operators(tmp_path / "fused.onnx")["SkipLayerNormalization"] == 4


def test_graph_that_the_optimiser_cannot_read_stays_plain(
    exported: tuple[ReferenceNetwork, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, plain = exported

    def fails(plain: Path, network: ReferenceNetwork) -> Any:
        raise AssertionError

    monkeypatch.setattr(export, "fused", fails)

    assert optimise(plain, loaded, tmp_path / "fused.onnx") == "AssertionError"

    assert (tmp_path / "fused.onnx").read_bytes() == plain.read_bytes()


def test_dynamic_int8_covers_the_products(exported: tuple[ReferenceNetwork, Path], tmp_path: Path) -> None:
    loaded, plain = exported
    optimise(plain, loaded, tmp_path / "fused.onnx")

    variants.dynamic(tmp_path / "fused.onnx", tmp_path / "int8.onnx")

    found = operators(tmp_path / "int8.onnx")
    assert (found["QAttention"], found["MatMulInteger"], found["MatMul"]) == (2, 6, 0)
    assert similarity(tmp_path / "int8.onnx", loaded) > 0.99


def test_static_int8_has_fixed_scales(exported: tuple[ReferenceNetwork, Path], tmp_path: Path) -> None:
    loaded, plain = exported
    optimise(plain, loaded, tmp_path / "fused.onnx")
    samples = [loaded.example(1, tokens, seed=tokens) for tokens in range(4, 20)]

    variants.static(tmp_path / "fused.onnx", samples, tmp_path / "int8.onnx")

    found = operators(tmp_path / "int8.onnx")
    assert (found["MatMul"], found["QAttention"]) == (6, 2)
    # Six products of an activation and a weight: each activation is quantised, each operand brought back.
    assert found["QuantizeLinear"] == 6 and found["DequantizeLinear"] == 12
    assert similarity(tmp_path / "int8.onnx", loaded) > 0.99
    assert not [file for file in tmp_path.iterdir() if file.is_dir()]


def test_openvino_computes_the_same(exported: tuple[ReferenceNetwork, Path], tmp_path: Path) -> None:
    loaded, plain = exported

    export.convert_graph(plain, loaded, tmp_path / "fp32.xml")
    export.convert_graph(plain, loaded, tmp_path / "fp16.xml", half=True)

    export.verify_ir(tmp_path / "fp32.xml", loaded)
    assert (tmp_path / "fp16.bin").stat().st_size < 0.6 * (tmp_path / "fp32.bin").stat().st_size


def test_openvino_int8_is_calibrated(
    exported: tuple[ReferenceNetwork, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded, plain = exported
    samples = [loaded.example(1, tokens, seed=tokens) for tokens in range(4, 12)]
    capfd.readouterr()

    export.quantise(plain, loaded, samples, tmp_path / "int8.xml")

    assert capfd.readouterr() == ("", "")
    assert "FakeQuantize" in (tmp_path / "int8.xml").read_text()
    with pytest.raises(ConchError, match="differs from torch by"):
        export.verify_ir(tmp_path / "int8.xml", loaded)


@pytest.mark.parametrize(
    ("flags", "seven_bits"),
    [
        ({"avx2"}, True),
        ({"avx2", "avx512_vnni"}, False),
        ({"avx2", "amx_int8"}, False),
        ({"asimd"}, False),
        (set(), False),
    ],
)
def test_weights_keep_to_seven_bits_where_products_overflow(flags: set[str], seven_bits: bool) -> None:
    assert variants.saturates(frozenset(flags)) is seven_bits
