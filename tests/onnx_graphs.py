"""Small ONNX graphs, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save_model

#: The graph's types by the protocol's names.
TYPES = {
    "BOOL": TensorProto.BOOL, "UINT8": TensorProto.UINT8, "UINT16": TensorProto.UINT16, "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64, "INT8": TensorProto.INT8, "INT16": TensorProto.INT16, "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64, "FP16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16, "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE, "BYTES": TensorProto.STRING,
}  # fmt: skip

Shape = Sequence[int | str]


def add_sub(path: Path, datatype: str = "FP32", shape: Shape = ("batch", 4)) -> Path:
    """``sum`` = ``a`` + ``b`` and ``difference`` = ``a`` - ``b``."""
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])]
    return write(
        path,
        nodes,
        [(name, datatype, shape) for name in "ab"],
        [("sum", datatype, shape), ("difference", datatype, shape)],
    )


def identity(path: Path, datatype: str, shape: Shape = ("batch", "width")) -> Path:
    """``y`` is ``x``."""
    return write(path, [helper.make_node("Identity", ["x"], ["y"])], [("x", datatype, shape)], [("y", datatype, shape)])


def encoder(path: Path, output: str = "last_hidden_state", width: int = 3, datatype: str = "FP32") -> Path:
    """Each token's ``[id, id + type, id * mask]``, as a network of transformers gives its states."""
    table = numpy_helper.from_array(np.array([2], np.int64), "last")
    names = ("input_ids", "attention_mask", "token_type_ids")
    nodes = [
        helper.make_node("Add", ["input_ids", "token_type_ids"], ["typed"]),
        helper.make_node("Mul", ["input_ids", "attention_mask"], ["masked"]),
        *(helper.make_node("Unsqueeze", [name, "last"], [f"{name}_"]) for name in ("input_ids", "typed", "masked")),
        helper.make_node("Concat", ["input_ids_", "typed_", "masked_"], ["joined"], axis=2),
        helper.make_node("Cast", ["joined"], [output], to=TYPES[datatype]),
    ]
    inputs = [(name, "INT64", ("batch", "tokens")) for name in names]
    return write(path, nodes, inputs, [(output, datatype, ("batch", "tokens", width))], [table])


def ragged(path: Path) -> Path:
    """``y`` is twice ``x``, ``totals`` the sum of each request's elements of ``x``, which lie between ``ends``."""
    zero = numpy_helper.from_array(np.array([0], np.int64), "zero")
    first = numpy_helper.from_array(np.array([0.0], np.float32), "first")
    one = numpy_helper.from_array(np.array([1], np.int64), "one")
    end = numpy_helper.from_array(np.array([2**31], np.int64), "end")
    last = numpy_helper.from_array(np.array([-1], np.int64), "last")
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"]),
        helper.make_node("CumSum", ["x", "zero"], ["running"]),
        helper.make_node("Concat", ["first", "running"], ["sums"], axis=0),
        helper.make_node("Gather", ["sums", "ends"], ["at_ends"]),
        helper.make_node("Slice", ["at_ends", "one", "end"], ["until"]),
        helper.make_node("Slice", ["at_ends", "zero", "last"], ["since"]),
        helper.make_node("Sub", ["until", "since"], ["totals"]),
    ]
    return write(
        path,
        nodes,
        [("x", "FP32", ("elements",)), ("ends", "INT32", ("requests",))],
        [("y", "FP32", ("elements",)), ("totals", "FP32", ("requests",))],
        [zero, first, one, end, last],
    )


def write(
    path: Path,
    nodes: list[Any],
    inputs: Sequence[tuple[str, str, Shape]],
    outputs: Sequence[tuple[str, str, Shape]],
    constants: Sequence[Any] = (),
    **saved: Any,
) -> Path:
    """A graph of ``nodes`` in a file, whose folder is made."""
    described = [
        [helper.make_tensor_value_info(name, TYPES[datatype], list(shape)) for name, datatype, shape in tensors]
        for tensors in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "graph", *described, initializer=list(constants))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, path, **saved)
    return path
