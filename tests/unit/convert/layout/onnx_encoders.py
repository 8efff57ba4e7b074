"""For tests of layouts: an ONNX graph like that of an encoder."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper


def graph(path: Path, output: str = "last_hidden_state", opset: int = 18) -> Path:
    """Hidden vectors ``[id, -mask, type]`` of each token."""
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    nodes = []
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [2])
    minus = helper.make_tensor("minus", TensorProto.FLOAT, [], [-1.0])
    for name in inputs:
        nodes.append(helper.make_node("Cast", [name], [f"{name}_float"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Unsqueeze", [f"{name}_float", "axes"], [f"{name}_column"]))
    nodes.append(helper.make_node("Mul", ["attention_mask_column", "minus"], ["mask_column"]))
    columns = ["input_ids_column", "mask_column", "token_type_ids_column"]
    nodes.append(helper.make_node("Concat", columns, [output], axis=2))
    made = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"]) for name in inputs],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n", "t", 3])],
        [axes, minus],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path
