"""Builds the variants of an encoder: for each backend, fp32 and the requested precisions.

A variant that cannot be built becomes a ``FailedVariant`` with one sentence; the others continue.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.convert.encoder import export
from conch.convert.encoder.export import computes_bf16, convert_graph, half, optimise, quantise
from conch.convert.encoder.network import ReferenceNetwork, is_large, open_session, write_graph
from conch.convert.libraries import describe_error, silence_libraries
from conch.convert.verdict import BuiltVariant, FailedVariant
from conch.core.errors import invalid, unsupported
from conch.machine.facts import cpu_flags

#: Operators that benefit from INT8: products. Embeddings are looked up, not multiplied.
OPERATORS: Final = ("MatMul", "Gemm", "Attention")
#: CPU instructions that add four products of bytes without overflow.
DOT_PRODUCTS: Final = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"})


def dynamic(optimised: Path, target: Path, operators: Sequence[str] = OPERATORS) -> None:
    """Write ``target``: INT8 weights per channel for ``operators``, activations scaled at each run."""
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
            use_external_data_format=is_large(optimised),
            # Fused operators have no shape inference, and so no inferred type.
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
        open_session(target)


def static(optimised: Path, samples: Sequence[Mapping[str, Array]], target: Path) -> None:
    """Write ``target``: INT8 weights per channel, activations scaled by their ranges over ``samples`` (of one row).

    Only inputs of products are INT8; outputs stay FP32, which keeps the residuals exact. ONNX Runtime has no faster
    static form of attention, so it is scaled at each run.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    with silence_libraries(), tempfile.TemporaryDirectory(dir=target.parent, prefix="static-") as folder:
        large = is_large(optimised)
        typed, without_attention = Path(folder) / "typed.onnx", Path(folder) / "without_attention.onnx"
        model = onnx.load(optimised)
        declare_types(model)
        write_graph(model, typed)
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
            # For encoders, clipping outliers (entropy, percentiles) loses more than the finer steps gain.
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
    """Declare the activations around products as FP32.

    Shape inference cannot infer types after fused operators, and calibration ignores values without a type.
    """
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
    """Return a reader of the samples for ONNX Runtime's calibration."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rest = iter(samples)

        def get_next(self) -> dict[str, Array] | None:
            sample = next(self.rest, None)
            return None if sample is None else {name: sample[name] for name in names}

    return Reader()


def saturates(flags: frozenset[str] | None = None) -> bool:
    """Return whether INT8 products overflow on this CPU, so that weights are limited to seven bits."""
    flags = cpu_flags() if flags is None else flags
    # AVX2 and AVX-512 without VNNI add pairs of products in 16 bits.
    return "avx2" in flags and not flags & DOT_PRODUCTS


#: Precisions of each engine in addition to fp32, which is always built.
PRECISIONS: Final[dict[str, tuple[str, ...]]] = {
    "torch": ("bf16", "fp16"),
    "onnxruntime": ("int8", "int8-static", "fp16"),
    "openvino": ("bf16", "int8", "fp16"),
    "tensorrt": ("fp16",),
}
#: The number of sequences for calibrating the ranges of activations, and their length (tokens); more change little and
#: cost time, and memory that grows with the square of the length.
MAX_CALIBRATION_SAMPLES: Final = 96
MAX_CALIBRATION_TOKENS: Final = 512


def planned(backends: Sequence[str], precisions: Sequence[str]) -> list[tuple[str, str]]:
    """Return engine and precision of every variant, in order; raises INVALID_ARG for an unsupported precision."""
    engines = ["onnxruntime" if backend == "onnx" else backend for backend in backends]
    for precision in precisions:
        makers = [engine for engine in PRECISIONS if precision in PRECISIONS[engine]]
        if not makers:
            known = sorted({supported for names in PRECISIONS.values() for supported in names})
            raise invalid(
                f"--quantize {precision} is not supported for this model: choose from {', '.join(known)}, none"
            )
        if not set(makers) & set(engines):
            raise invalid(f"no chosen backend supports {precision}: add one of {', '.join(makers)}")
    variants = []
    for engine in engines:
        variants.append((engine, "fp32"))
        variants += [(engine, precision) for precision in dict.fromkeys(precisions) if precision in PRECISIONS[engine]]
    return variants


class VariantBuilder:
    """Builds the variants of one network in ``folder``, to which only their files are added at the end.

    ``load`` is called once; the network is exported and optimized once, for the first variant that needs it.
    ``calibration`` are sequences for calibrating the ranges of activations, INT64 ``[1, tokens]`` by input name. Raises
    the errors of ``load``.
    """

    def __init__(
        self,
        load: Callable[[], ReferenceNetwork],
        calibration: Sequence[Mapping[str, Array]],
        folder: Path,
        progress: Callable[[str], None],
    ) -> None:
        self.calibration = spread(calibration)
        self.folder = folder
        self.progress = progress
        #: Intermediate files from which others are made.
        self.parts = folder / "parts"
        progress("loading the checkpoint")
        self.network = load()
        #: The file of each shared step, or its exception, which fails every variant that needs it.
        self.shared: dict[Callable[[], Path], Path | Exception] = {}

    def build(self, variants: Sequence[tuple[str, str]]) -> list[BuiltVariant | FailedVariant]:
        """Build every engine and precision, in order."""
        builders = {
            "torch": self._torch,
            "onnxruntime": self._onnxruntime,
            "openvino": self._openvino,
            "tensorrt": self._tensorrt,
        }
        self.parts.mkdir(parents=True, exist_ok=True)
        built: list[BuiltVariant | FailedVariant] = []
        try:
            for engine, precision in variants:
                name = f"{engine}-{precision}"
                try:
                    path = builders[engine](precision)
                    built.append(BuiltVariant(name, engine, precision.removesuffix("-static"), path))
                except Exception as error:  # an exception of a library ends only one variant
                    built.append(FailedVariant(name, describe_error(error)))
        finally:
            shutil.rmtree(self.parts, ignore_errors=True)
        return built

    def _torch(self, precision: str) -> None:
        """Write nothing: torch reads the checkpoint and converts it at load."""
        if precision == "fp16":
            import torch

            if not torch.cuda.is_available():
                raise unsupported("fp16 with torch requires a GPU, and there is none: use bf16 on a CPU")

    def _onnxruntime(self, precision: str) -> Path:
        """Write a graph for ONNX Runtime."""
        optimised = self._once(self._optimised)
        if precision == "fp32":
            return optimised
        target = self.folder / f"onnxruntime-{precision}.onnx"
        if precision == "fp16":
            half(optimised, target)
        elif precision == "int8":
            self.progress("quantising for ONNX Runtime, activations at run time")
            dynamic(optimised, target)
        else:
            self.progress("quantising for ONNX Runtime by calibration")
            static(optimised, self.calibration, target)
        return target

    def _openvino(self, precision: str) -> Path:
        """Write an IR for OpenVINO; bf16 computes with the fp32 IR."""
        if precision == "bf16" and not computes_bf16():
            raise unsupported("this CPU has no bf16 arithmetic")
        if precision in ("fp32", "bf16"):
            return self._once(self._intermediate)
        exported, target = self._once(self._exported), self.folder / f"openvino-{precision}.xml"
        if precision == "fp16":
            convert_graph(exported, self.network, target, half=True)
        else:
            self.progress("quantising for OpenVINO by calibration")
            quantise(exported, self.network, self.calibration, target)
        return target

    def _tensorrt(self, precision: str) -> Path:
        """Write the plain graph, from which ONNX Runtime's TensorRT provider builds an engine on the serving GPU.

        Not tested on a machine with TensorRT.
        """
        import onnxruntime

        if "TensorrtExecutionProvider" not in onnxruntime.get_available_providers():
            raise unsupported("this ONNX Runtime does not include TensorRT: pip install onnxruntime-gpu tensorrt")
        return self._once(self._unfused)

    def _once(self, step: Callable[[], Path]) -> Path:
        """Return the file of ``step``, which runs once; raises its exception again on later calls."""
        if step not in self.shared:
            try:
                self.shared[step] = step()
            except Exception as error:
                self.shared[step] = error
        outcome = self.shared[step]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _exported(self) -> Path:
        """Write the plain fp32 graph."""
        target = self.parts / "plain.onnx"
        self.progress("exporting to ONNX")
        exporter = export.export(self.network, target)
        if exporter != "torchscript":
            self.progress(f"exported with {exporter}: fewer operators can be fused")
        return target

    def _unfused(self) -> Path:
        """Write the plain graph as the variant for TensorRT, which fuses operators itself."""
        import onnx

        target = self.folder / "tensorrt.onnx"
        write_graph(onnx.load(self._once(self._exported)), target)
        return target

    def _optimised(self) -> Path:
        """Write the fused fp32 graph, or the plain one if fusing fails."""
        exported, target = self._once(self._exported), self.folder / "onnxruntime-fp32.onnx"
        self.progress("fusing operators for ONNX Runtime")
        problem = optimise(exported, self.network, target)
        if problem:
            self.progress(f"the graph is not fused: {problem}")
        return target

    def _intermediate(self) -> Path:
        """Write OpenVINO's fp32 IR."""
        exported, target = self._once(self._exported), self.folder / "openvino-fp32.xml"
        self.progress("converting to OpenVINO's IR")
        convert_graph(exported, self.network, target)
        return target


def spread(
    calibration: Sequence[Mapping[str, Array]], count: int = MAX_CALIBRATION_SAMPLES
) -> list[Mapping[str, Array]]:
    """Return the beginnings of at most ``count`` sequences, evenly spaced; raises INVALID_ARG if there are none."""
    if not calibration:
        raise invalid("no calibration texts")
    positions = np.linspace(0, len(calibration) - 1, count) if len(calibration) > count else range(len(calibration))
    chosen = [calibration[round(position)] for position in positions]
    return [{name: array[:, :MAX_CALIBRATION_TOKENS] for name, array in arrays.items()} for arrays in chosen]
