"""The weights of an exported language model in fewer bits (NNCF); activations stay as the engine computes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.convert.libraries import silence_libraries
from conch.errors import invalid

#: The precisions of a language model besides fp32.  ``fp16`` stores the weights in 16 bits.
PRECISIONS: Final = ("fp16", "int8", "int4", "int4-awq")
USUAL: Final = ("int8", "int4")
#: Weights that share a scale and a zero point, in a row of a matrix; where a row does not divide, the largest power of
#: two that divides it, down to ``MIN_GROUP``, and int8 below that.
GROUP: Final = 128
MIN_GROUP: Final = 32
#: The length of a calibration text in tokens, and the number of texts: each costs a run of the fp32 graph.
CALIBRATION_TOKENS: Final = 256
CALIBRATION_TEXTS: Final = 64
GRAPH: Final = "openvino_model.xml"


def write(model: Any, folder: Path, precision: str, texts: Sequence[Sequence[int]]) -> Path:
    """Write ``model`` (fp32; it is changed) with weights of ``precision`` into ``folder``; returns the file.

    ``texts`` are token ids to calibrate with, which only ``int4-awq`` needs.
    """
    folder.mkdir()
    file = folder / GRAPH
    with silence_libraries():
        import openvino

        if precision.startswith("int"):
            model = _compressed(model, precision, texts)
        openvino.save_model(model, file, compress_to_fp16=precision == "fp16")
    return file


def _compressed(model: Any, precision: str, texts: Sequence[Sequence[int]]) -> Any:
    import nncf

    if precision == "int8":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    settings: dict[str, Any] = {}
    if precision == "int4-awq":
        if not texts:
            raise invalid("int4-awq needs calibration texts")
        settings = {"dataset": nncf.Dataset(calibration(texts)), "awq": True, "scale_estimation": True,
                    "subset_size": min(len(texts), CALIBRATION_TEXTS)}  # fmt: skip
    return nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        group_size=GROUP,
        ratio=1.0,
        advanced_parameters=nncf.AdvancedCompressionParameters(
            group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST, min_adjusted_group_size=MIN_GROUP
        ),
        **settings,
    )


def calibration(texts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """The graph's inputs for each text, from the beginning of an empty cache."""
    inputs = []
    for text in texts[:CALIBRATION_TEXTS]:
        ids = np.array([text[:CALIBRATION_TOKENS]], np.int64)
        inputs.append({
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1])[None],
            "beam_idx": np.zeros(1, np.int32),
        })  # fmt: skip
    return inputs
