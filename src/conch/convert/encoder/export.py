"""Exports a network to ONNX in fp32 with dynamic batch and sequence length, and verifies it against torch.

There are two exporters.  torch's older exporter, which traces, gives graphs in which ONNX Runtime's optimizer
recognizes attention.  The newer exporter (dynamo) supports networks that tracing gets wrong.  The first file that
agrees with torch is used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from conch.backends.base.arrays import Array
from conch.convert.encoder import onnx_graph
from conch.convert.encoder.network import ReferenceNetwork
from conch.convert.libraries import describe_error, silence_libraries
from conch.core.errors import internal

#: The opset that the newer exporter writes without conversion, and that ONNX Runtime 1.14, OpenVINO 2023 and TensorRT
#: 8.6 read.
OPSET: Final = 18
#: Sequences and tokens of the trace: two sequences with padding, so that no operation is omitted.
TRACED: Final = (2, 7)


def export(network: ReferenceNetwork, path: Path) -> str:
    """Write ``path``; returns the name of the exporter.  Raises INTERNAL with all reasons if no export agrees."""
    reasons = []
    for exporter, write in (("torchscript", by_tracing), ("dynamo", by_dynamo)):
        try:
            with silence_libraries():
                _write(network, path, write)
                onnx_graph.verify(path, network)
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
        onnx_graph.write(onnx.load(file), path)


def _positional(network: ReferenceNetwork) -> Any:
    """Return the network with positional inputs and a tuple of outputs."""
    import torch

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network.module

        def forward(self, *arrays: Any) -> tuple[Any, ...]:
            answer = self.network(**dict(zip(network.inputs, arrays, strict=True)), return_dict=True)
            return tuple(answer[name] for name in network.outputs)

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
    if name in network.outputs and not network.outputs_have_tokens:
        return {0: "sequences"}
    return {0: "sequences", 1: "tokens"}


#: The share of the activations' range that SmoothQuant moves to the weights.  For all-MiniLM-L6-v2 and sentences unlike
#: the calibration's, the library's 0.95 gives a cosine with fp32 of 0.990 (worst 0.938), this value 0.996 (0.985).
SMOOTHING: Final = 0.7


def convert_graph(exported: Path, network: ReferenceNetwork, target: Path, *, half: bool = False) -> None:
    """Write ``target`` (``.xml``, weights in ``.bin``); ``half`` stores the weights in fp16."""
    import openvino

    with silence_libraries():
        model = openvino.Core().read_model(exported)
        openvino.save_model(model, target, compress_to_fp16=half)
        if not half:
            verify(target, network)


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


def verify(file: Path, network: ReferenceNetwork) -> None:
    """Compare the IR, computed in fp32, with the network at several sizes; raises INTERNAL if it disagrees."""
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for arrays, expected in network.tests():
        answer = compiled({name: arrays[name] for name in network.inputs})
        onnx_graph.compare({output: answer[output] for output in network.outputs}, expected, arrays)


def computes_bf16() -> bool:
    """Return whether the CPU plugin supports bf16 on this machine."""
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
