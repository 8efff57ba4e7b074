"""Corrects the weights that OpenVINO GenAI 2026.4 makes of Q4_1 tensors in GGUF files.

A block of 32 numbers q of such a tensor has a scale d and a minimum m, and stands for d·q + m.  GenAI writes this as
d·(q − z) and rounds z = −m/d to a whole number.  OpenVINO's CPU plug-in computes with any z, at the same speed.
Source of the layout: ggml's ggml-common.h.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.backends.engines.openvino.config import reason
from conch.checkpoints.gguf.reader import GgufFile, TensorInfo, read_gguf
from conch.errors import invalid

#: The type of such tensors, the numbers of a block, and its bytes.
Q4_1: Final = 3
_NUMBERS: Final = 32
_BYTES: Final = 20
#: A device that does not exist: GenAI writes the graph before it compiles it, and compiling is not needed.
_NO_DEVICE: Final = "NONE"

Floats = npt.NDArray[np.float32]


def needs_correction(file: GgufFile) -> bool:
    """Whether GenAI changes the weights of a file."""
    return any(tensor.type == Q4_1 for tensor in file.tensors.values())


def write_corrected(gguf: Path, scratch: Path) -> Path:
    """Write the graph of a GGUF file with the file's own weights; returns its folder in ``scratch``.

    Raises INVALID_ARG if GenAI cannot load the file, or if a weight of its graph is not in the file.
    """
    import openvino
    import openvino_genai

    made, corrected = scratch / "made", scratch / "corrected"
    for folder in (made, corrected):
        folder.mkdir()
    (made / gguf.name).symlink_to(gguf.resolve())
    written = made / "openvino_model.xml"
    settings: Any = {"enable_save_ov_model": True}
    try:
        openvino_genai.LLMPipeline(made / gguf.name, _NO_DEVICE, **settings)
    except RuntimeError as error:
        if not written.is_file():
            raise invalid(f"engine 'openvino' cannot load {gguf}: {reason(error)}") from None
    core: Any = openvino.Core()
    model = core.read_model(written)
    correct(model, read_gguf(gguf))
    openvino.save_model(model, corrected / written.name, compress_to_fp16=False)
    return corrected


def correct(model: Any, file: GgufFile) -> None:
    """Set the zero points of the 4-bit matrices of ``model`` to those of the file, as float32."""
    from openvino import opset13 as ops

    known: dict[bytes, Floats] = {}
    for tensor in file.tensors.values():
        if tensor.type == Q4_1:
            scales, minima, numbers = _blocks(file.path, tensor)
            for row in range(len(scales)):
                # Rows are in another order in the graph where GenAI undoes llama.cpp's order of rotary embeddings.
                known[scales[row].tobytes() + numbers[row].tobytes()] = minima[row]
    for multiply in model.get_ordered_ops():
        if multiply.get_type_name() != "Multiply":
            continue
        subtract, scale = (multiply.input_value(place).get_node() for place in (0, 1))
        if subtract.get_type_name() != "Subtract" or scale.get_type_name() != "Constant":
            continue
        weights = subtract.input_value(0).get_node().input_value(0).get_node()
        if weights.get_type_name() != "Constant" or weights.get_element_type().get_type_name() != "u4":
            continue
        rows, groups, _ = weights.get_output_shape(0)
        scales = np.asarray(scale.data, np.float16).reshape(rows, groups)
        numbers = np.frombuffer(weights.data.tobytes(), np.uint8).reshape(rows, -1)
        zeros = np.empty((rows, groups), np.float32)
        factors = scales.astype(np.float32)
        for row in range(rows):
            found = known.get(scales[row].tobytes() + numbers[row].tobytes())
            if found is None:
                raise invalid(
                    f"engine 'openvino' does not compute the weights of {file.path}: set parameter 'engine' to "
                    "'transformers'"
                )
            factors[row], zeros[row] = _represented(factors[row], found)
        exact = ops.multiply(
            ops.subtract(ops.convert(weights, "f32"), ops.constant(zeros[..., None])),
            ops.constant(factors[..., None]),
        )
        for target in list(multiply.output(0).get_target_inputs()):
            reshape = target.get_node()
            for converted in list(reshape.output(0).get_target_inputs()):
                new = ops.reshape(exact, reshape.input_value(1), False).output(0)
                for user in list(converted.get_node().output(0).get_target_inputs()):
                    user.replace_source_output(new)
    model.validate_nodes_and_infer_types()


def _represented(scales: Floats, minima: Floats) -> tuple[Floats, Floats]:
    """Scales and zero points of blocks; one without a scale has its minimum for all numbers, to 24 bits."""
    constant = scales == 0
    factors = np.where(constant, np.abs(minima) * np.float32(2.0**-26), scales).astype(np.float32)
    zeros = np.where(factors == 0, 0, -minima / np.where(factors == 0, 1, factors))
    return factors, zeros.astype(np.float32)


def _blocks(path: Path, tensor: TensorInfo) -> tuple[npt.NDArray[np.float16], Floats, npt.NDArray[np.uint8]]:
    """Scales and minima ``[rows, groups]`` of a Q4_1 tensor, and its numbers, two in a byte, the first one below."""
    raw = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.size,))
    blocks = np.array(raw).reshape(tensor.shape[0], -1, _BYTES)
    pairs = np.ascontiguousarray(blocks[..., :4]).view(np.float16)
    low, high = blocks[..., 4:] & 15, blocks[..., 4:] >> 4
    numbers = np.concatenate([low, high], -1)
    packed = numbers[..., 0::2] | numbers[..., 1::2] << 4
    rows = tensor.shape[0]
    return np.ascontiguousarray(pairs[..., 0]), pairs[..., 1].astype(np.float32), packed.reshape(rows, -1)
