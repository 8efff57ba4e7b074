"""Graphs that are edited for servers which run nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conch.backends.tasks.engines import OnnxRuntimeEngine
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.modules import DENSE, EmbeddingModel, Module
from conch.checkpoints.options import Options
from conch.checkpoints.steps import Pooling
from conch.convert.layout import standalone
from conch.core.errors import ConchError
from tests.unit.convert.layout.onnx_encoders import graph

IDS = np.array([[3, 4, 5], [6, 7, 0]])
MASK = np.array([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
@pytest.mark.parametrize("normalize", [False, True])
def test_pooling_in_the_graph_is_the_backends(
    checkpoint: Checkpoint, tmp_path: Path, mode: str, normalize: bool, opset: int
) -> None:
    model = EmbeddingModel.read(replace(checkpoint, options=Options(pooling=mode, normalize=normalize)))
    source = graph(tmp_path / "source.onnx", opset=opset)
    standalone(source, tmp_path / "made.onnx", embedding=model, pairs=True)
    arrays = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": MASK}

    engine = OnnxRuntimeEngine(tmp_path / "made.onnx", threads=1)
    hidden = OnnxRuntimeEngine(source, threads=1).run(arrays)["last_hidden_state"]

    assert engine.outputs == ("embedding",)
    expected = Pooling(model, checkpoint)(hidden, MASK)
    np.testing.assert_allclose(engine.run(arrays)["embedding"], expected, rtol=1e-6)


def test_zeros_alone_can_be_pooled(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """``perf_analyzer --input-data zero`` sends no real token at all."""
    model = EmbeddingModel.read(replace(checkpoint, options=Options(normalize=True)))
    standalone(graph(tmp_path / "source.onnx"), tmp_path / "made.onnx", embedding=model, pairs=False)
    zeros = np.zeros((2, 3), np.int64)

    found = OnnxRuntimeEngine(tmp_path / "made.onnx", threads=1).run({"input_ids": zeros, "attention_mask": zeros})

    assert np.isfinite(found["embedding"]).all()


def test_single_texts_need_no_types(tmp_path: Path) -> None:
    standalone(graph(tmp_path / "source.onnx", "logits"), tmp_path / "made.onnx", embedding=None, pairs=False)

    engine = OnnxRuntimeEngine(tmp_path / "made.onnx", threads=1)

    assert engine.inputs == {"input_ids", "attention_mask"}
    found = engine.run({"input_ids": IDS, "attention_mask": MASK})["logits"]
    assert (found[..., 2] == 0).all() and (found[..., 0] == IDS).all()


def test_pooling_that_takes_weights_is_refused(tmp_path: Path) -> None:
    source = graph(tmp_path / "source.onnx")

    both = Module("Pooling", "", {"pooling_mode": ["mean", "max"]})
    for modules in ((Module("Pooling"), Module("Dense", "2_Dense")), (both,)):
        model = EmbeddingModel(DENSE, (Module("Transformer"), *modules), saved=True)
        with pytest.raises(ConchError, match="--layout triton cannot put"):
            standalone(source, tmp_path / "made.onnx", embedding=model, pairs=False)


@pytest.mark.parametrize("opset", [13, 18])
def test_truncated_embedding_in_the_graph_is_the_backends(checkpoint: Checkpoint, tmp_path: Path, opset: int) -> None:
    model = EmbeddingModel(
        DENSE, (Module("Transformer"), Module("Pooling"), Module("Normalize")), saved=True, truncate_dim=2, dimension=2
    )
    source = graph(tmp_path / "source.onnx", opset=opset)
    standalone(source, tmp_path / "made.onnx", embedding=model, pairs=True)
    arrays = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": MASK}
    hidden = OnnxRuntimeEngine(source, threads=1).run(arrays)["last_hidden_state"]
    found = OnnxRuntimeEngine(tmp_path / "made.onnx", threads=1).run(arrays)["embedding"]
    assert found.shape == (2, 2)
    np.testing.assert_allclose(found, Pooling(model, checkpoint)(hidden, MASK), rtol=1e-6)
