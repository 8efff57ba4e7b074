"""Building variants: what is built for which backend and precision, and one failure that does not end the rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import BertConfig

from conch.backends.base.arrays import Array
from conch.convert.encoder import export, network, variants
from conch.convert.encoder.network import ReferenceNetwork
from conch.convert.verdict import BuiltVariant, FailedVariant
from conch.core.errors import Code, ConchError, internal
from tests.convert_checkpoints import encoder


def calibration() -> list[dict[str, Array]]:
    draw = np.random.default_rng(0)
    ids = [draw.integers(5, 90, (1, tokens)) for tokens in (9, 5, 12, 3)]
    return [
        {"input_ids": id_, "attention_mask": np.ones_like(id_), "token_type_ids": np.zeros_like(id_)} for id_ in ids
    ]


def build(
    folder: Path, backends: Sequence[str], quantize: Sequence[str], heard: list[str] | None = None
) -> list[BuiltVariant | FailedVariant]:
    checkpoint = encoder(folder / "checkpoint", BertConfig, "text-classification", num_labels=3)
    work = folder / "work"
    work.mkdir()
    steps = heard if heard is not None else []
    builder = variants.VariantBuilder(partial(network.load, checkpoint), calibration(), work, steps.append)
    return builder.build(variants.planned(backends, quantize))


def test_every_backend_gives_its_precisions(tmp_path: Path) -> None:
    heard: list[str] = []

    built = build(tmp_path, ["torch", "onnx", "openvino"], ["int8", "int8-static"], heard)

    assert all(isinstance(one, BuiltVariant) for one in built), built
    found = {one.name: one for one in built if isinstance(one, BuiltVariant)}
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
    assert built[0] == BuiltVariant("torch-fp32", "torch", "fp32", None)
    assert built[1:] == [
        FailedVariant(name, reason)
        for name in ("onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32", "openvino-int8")
    ]
    assert len(tried) == 1


def test_variant_that_fails_leaves_the_others(tmp_path: Path) -> None:
    built = build(tmp_path, ["onnx", "tensorrt"], ["fp16"])

    assert [type(one) for one in built] == [BuiltVariant, FailedVariant, FailedVariant, FailedVariant]
    assert isinstance(built[1], FailedVariant) and "pip install onnxruntime-gpu" in built[1].reason
    assert built[3] == FailedVariant(
        "tensorrt-fp16", "this ONNX Runtime does not include TensorRT: pip install onnxruntime-gpu tensorrt"
    )


@pytest.mark.parametrize(
    ("backends", "quantize", "message"),
    [
        (["onnx"], ["int4"], "--quantize int4 is not supported for this model: choose from bf16, fp16, int8"),
        (["torch"], ["int8"], "no chosen backend supports int8: add one of onnxruntime, openvino"),
    ],
)
def test_unsupported_precisions_are_refused(backends: list[str], quantize: list[str], message: str) -> None:
    with pytest.raises(ConchError) as refused:
        variants.planned(backends, quantize)

    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message.startswith(message)


def test_task_that_generates_is_unsupported(tmp_path: Path) -> None:
    checkpoint = encoder(tmp_path, BertConfig, "feature-extraction")
    checkpoint.task = "summarization"

    with pytest.raises(ConchError) as refused:
        network.load(checkpoint)

    assert refused.value.code is Code.UNSUPPORTED
    assert refused.value.message.startswith("task 'summarization' cannot be converted")


def test_calibration_is_taken_evenly() -> None:
    sequences = [{"input_ids": np.full((1, 1), index // 5)} for index in range(50)]

    assert [int(arrays["input_ids"][0, 0]) for arrays in variants.spread(sequences, 3)] == [0, 4, 9]


def test_calibration_reads_the_beginning_of_long_texts() -> None:
    sequences = [{"input_ids": np.ones((1, length))} for length in (8, 8192)]

    assert [arrays["input_ids"].shape[1] for arrays in variants.spread(sequences)] == [8, 512]


def test_calibration_needs_texts() -> None:
    with pytest.raises(ConchError, match="no calibration texts"):
        variants.spread([])
