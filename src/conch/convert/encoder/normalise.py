"""Layer normalisation of a fused graph in the form that ONNX Runtime computes fastest on a CPU.

Its kernel for SkipLayerNormalization (the residual's sum, normalised) adds up one value at a time: 37 us for 16 x 384
values on the machine this was written on, more than the product before it in INT8.  The same arithmetic as a sum and
an InstanceNormalization over each token's values is vectorised, and takes less than half.  GPUs fuse it better.
"""

from __future__ import annotations

from typing import Any, Final

#: Names of the values that are added to the graph; they occur in no exported one.
PREFIX: Final = "conch.normalise."


def unfuse(model: Any) -> bool:
    """Rewrite the SkipLayerNormalization nodes of an ``onnx.ModelProto`` in place; False when it has none.

    Their inputs must be ``[sequences, tokens, values]`` with as many tokens everywhere; the caller verifies.
    """
    from onnx import TensorProto, helper

    fused = [node for node in model.graph.node if node.op_type == "SkipLayerNormalization"]
    if not fused:
        return False
    # InstanceNormalization scales by channel, which tokens are here: by 1, from the first node's number of tokens.
    tokens, ones, zeros = (PREFIX + name for name in ("tokens", "ones", "zeros"))
    shared = [helper.make_node("Shape", [fused[0].input[0]], [tokens], start=1, end=2)]
    for name, value in ((ones, 1.0), (zeros, 0.0)):
        constant = helper.make_tensor("value", TensorProto.FLOAT, [1], [value])
        shared.append(helper.make_node("ConstantOfShape", [tokens], [name], value=constant))
    nodes = []
    for node in model.graph.node:
        if node.op_type != "SkipLayerNormalization":
            nodes.append(node)
            continue
        if node is fused[0]:
            nodes += shared
        nodes += parts(node, ones, zeros)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return True


def parts(node: Any, ones: str, zeros: str) -> list[Any]:
    """One SkipLayerNormalization as the nodes that compute the same."""
    from onnx import helper

    # Inputs: value, residual, gamma, beta, bias; outputs: normalised, two that inference leaves out, the sum.
    value, residual, gamma, beta, bias = (*node.input, "", "")[:5]
    target = node.output[0]
    total = node.output[3] if len(node.output) > 3 and node.output[3] else f"{PREFIX}{target}.sum"
    epsilon = next(attribute.f for attribute in node.attribute if attribute.name == "epsilon")
    made = []
    if bias:
        made.append(helper.make_node("Add", [value, bias], [f"{PREFIX}{target}.biased"]))
        value = f"{PREFIX}{target}.biased"
    made.append(helper.make_node("Add", [value, residual], [total]))
    normal, scaled = f"{PREFIX}{target}.normal", f"{PREFIX}{target}.scaled"
    made.append(helper.make_node("InstanceNormalization", [total, ones, zeros], [normal], epsilon=epsilon))
    made.append(helper.make_node("Mul", [normal, gamma], [scaled if beta else target]))
    if beta:
        made.append(helper.make_node("Add", [scaled, beta], [target]))
    return made
