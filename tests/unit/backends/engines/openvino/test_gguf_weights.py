"""Graphs of GGUF files compute the weights that the files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openvino")
pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")

import gguf
import openvino
from openvino import opset13 as ops

from benchmarks.generation.k_quants import ENCODERS, encode
from conch.backends.engines.openvino.gguf_weights import correct, gguf_graph
from conch.checkpoints.gguf import Blocks, GgufFile, read_blocks, read_gguf
from conch.core.errors import ConchError
from tests.unit.checkpoints import gguf_models
from tests.unit.checkpoints.gguf_splits import split

ROWS, COLUMNS = 8, 512
QUERIES = "blk.0.attn_q.weight"


def packed(values: Any, kind: str) -> Any:
    return encode(values, kind) if kind in ENCODERS else gguf.quantize(values, gguf.GGMLQuantizationType[kind])


def written(path: Path, tensors: dict[str, tuple[Any, str]]) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.attention.head_count", 2)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


def values() -> Any:
    weights = np.random.default_rng(3).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    weights[1, :32] = 0.25  # a group without a scale
    return weights


def of_transformers(weights: Any) -> Any:
    """The rows of queries of two heads in the order of transformers."""
    return weights.reshape(2, ROWS // 4, 2, -1).swapaxes(1, 2).reshape(weights.shape)


def whole(numbers: Any, bits: int) -> Any:
    """A constant of 4 or 8 bits."""
    if bits == 8:
        return ops.constant(numbers)
    held = openvino.Tensor(openvino.Type.u4, list(numbers.shape))
    flat = numbers.reshape(-1)
    held.data[:] = (flat[0::2] | flat[1::2] << 4).reshape(held.data.shape)
    return ops.constant(held)


def graph(blocks: Blocks, norm: Any = None) -> Any:
    """The graph that GenAI makes of a matrix: scales in 16 bits, whole zero points, and perhaps a norm in 16 bits."""
    scales = blocks.scales.astype(np.float16)
    zeros = np.clip(np.round(-blocks.minima / np.where(blocks.scales == 0, 1, blocks.scales)), 0, 2**blocks.bits - 1)
    subtract = ops.subtract(
        ops.convert(whole(blocks.numbers, blocks.bits), "f16"),
        ops.convert(whole(zeros.astype(np.uint8)[..., None], blocks.bits), "f16"),
    )
    multiply = ops.multiply(subtract, ops.constant(scales[..., None]))
    matrix = ops.convert(ops.reshape(multiply, ops.constant(np.array([ROWS, COLUMNS])), False), "f32")
    given = ops.parameter([-1, COLUMNS], openvino.Type.f32, name="x")
    entered: Any = given
    if norm is not None:
        entered = ops.multiply(given, ops.convert(ops.constant(norm.astype(np.float16)[None]), "f32"))
    return openvino.Model([ops.result(ops.matmul(entered, matrix, False, True))], [given], "matrix")


def computed(model: Any) -> Any:
    """The matrix that a graph multiplies with."""
    core: Any = openvino.Core()
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled([np.eye(COLUMNS, dtype=np.float32)])[0].T


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_graph_gets_the_weights_of_the_file(tmp_path: Path, kind: str) -> None:
    data = packed(values(), kind)
    file = written(tmp_path / "m.gguf", {QUERIES: (data, kind)})
    tensor = file.tensors[QUERIES]
    wanted = of_transformers(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))
    model = graph(read_blocks(of_transformers(data), tensor.type))
    rounded = np.abs(computed(model) - wanted).max()

    changed = correct(model, file)

    assert changed == (rounded > 1e-6) == (kind not in ("Q4_0", "Q8_0"))
    np.testing.assert_allclose(computed(model), wanted, atol=1e-6)


def test_graph_of_a_model_in_several_files_has_their_weights(tmp_path: Path) -> None:
    path = gguf_models.write(
        tmp_path / "m.gguf", "llama", gguf_models.model("llama"), "Q8_0", metadata={"general.file_type": 7}
    )
    whole = gguf_graph(read_gguf(path))
    file = read_gguf(split(path, 12))
    assert len(file.parts) > 1
    ids = {name: np.ones((1, 1), np.int64) for name in ("input_ids", "attention_mask", "position_ids")}
    ids["beam_idx"] = np.zeros(1, np.int32)
    outputs = [openvino.Core().compile_model(graph, "CPU")(ids)[0] for graph in (whole, gguf_graph(file))]
    np.testing.assert_array_equal(*outputs)


def test_norm_gets_back_what_16_bits_do_not_hold(tmp_path: Path) -> None:
    data, norm = packed(values(), "Q8_0"), np.linspace(0.1, 0.9, COLUMNS, dtype=np.float32)
    file = written(tmp_path / "m.gguf", {QUERIES: (data, "Q8_0"), "blk.0.attn_norm.weight": (norm, "F32")})
    model = graph(read_blocks(of_transformers(data), file.tensors[QUERIES].type), norm)
    assert correct(model, file)
    wanted = of_transformers(gguf.dequantize(data, gguf.GGMLQuantizationType.Q8_0)) * norm
    np.testing.assert_allclose(computed(model), wanted, atol=1e-6)


def test_graph_with_other_weights_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", {QUERIES: (packed(values(), "Q4_1"), "Q4_1")})
    other = read_blocks(packed(-values(), "Q4_1"), file.tensors[QUERIES].type)
    with pytest.raises(ConchError, match=r"engine .openvino. does not reproduce .* an additional matrix of 8 x 512"):
        correct(graph(other), file)


def test_graph_without_a_tensor_of_the_file_is_refused(tmp_path: Path) -> None:
    data = packed(values(), "Q8_0")
    bias = np.ones(ROWS, np.float32)
    file = written(tmp_path / "m.gguf", {QUERIES: (data, "Q8_0"), "blk.0.attn_q.bias": (bias, "F32")})
    model = graph(read_blocks(of_transformers(data), file.tensors[QUERIES].type))
    with pytest.raises(ConchError, match=r"its graph lacks 'blk.0.attn_q.bias'"):
        correct(model, file)
