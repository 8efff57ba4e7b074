"""Building variants: what is built for which backend and precision, and one failure that does not end the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from transformers import BertConfig

from conch.backends.native.arrays import Array
from conch.checkpoints.options import Options
from conch.convert.encoder import export, variants
from conch.convert.encoder.network import ReferenceNetwork
from conch.convert.encoder.samples import samples
from conch.convert.encoder.variants import Candidate, Failure
from conch.errors import Code, ConchError, internal
from tests.convert_checkpoints import encoder


def calibration() -> list[dict[str, Array]]:
    draw = np.random.default_rng(0)
    lengths = np.array([9, 5, 12, 3])
    mask = (np.arange(12) < lengths[:, None]).astype(np.int64)
    ids = draw.integers(5, 90, (4, 12)) * mask
    return [{"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}]


def build(
    folder: Path, backends: Sequence[str], quantize: Sequence[str], heard: list[str] | None = None
) -> list[Candidate | Failure]:
    checkpoint = encoder(folder / "checkpoint", BertConfig, "text-classification", num_labels=3)
    work = folder / "work"
    work.mkdir()
    return variants.build(
        checkpoint, Options(), backends, quantize, calibration, work, (heard if heard is not None else []).append
    )


def test_every_backend_gives_its_precisions(tmp_path: Path) -> None:
    heard: list[str] = []

    built = build(tmp_path, ["torch", "onnx", "openvino"], ["int8", "int8-static"], heard)

    assert all(isinstance(one, Candidate) for one in built), built
    found = {one.name: one for one in built if isinstance(one, Candidate)}
    assert list(found) == [
        "torch-fp32",
        "onnxruntime-fp32",
        "onnxruntime-int8",
        "onnxruntime-int8-static",
        "openvino-fp32",
        "openvino-int8",
    ]
    assert found["torch-fp32"].path is None and found["torch-fp32"].files == ()
    assert found["onnxruntime-int8-static"].precision == "int8"
    assert [file.name for file in found["openvino-int8"].files] == ["openvino-int8.xml", "openvino-int8.bin"]
    # Nothing is left that no variant needs.
    assert {file for one in found.values() for file in one.files} == set((tmp_path / "work").iterdir())
    assert heard.count("exporting to ONNX") == 1


def test_export_that_fails_fails_what_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(network: ReferenceNetwork, path: Path) -> str:
        tried.append(path)
        raise internal("the export to ONNX failed (torchscript: no)")

    monkeypatch.setattr(export, "export", fails)

    built = build(tmp_path, ["torch", "onnx", "openvino"], ["int8"])

    reason = "the export to ONNX failed (torchscript: no)"
    assert built[0] == Candidate("torch-fp32", "torch", "fp32", None)
    assert built[1:] == [
        Failure(name, reason) for name in ("onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32", "openvino-int8")
    ]
    assert len(tried) == 1


def test_variant_that_fails_leaves_the_others(tmp_path: Path) -> None:
    built = build(tmp_path, ["onnx", "tensorrt"], ["fp16"])

    assert [type(one) for one in built] == [Candidate, Failure, Failure, Failure]
    assert isinstance(built[1], Failure) and "pip install onnxruntime-gpu" in built[1].reason
    assert built[3] == Failure(
        "tensorrt-fp16", "this ONNX Runtime has no TensorRT: pip install onnxruntime-gpu tensorrt"
    )


@pytest.mark.parametrize(
    ("backends", "quantize", "message"),
    [
        (["onxx"], [], "backend 'onxx' is unknown: choose from torch, onnx"),
        (["onnx"], ["int3"], "precision 'int3' is unknown: choose from bf16, fp16, int8"),
        (["torch"], ["int8"], "no chosen backend makes int8: add one of onnxruntime, openvino"),
    ],
)
def test_unknown_names_are_refused(backends: list[str], quantize: list[str], message: str) -> None:
    with pytest.raises(ConchError) as refused:
        variants.plan(backends, quantize)

    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message.startswith(message)


def test_task_that_generates_is_unsupported(tmp_path: Path) -> None:
    checkpoint = encoder(tmp_path, BertConfig, "feature-extraction")
    checkpoint.task = "summarization"

    with pytest.raises(ConchError) as refused:
        variants.build(checkpoint, Options(), ["onnx"], [], calibration, tmp_path, print)

    assert refused.value.code is Code.UNSUPPORTED
    assert refused.value.message.startswith("task 'summarization' cannot be converted")


def test_samples_are_single_rows_without_padding() -> None:
    rows = samples(calibration())

    assert [row["input_ids"].shape for row in rows] == [(1, 9), (1, 5), (1, 12), (1, 3)]
    assert all((row["attention_mask"] == 1).all() for row in rows)


def test_samples_are_taken_evenly() -> None:
    batches = [{"input_ids": np.full((5, 1), index)} for index in range(10)]

    assert [int(row["input_ids"][0, 0]) for row in samples(batches, 3)] == [0, 4, 9]


def test_no_samples_are_refused() -> None:
    with pytest.raises(ConchError, match="no calibration texts"):
        samples([])
