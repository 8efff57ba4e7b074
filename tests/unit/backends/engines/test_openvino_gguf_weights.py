"""Graphs of GGUF files compute the weights that the files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openvino")
pytest.importorskip("gguf")

import gguf
import openvino
from openvino import opset13 as ops

from conch.backends.engines.openvino.gguf_weights import correct, needs_correction
from conch.checkpoints.gguf.reader import read_gguf
from conch.errors import ConchError

ROWS, COLUMNS = 6, 64


def written(path: Path, packed: Any, kind: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def graph(packed: Any, order: Any) -> Any:
    """The graph that GenAI makes of a Q4_1 matrix, with rows in another order and whole zero points."""
    blocks = packed.reshape(ROWS, -1, 20)[order]
    pairs = np.ascontiguousarray(blocks[..., :4]).view(np.float16)
    scales, minima = np.ascontiguousarray(pairs[..., 0]), pairs[..., 1].astype(np.float32)
    zeros = np.clip(np.round(-minima / np.where(scales == 0, 1, scales)), 0, 15).astype(np.float16)
    numbers = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1).reshape(ROWS, -1, 32)
    held = openvino.Tensor(openvino.Type.u4, [ROWS, COLUMNS // 32, 32])
    held.data[:] = (numbers[..., 0::2] | numbers[..., 1::2] << 4).reshape(held.data.shape)
    whole = ops.subtract(ops.convert(ops.constant(held), "f16"), ops.constant(np.array(zeros[..., None])))
    exact = ops.multiply(whole, ops.constant(np.array(scales[..., None])))
    matrix = ops.convert(ops.reshape(exact, ops.constant(np.array([ROWS, COLUMNS])), False), "f32")
    given = ops.parameter([-1, COLUMNS], openvino.Type.f32, name="x")
    return openvino.Model([ops.result(ops.matmul(given, matrix, False, True))], [given], "matrix")


def computed(model: Any, x: Any) -> Any:
    core: Any = openvino.Core()
    return core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x])[0]


def test_weights_of_a_q4_1_tensor_are_those_of_the_file(tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    values[1, :32] = 0.25  # a block without a scale
    kind = gguf.GGMLQuantizationType.Q4_1
    packed = gguf.quantize(values, kind)
    file = read_gguf(written(tmp_path / "m.gguf", packed, kind))
    order = np.array([2, 0, 1, 5, 4, 3])
    model, x = graph(packed, order), np.eye(COLUMNS, dtype=np.float32)
    wanted = gguf.dequantize(packed, kind)[order].T
    assert np.abs(computed(model, x) - wanted).max() > 0.01

    correct(model, file)

    assert needs_correction(file)
    np.testing.assert_allclose(computed(model, x), wanted, atol=1e-5)


def test_graph_with_other_weights_is_refused(tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(size=(2, ROWS, COLUMNS)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    file = read_gguf(written(tmp_path / "m.gguf", gguf.quantize(values[0], kind), kind))
    with pytest.raises(ConchError, match="engine 'openvino' does not compute the weights of "):
        correct(graph(gguf.quantize(values[1], kind), np.arange(ROWS)), file)


def test_file_without_such_tensors_is_loaded_as_it_is(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quantize(np.ones((ROWS, COLUMNS), np.float32), kind)
    assert not needs_correction(read_gguf(written(tmp_path / "m.gguf", packed, kind)))
