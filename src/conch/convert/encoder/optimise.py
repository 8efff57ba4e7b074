"""Applies ONNX Runtime's transformer optimizer to an exported graph, and converts graphs to fp16.

The optimizer fuses operators that ONNX Runtime's start-up passes do not: attention blocks, and embeddings and residuals
with their normalization.  A fused graph is used only if it loads and agrees with the network.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

from conch.convert.encoder import onnx_graph
from conch.convert.encoder.network import ReferenceNetwork
from conch.convert.libraries import describe_error, silence_libraries
from conch.core.errors import unsupported

# ONNX Runtime's CPU kernel of SkipLayerNormalization (normalized sum with the residual) adds one value at a time: 37 µs
# for 16 x 384 values on the development machine, more than the preceding INT8 product.  The same arithmetic as a sum
# and an InstanceNormalization over each token's values is vectorized and takes less than half.  GPUs are faster with
# the fused operator.


#: Prefix of value names that are added to the graph; exported graphs do not use it.
PREFIX: Final = "conch.normalise."


def unfuse_normalisations(model: Any) -> bool:
    """Rewrite the SkipLayerNormalization nodes of an ``onnx.ModelProto`` in place; returns False if there are none.

    Their inputs must be ``[sequences, tokens, values]`` with the same number of tokens; the caller verifies the result.
    """
    from onnx import TensorProto, helper

    fused = [node for node in model.graph.node if node.op_type == "SkipLayerNormalization"]
    if not fused:
        return False
    # InstanceNormalization scales by channel; here channels are tokens, scaled by 1.  Their number is the first node's.
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
    """Return nodes equivalent to one SkipLayerNormalization."""
    from onnx import helper

    # Inputs: value, residual, gamma, beta, bias.  Outputs: normalized, two that inference omits, the sum.
    value, residual, gamma, beta, bias = (*node.input, "", "")[:5]
    target = node.output[0]
    total = node.output[3] if len(node.output) > 3 and node.output[3] else f"{PREFIX}{target}.sum"
    epsilon = next(attribute.f for attribute in node.attribute if attribute.name == "epsilon")
    nodes = []
    if bias:
        nodes.append(helper.make_node("Add", [value, bias], [f"{PREFIX}{target}.biased"]))
        value = f"{PREFIX}{target}.biased"
    nodes.append(helper.make_node("Add", [value, residual], [total]))
    normal, scaled = f"{PREFIX}{target}.normal", f"{PREFIX}{target}.scaled"
    nodes.append(helper.make_node("InstanceNormalization", [total, ones, zeros], [normal], epsilon=epsilon))
    nodes.append(helper.make_node("Mul", [normal, gamma], [scaled if beta else target]))
    if beta:
        nodes.append(helper.make_node("Add", [scaled, beta], [target]))
    return nodes


#: The optimizer's model type by ``model_type``; unknown types are tried as bert, and verified like all.
FAMILIES: Final[dict[str, str]] = {"bart": "bart", "clip": "clip"}


def optimise(plain: Path, network: ReferenceNetwork, target: Path) -> str:
    """Write ``target``, the fastest form of ``plain`` that agrees with the network.

    Returns an empty string, or why it is only a copy.
    """
    problem = ""
    for unfuse in (False,) if on_gpu() else (True, False):
        try:
            with silence_libraries():
                model = fused(plain, network)
                if unfuse and not unfuse_normalisations(model.model):
                    continue
                model.save_model_to_file(str(target), use_external_data_format=onnx_graph.is_large(plain))
                onnx_graph.verify(target, network)
            return ""
        except Exception as error:  # the optimizer matches patterns, and may fail in any way on new networks
            problem = describe_error(error)
    copy(plain, target)
    return problem


def on_gpu() -> bool:
    """Return whether this ONNX Runtime supports GPUs."""
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def fused(plain: Path, network: ReferenceNetwork) -> Any:
    """Return the optimizer's model (an ``OnnxModel``) for the CPU."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    family = FAMILIES.get(network.model_type, "bert")
    config = network.module.config
    return optimize_model(
        str(plain),
        model_type=family,
        num_heads=size_or_zero(getattr(config, "num_attention_heads", None)),
        hidden_size=size_or_zero(getattr(config, "hidden_size", None)),
        optimization_options=FusionOptions(family),
        opt_level=0,
    )


def size_or_zero(size: object) -> int:
    """Return a size of the network; 0, with which the optimizer inspects the graph, if it is unknown or varies."""
    return size if isinstance(size, int) else 0


def half(optimised: Path, target: Path) -> None:
    """Write ``target`` with fp16 weights and arithmetic and fp32 outputs, for a GPU."""
    import onnx
    from onnxruntime.transformers.onnx_model import OnnxModel

    if not on_gpu():
        raise unsupported("fp16 is for GPUs and this onnxruntime has none: pip install onnxruntime-gpu")
    with silence_libraries():
        model = OnnxModel(onnx.load(optimised))
        model.convert_float_to_float16(keep_io_types=True)
        model.save_model_to_file(str(target), use_external_data_format=onnx_graph.is_large(optimised))


def copy(source: Path, target: Path) -> None:
    """Copy a graph with its weights."""
    import onnx

    if onnx_graph.is_large(source):
        onnx_graph.write(onnx.load(source), target)
    else:
        shutil.copyfile(source, target)
