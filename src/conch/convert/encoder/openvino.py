"""An exported graph to OpenVINO's IR: fp32, fp16 weights, and INT8 by calibration (NNCF)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from conch.backends.native.arrays import Array
from conch.convert.encoder import onnx_graph
from conch.convert.encoder.network import ReferenceNetwork
from conch.convert.libraries import silence_libraries

#: How much of the activations' range SmoothQuant moves into the weights.  For all-MiniLM-L6-v2 the library's 0.95 gives
#: sentences unlike the calibrating ones a cosine of 0.990 with fp32 (at worst 0.938), and this 0.996 (0.985).
SMOOTHING: Final = 0.7


def convert_graph(exported: Path, network: ReferenceNetwork, target: Path, *, half: bool = False) -> None:
    """Write ``target`` (``.xml``, weights in ``.bin``); ``half`` stores the weights in fp16 and computes as before."""
    import openvino

    with silence_libraries():
        model = openvino.Core().read_model(exported)
        openvino.save_model(model, target, compress_to_fp16=half)
        if not half:
            verify(target, network)


def quantise(exported: Path, network: ReferenceNetwork, samples: Sequence[Mapping[str, Array]], target: Path) -> None:
    """Write ``target`` with INT8 products, ranges taken from ``samples``, each one sequence."""
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
    """Compare the IR, computed in fp32, with the network at several sizes; INTERNAL where it disagrees."""
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for arrays, expected in network.tests():
        answer = compiled({name: arrays[name] for name in network.inputs})
        onnx_graph.compare({output: answer[output] for output in network.outputs}, expected, arrays)


def computes_bf16() -> bool:
    """Whether the CPU plugin has bf16 arithmetic here."""
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
