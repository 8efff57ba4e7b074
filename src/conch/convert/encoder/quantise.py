"""INT8 for ONNX Runtime: dynamic, where activations are scaled at run time, and static, by calibration."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from conch.backends.native.arrays import Array
from conch.convert.encoder import onnx_graph
from conch.convert.libraries import silence_libraries

#: The operators that gain by INT8: products.  Embeddings are looked up and not multiplied.
OPERATORS: Final = ("MatMul", "Gemm", "Attention")
#: Instructions that add four products of bytes without overflow.
DOT_PRODUCTS: Final = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"})


def dynamic(optimised: Path, target: Path, operators: Sequence[str] = OPERATORS) -> None:
    """Write ``target``: INT8 weights by channel for ``operators``, activations scaled for each run."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with silence_libraries():
        quantize_dynamic(
            optimised,
            target,
            op_types_to_quantize=list(operators),
            per_channel=True,
            reduce_range=saturates(),
            weight_type=QuantType.QInt8,
            use_external_data_format=onnx_graph.is_large(optimised),
            # Fused operators have no shape inference, and so no type of their own.
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
        onnx_graph.session(target)


def static(optimised: Path, samples: Sequence[Mapping[str, Array]], target: Path) -> None:
    """Write ``target``: INT8 weights by channel, activations scaled by their ranges over ``samples`` (of one row).

    Only what goes into products is INT8; what comes out stays FP32, which keeps the residuals exact.  Attention has
    no static form in ONNX Runtime that is faster, so it is scaled for each run.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    with silence_libraries(), tempfile.TemporaryDirectory(dir=target.parent, prefix="static-") as folder:
        large = onnx_graph.is_large(optimised)
        typed, without_attention = Path(folder) / "typed.onnx", Path(folder) / "without_attention.onnx"
        model = onnx.load(optimised)
        declare_types(model)
        onnx_graph.write(model, typed)
        quantize_static(
            typed,
            without_attention,
            _reader(samples, [tensor.name for tensor in model.graph.input]),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=saturates(),
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            # Cutting outliers (entropy, percentiles) costs encoders more than the finer steps give.
            calibrate_method=CalibrationMethod.MinMax,
            use_external_data_format=large,
            extra_options={
                "DefaultTensorType": onnx.TensorProto.FLOAT,
                "WeightSymmetric": True,
                "ActivationSymmetric": False,
                "MatMulConstBOnly": True,
                "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"],
            },
        )
        dynamic(without_attention, target, operators=["Attention"])


def declare_types(model: Any) -> None:
    """Say that the activations around products are FP32: inference cannot tell after fused operators, and calibration
    leaves out what has no type."""
    from onnx import TensorProto, helper

    graph = model.graph
    known = {tensor.name for tensor in (*graph.value_info, *graph.input, *graph.output, *graph.initializer)}
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm"):
            for name in (node.input[0], node.output[0]):
                if name not in known:
                    known.add(name)
                    graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))


def _reader(samples: Sequence[Mapping[str, Array]], names: Sequence[str]) -> Any:
    """The samples as ONNX Runtime's calibration reads them."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rest = iter(samples)

        def get_next(self) -> dict[str, Array] | None:
            sample = next(self.rest, None)
            return None if sample is None else {name: sample[name] for name in names}

    return Reader()


def saturates(flags: frozenset[str] | None = None) -> bool:
    """Whether products of INT8 overflow on this CPU, so that weights must keep to seven bits."""
    flags = cpu_flags() if flags is None else flags
    # AVX2 and AVX-512 without VNNI add pairs of products in 16 bits.
    return "avx2" in flags and not flags & DOT_PRODUCTS


def cpu_flags() -> frozenset[str]:
    """The instruction sets of this CPU by Linux's names; empty where they are not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(flags, "").split())
