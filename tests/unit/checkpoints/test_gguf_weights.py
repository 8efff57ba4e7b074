"""Every type of tensor is decoded as the package ``gguf`` decodes it."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf

from conch.checkpoints.gguf_weights import decodable, dequantize

COMMON = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip
RARE = ("TQ1_0", "TQ2_0", "NVFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")


@pytest.mark.parametrize("name", COMMON + RARE)
def test_blocks_are_decoded(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, width = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(4).integers(0, 256, (3, 512 // block * width), np.uint8)
    with np.errstate(all="ignore"):
        values = dequantize(rows, kind.value)
        expected = gguf.dequantize(rows, kind)
    assert values.dtype == np.float32 and values.shape == (3, 512)
    usable = np.isfinite(expected) & (np.abs(expected) < 1e30)
    assert usable.mean() > 0.5
    np.testing.assert_array_equal(values[usable], expected[usable])


@pytest.mark.parametrize(
    ("name", "installed", "expected"),
    [("Q5_K", False, True), ("IQ1_S", False, False), ("IQ1_S", True, True), ("Q8_K", True, False)],
)
def test_rare_types_need_the_package(
    monkeypatch: pytest.MonkeyPatch, name: str, installed: bool, expected: bool
) -> None:
    monkeypatch.setattr("conch.checkpoints.gguf_weights.find_spec", lambda name: object() if installed else None)
    assert decodable(gguf.GGMLQuantizationType[name].value) is expected
