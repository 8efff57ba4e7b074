"""Corrects the weights in graphs that OpenVINO GenAI 2026.4 builds from GGUF files.

GenAI represents a group of numbers q as s·(q − z), with a 16-bit s and an integer z. This is inexact for Q4_1 and Q4_K,
whose groups have arbitrary minima, so z is rarely an integer, and for Q4_K and Q6_K, whose scales are products that do
not fit in 16 bits. OpenVINO's CPU plug-in also accepts s and z in float32, which are exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.backends.graphs.openvino import reason
from conch.checkpoints.gguf import DECODERS, Blocks, GgufFile, TensorData, TensorInfo, read_blocks, type_name
from conch.core.errors import ConchError, invalid
from conch.machine import extras
from conch.machine.temporary import TemporaryFolder

#: A device that does not exist. GenAI writes the graph before it compiles it, so this skips the compilation.
_NO_DEVICE: Final = "NONE"
_GRAPH: Final = "openvino_model.xml"
_FLOATS: Final[Mapping[str, Any]] = {"F32": np.float32, "F16": np.float16}

Floats = npt.NDArray[np.float32]


def gguf_graph(file: GgufFile) -> Any:
    """Return the graph of a GGUF file, with the file's own weights.

    Raises INVALID_ARG if GenAI cannot load the file, or if the weights of its graph cannot be matched to the file, and
    UNSUPPORTED if GenAI is not installed.
    """
    extras.require("a GGUF file on engine 'openvino'", "openvino_genai")
    import openvino
    import openvino_genai

    with TemporaryFolder() as scratch:
        # The folder of a tokenizer that GenAI does not need, since no text is generated.
        (scratch / "tokenizer").mkdir()
        for part in file.parts:
            (scratch / part.name).symlink_to(part.resolve())
        written = scratch / _GRAPH
        settings: Any = {"enable_save_ov_model": True}
        try:
            no_tokenizer: Any = openvino_genai.Tokenizer(scratch / "tokenizer")
            openvino_genai.LLMPipeline(scratch / file.path.name, no_tokenizer, _NO_DEVICE, **settings)
        except (RuntimeError, LookupError, ValueError) as error:  # those of C++: out_of_range, invalid_argument
            if not written.is_file():
                raise invalid(f"engine 'openvino' cannot load {file.path}: {reason(error)}") from None
        core: Any = openvino.Core()
        # The model maps the file, which may be removed after that.
        model = core.read_model(written)
        correct(model, file)
        return model


def correct(model: Any, file: GgufFile) -> bool:
    """Give the graph ``model`` the weights of the file. Returns whether any weight has changed.

    Raises INVALID_ARG if the quantised numbers of the graph differ from the file, or if the graph lacks a tensor.
    """
    tensors = _FileTensors(file)
    changed = False
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "Multiply":
            matrix = _GraphMatrix.of(node)
            changed |= matrix is not None and matrix.correct(tensors)
        elif kind == "Constant":
            changed |= _correct_floats(node, tensors)
    if missing := tensors.missing:
        raise _mismatch(file, f"its graph lacks '{missing[0]}'")
    model.validate_nodes_and_infer_types()
    return changed


def _mismatch(file: GgufFile, detail: str) -> ConchError:
    return invalid(
        f"engine 'openvino' does not reproduce the outputs of {file.path}: {detail}; set parameter 'engine' to "
        "'transformers'"
    )


class _FileTensors:
    """The tensors of a file by the content of their first rows; records the tensors that a graph has."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._data = TensorData(file)
        self._matched_names: set[str] = set()
        # GenAI may reorder rows but never moves the first row.
        self._by_first_row: dict[bytes, list[TensorInfo]] = defaultdict(list)
        for tensor in file.tensors.values():
            kind = type_name(tensor.type)
            if kind in DECODERS:
                self._by_first_row[self._blocks(tensor, 1).numbers.tobytes()].append(tensor)
            elif kind in _FLOATS:
                self._by_first_row[_half(self._floats(tensor)[:1]).tobytes()].append(tensor)

    @property
    def missing(self) -> list[str]:
        return [name for name in self.file.tensors if name not in self._matched_names]

    def blocks(self, numbers: npt.NDArray[np.uint8], bits: int, scales: Floats) -> Blocks:
        """Return the file's matrix with these numbers and approximately these scales.

        Its rows are in the order of ``numbers``. Raises INVALID_ARG if the file has no such matrix.
        """
        rows, groups, size = numbers.shape
        for tensor in self._by_first_row[numbers[0].tobytes()]:
            if tensor.shape != (rows, groups * size) or type_name(tensor.type) not in DECODERS:
                continue
            blocks = self._blocks(tensor)
            if (blocks.bits, blocks.numbers.shape) != (bits, numbers.shape):
                continue
            for order in self._orders(tensor):
                ordered = blocks if order is None else blocks.rows(order)
                if np.array_equal(ordered.numbers, numbers) and np.allclose(ordered.scales, scales, 1e-2, 1e-6):
                    self._matched_names.add(tensor.name)
                    return ordered
        raise _mismatch(self.file, f"its graph has an additional matrix of {rows} x {groups * size} numbers")

    def floats(self, values: Any) -> Any:
        """Return the file's tensor ``[rows, columns]`` that equals ``values`` in 16 bits, or None."""
        halves = _half(values)
        for tensor in self._by_first_row[halves[:1].tobytes()]:
            if type_name(tensor.type) not in _FLOATS:
                continue
            held = self._floats(tensor)
            for order in self._orders(tensor) if held.shape == values.shape else ():
                ordered = held if order is None else held[order]
                if np.array_equal(_half(ordered), halves):
                    self._matched_names.add(tensor.name)
                    return ordered
        return None

    def _blocks(self, tensor: TensorInfo, rows: int | None = None) -> Blocks:
        raw = self._data.of(tensor).reshape(tensor.shape[0], -1)
        return read_blocks(raw[:rows], tensor.type)

    def _floats(self, tensor: TensorInfo) -> Any:
        raw = self._data.of(tensor)
        return raw.view(_FLOATS[type_name(tensor.type)]).reshape(-1, tensor.shape[-1])

    def _orders(self, tensor: TensorInfo) -> Iterator[Any]:
        """Yield the row orders that GenAI may apply: none, or the reverse of llama.cpp's for rotary embeddings."""
        yield None
        heads = {
            "attn_q": self.file.integer("llama.attention.head_count", 0),
            "attn_k": self.file.integer("llama.attention.head_count_kv", 0),
        }.get(tensor.name.split(".")[-2] if "." in tensor.name else "", 0)
        if heads > 0 and tensor.shape[0] % (2 * heads) == 0:
            yield np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


class _GraphMatrix:
    """The nodes of a quantised matrix: Convert(Reshape(Multiply(Subtract(numbers, zeros), scales)))."""

    def __init__(self, multiply: Any, numbers: Any, zeros: Any, scales: Any) -> None:
        self._multiply, self._numbers, self._zeros, self._scales = multiply, numbers, zeros, scales

    @classmethod
    def of(cls, multiply: Any) -> _GraphMatrix | None:
        """Return the matrix whose last operation is ``multiply``, or None if it is another multiplication."""
        subtract, scales = (multiply.input_value(index).get_node() for index in (0, 1))
        if subtract.get_type_name() != "Subtract" or scales.get_type_name() != "Constant":
            return None
        numbers, zeros = (subtract.input_value(index).get_node().input_value(0).get_node() for index in (0, 1))
        if numbers.get_type_name() != "Constant" or len(numbers.get_output_shape(0)) != 3:
            return None
        return cls(multiply, numbers, zeros, scales)

    def correct(self, tensors: _FileTensors) -> bool:
        numbers, bits = _integers(self._numbers)
        scales = np.asarray(self._scales.data, np.float32).reshape(numbers.shape[:2])
        blocks = tensors.blocks(numbers, bits, scales)
        zeros = _integers(self._zeros)[0].reshape(scales.shape).astype(np.float32)
        if np.array_equal(scales, blocks.scales) and np.array_equal(-scales * zeros, blocks.minima):
            return False
        self._replace(*_represented(blocks.scales, blocks.minima))
        return True

    def _replace(self, scales: Floats, zeros: Floats) -> None:
        from openvino import opset13 as ops

        exact = ops.multiply(
            ops.subtract(ops.convert(self._numbers, "f32"), ops.constant(zeros[..., None])),
            ops.constant(scales[..., None]),
        )
        for target in list(self._multiply.output(0).get_target_inputs()):
            reshape = target.get_node()
            for converted in list(reshape.output(0).get_target_inputs()):
                new = ops.reshape(exact, reshape.input_value(1), False).output(0)
                for user in list(converted.get_node().output(0).get_target_inputs()):
                    user.replace_source_output(new)


def _integers(constant: Any) -> tuple[npt.NDArray[np.uint8], int]:
    """Return the integers of a constant of 4 or 8 bits, and their number of bits."""
    shape = tuple(constant.get_output_shape(0))
    held = np.frombuffer(constant.data.tobytes(), np.uint8)
    if constant.get_element_type().get_type_name() != "u4":
        return held.reshape(shape), 8
    pairs = np.stack([held & 15, held >> 4], -1).reshape(-1)
    return pairs[: int(np.prod(shape))].reshape(shape), 4


def _correct_floats(constant: Any, tensors: _FileTensors) -> bool:
    """Replace a constant of floats by the values of the file's tensor that equals it in 16 bits."""
    shape = tuple(constant.get_output_shape(0))
    if len(shape) < 2 or constant.get_element_type().get_type_name() not in ("f32", "f16"):
        return False
    values = np.asarray(constant.data)
    values = values.reshape(-1, shape[-1])
    exact = tensors.floats(values)
    if exact is None or np.array_equal(exact, values):
        return False
    from openvino import opset13 as ops

    new = ops.constant(exact.astype(np.float32).reshape(shape)).output(0)
    for target in list(constant.output(0).get_target_inputs()):
        target.replace_source_output(new)
    return True


def _half(values: Any) -> Any:
    """Convert floats to 16 bits for comparison; values out of range become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16, copy=False)


def _represented(scales: Floats, minima: Floats) -> tuple[Floats, Floats]:
    """Return scales and zero points of groups.

    A group with scale 0 gets a tiny scale instead, so that all its numbers equal its minimum to 24 bits.
    """
    constant = scales == 0
    factors = np.where(constant, np.abs(minima) * np.float32(2.0**-26), scales).astype(np.float32)
    zeros = np.where(factors == 0, 0, -minima / np.where(factors == 0, 1, factors))
    return factors, zeros.astype(np.float32)
