"""Graphs that are edited for servers which run nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from conch.backends.tasks.engines import OnnxRuntimeEngine
from conch.convert.layout import standalone
from tests.unit.convert.layout.onnx_encoders import graph

IDS = np.array([[3, 4, 5], [6, 7, 0]])
MASK = np.array([[1, 1, 1], [1, 1, 0]])


def test_the_vector_of_a_text_is_named_embedding(tmp_path: Path) -> None:
    standalone(graph(tmp_path / "source.onnx", "sentence_embedding"), tmp_path / "made.onnx", pairs=True)

    engine = OnnxRuntimeEngine(tmp_path / "made.onnx", threads=1)

    assert engine.outputs == ("embedding",)
    found = engine.run({"input_ids": IDS, "attention_mask": MASK, "token_type_ids": MASK})["embedding"]
    assert (found[..., 0] == IDS).all() and (found[..., 2] == MASK).all()


def test_single_texts_need_no_types(tmp_path: Path) -> None:
    standalone(graph(tmp_path / "source.onnx", "logits"), tmp_path / "made.onnx", pairs=False)

    engine = OnnxRuntimeEngine(tmp_path / "made.onnx", threads=1)

    assert engine.inputs == {"input_ids", "attention_mask"}
    found = engine.run({"input_ids": IDS, "attention_mask": MASK})["logits"]
    assert (found[..., 2] == 0).all() and (found[..., 0] == IDS).all()
