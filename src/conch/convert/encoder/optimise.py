"""ONNX Runtime's transformer optimiser on an exported graph, and the fp16 conversion.

It fuses what ONNX Runtime's own start-up passes do not: whole attention blocks, embeddings with their
normalisation, residuals with theirs.  A fused graph that does not load or does not agree is not used.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

from conch.convert.encoder import onnx_graph
from conch.convert.encoder.network import ReferenceNetwork
from conch.convert.libraries import describe_error, silence_libraries
from conch.errors import unsupported

# Its kernel for SkipLayerNormalization (the residual's sum, normalised) adds up one value at a time: 37 us for 16 x
# 384 values on the machine this was written on, more than the product before it in INT8. The same arithmetic as a sum
# and an InstanceNormalization over each token's values is vectorised, and takes less than half. GPUs fuse it better.


#: Names of the values that are added to the graph; they occur in no exported one.
PREFIX: Final = "conch.normalise."


def unfuse_normalisations(model: Any) -> bool:
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


#: The optimiser's family by ``model_type``; what it does not know is tried as bert, and verified like all.
FAMILIES: Final[dict[str, str]] = {"bart": "bart", "clip": "clip"}


def optimise(plain: Path, network: ReferenceNetwork, target: Path) -> str:
    """Write ``target``, the fastest form of ``plain`` that agrees with the network; returns "" or why it is a copy."""
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
        except Exception as error:  # the optimiser matches patterns, and new networks surprise it in any way
            problem = describe_error(error)
    copy(plain, target)
    return problem


def on_gpu() -> bool:
    """Whether this ONNX Runtime computes on a GPU."""
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def fused(plain: Path, network: ReferenceNetwork) -> Any:
    """The optimiser's model (an ``OnnxModel``) for the CPU."""
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
    """A size of the network; 0, with which the optimiser looks at the graph, where stages differ or none is known."""
    return size if isinstance(size, int) else 0


def half(optimised: Path, target: Path) -> None:
    """Write ``target``: fp16 weights and arithmetic with fp32 outputs, for a GPU."""
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
