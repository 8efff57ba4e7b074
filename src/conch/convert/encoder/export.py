"""Exports a network to ONNX in fp32 with dynamic batch and sequence length, and optimises the graph.

There are two exporters. torch's older exporter, which traces, gives graphs in which ONNX Runtime's optimizer
recognizes attention. The newer exporter (dynamo) supports networks that tracing gets wrong. The first file that
agrees with torch is used.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from conch.backends.base.arrays import Array
from conch.convert.encoder.network import ReferenceNetwork, compare, is_large, verify_graph, write_graph
from conch.convert.libraries import describe_error, silence_libraries
from conch.core.errors import internal, unsupported

#: The opset that the newer exporter writes without conversion, and that ONNX Runtime 1.14, OpenVINO 2023 and TensorRT
#: 8.6 read.
OPSET: Final = 18
#: Sequences and tokens of the trace: two sequences with padding, so that no operation is omitted.
TRACED: Final = (2, 7)


def export(network: ReferenceNetwork, path: Path) -> str:
    """Write ``path``; returns the name of the exporter. Raises INTERNAL with all reasons if every export differs."""
    reasons = []
    for exporter, write in (("torchscript", by_tracing), ("dynamo", by_dynamo)):
        try:
            with silence_libraries():
                _write(network, path, write)
                verify_graph(path, network)
            return exporter
        except Exception as error:  # any exception of an exporter; the next is tried
            reasons.append(f"{exporter}: {describe_error(error)}")
    raise internal(f"the export to ONNX failed ({'; '.join(reasons)})")


def _write(network: ReferenceNetwork, path: Path, write: Callable[[Any, ReferenceNetwork, Path], None]) -> None:
    """Export to a temporary folder, because the weights of large networks are written to many files."""
    import onnx

    with tempfile.TemporaryDirectory(dir=path.parent, prefix="export-") as folder:
        file = Path(folder) / "model.onnx"
        write(_positional(network), network, file)
        model = onnx.load(file)
        move_weights(model)
        write_graph(model, path)


def move_weights(model: Any) -> None:
    """Move matrices from Constant nodes of an ``onnx.ModelProto`` to its initializers.

    The exporter writes the weights of modules that are not parameters of the network as constants, which ONNX Runtime's
    quantization leaves in FP32.
    """
    kept = []
    for node in model.graph.node:
        values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
        if node.op_type == "Constant" and values and len(values[0].dims) > 1:
            model.graph.initializer.append(values[0])
            model.graph.initializer[-1].name = node.output[0]
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _positional(network: ReferenceNetwork) -> Any:
    """Return the network with positional inputs and a tuple of outputs."""
    import torch

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network.module

        def forward(self, *arrays: Any) -> tuple[Any, ...]:
            outputs = self.network(**dict(zip(network.inputs, arrays, strict=True)), return_dict=True)
            return tuple(outputs[name] for name in network.outputs)

    return Positional().eval()


def by_tracing(module: Any, network: ReferenceNetwork, file: Path) -> None:
    """Export with the older exporter, which records one run and the branches taken in it."""
    names = (*network.inputs, *network.outputs)
    _export(module, network, file, dynamo=False, dynamic_axes={name: _axes(network, name) for name in names})


def by_dynamo(module: Any, network: ReferenceNetwork, file: Path) -> None:
    """Export with the newer exporter, which captures the network's program with symbolic sizes."""
    import torch

    sizes = {size: torch.export.Dim(size) for size in ("sequences", "tokens")}
    shapes = tuple({axis: sizes[size] for axis, size in _axes(network, name).items()} for name in network.inputs)
    _export(module, network, file, dynamo=True, dynamic_shapes=(shapes,), verbose=False)


def _export(module: Any, network: ReferenceNetwork, file: Path, **settings: Any) -> None:
    import torch

    arrays = network.example(*TRACED)
    torch.onnx.export(
        module,
        tuple(torch.from_numpy(arrays[name]) for name in network.inputs),
        str(file),
        input_names=list(network.inputs),
        output_names=list(network.outputs),
        opset_version=OPSET,
        **settings,
    )


def _axes(network: ReferenceNetwork, name: str) -> dict[int, str]:
    """Return the dynamic axes of an input or output."""
    return {0: "sequences", 1: "tokens"} if network.has_tokens(name) else {0: "sequences"}


#: The share of the activations' range that SmoothQuant moves to the weights. For all-MiniLM-L6-v2 and sentences unlike
#: the calibration's, the library's 0.95 gives a cosine with fp32 of 0.990 (worst 0.938), this value 0.996 (0.985).
SMOOTHING: Final = 0.7


def convert_graph(exported: Path, network: ReferenceNetwork, target: Path, *, half: bool = False) -> None:
    """Write ``target`` (``.xml``, weights in ``.bin``); ``half`` stores the weights in fp16."""
    import openvino

    with silence_libraries():
        model = openvino.Core().read_model(exported)
        openvino.save_model(model, target, compress_to_fp16=half)
        if not half:
            verify_ir(target, network)


def quantise(exported: Path, network: ReferenceNetwork, samples: Sequence[Mapping[str, Array]], target: Path) -> None:
    """Write ``target`` with INT8 products; ranges come from ``samples`` of one sequence each."""
    with silence_libraries():
        import nncf
        import openvino
        from nncf.quantization.advanced_parameters import AdvancedSmoothQuantParameters

        model = openvino.Core().read_model(exported)
        data = nncf.Dataset([{name: sample[name] for name in network.inputs} for sample in samples])
        model = nncf.quantize(
            model,
            data,
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(samples),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=SMOOTHING)
            ),
        )
        openvino.save_model(model, target, compress_to_fp16=False)


def verify_ir(file: Path, network: ReferenceNetwork) -> None:
    """Compare the IR, computed in fp32, with the network at several sizes; raises INTERNAL if it disagrees."""
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for arrays, expected in network.tests():
        outputs = compiled({name: arrays[name] for name in network.inputs})
        compare({output: outputs[output] for output in network.outputs}, expected, arrays)


def computes_bf16() -> bool:
    """Return whether the CPU plugin supports bf16 on this machine."""
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


# The optimizer fuses operators that ONNX Runtime's start-up passes do not: attention blocks, and embeddings and
# residuals with their normalization. A fused graph is used only if it loads and agrees with the network.


# ONNX Runtime's CPU kernel of SkipLayerNormalization (normalized sum with the residual) adds one value at a time: 37 µs
# for 16 x 384 values on the development machine, more than the preceding INT8 product. The same arithmetic as a sum
# and an InstanceNormalization over each token's values is vectorized and takes less than half. GPUs are faster with
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
    # InstanceNormalization scales by channel; here channels are tokens, scaled by 1. Their number is the first node's.
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

    # Inputs: value, residual, gamma, beta, bias. Outputs: normalized, two that inference omits, the sum.
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
FAMILIES: Final[dict[str, str]] = {
    "bart": "bart", "clip_text_model": "clip", "clip_vision_model": "clip"
}  # fmt: skip


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
                model.save_model_to_file(str(target), use_external_data_format=is_large(plain))
                verify_graph(target, network)
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
        raise unsupported("fp16 requires a GPU, which this onnxruntime does not support: pip install onnxruntime-gpu")
    with silence_libraries():
        model = OnnxModel(onnx.load(optimised))
        model.convert_float_to_float16(keep_io_types=True)
        model.save_model_to_file(str(target), use_external_data_format=is_large(optimised))


def copy(source: Path, target: Path) -> None:
    """Copy a graph with its weights."""
    import onnx

    if is_large(source):
        write_graph(onnx.load(source), target)
    else:
        shutil.copyfile(source, target)
