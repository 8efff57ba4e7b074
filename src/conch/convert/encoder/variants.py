"""Builds the variants of a checkpoint: for each backend its fp32 form and the precisions that are asked for.

Called by ``conch convert``.  A variant that cannot be built is a ``Failure`` with one sentence; the others go on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conch.backends.native.arrays import Array
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.convert.encoder import export, network, onnx_graph, openvino, optimise, quantise
from conch.convert.encoder.samples import samples
from conch.convert.libraries import reason
from conch.errors import invalid, unsupported

#: The engine's name by the backend's name on the command line.
ENGINES: Final[dict[str, str]] = {
    "torch": "torch",
    "onnx": "onnxruntime",
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "tensorrt": "tensorrt",
}
#: What each engine can be asked for besides fp32, which is always built.
PRECISIONS: Final[dict[str, tuple[str, ...]]] = {
    "torch": ("bf16", "fp16"),
    "onnxruntime": ("int8", "int8-static", "fp16"),
    "openvino": ("bf16", "int8", "fp16"),
    "tensorrt": ("fp16",),
}

Calibration = Callable[[], Sequence[Mapping[str, Array]]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant that was built: ``path`` is its graph, None for torch, which reads the checkpoint itself.

    Two candidates may share a file (OpenVINO computes one IR in fp32 or bf16).  ``more`` are files that belong to it
    besides the graph and its weights.
    """

    name: str
    engine: str
    precision: str
    path: Path | None
    more: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything that belongs to the variant: the graph, weights beside it, and what there is more."""
        if self.path is None:
            return self.more
        beside = (self.path.with_suffix(".bin"), self.path.with_name(self.path.name + ".data"))
        return (self.path, *(file for file in beside if file.exists()), *self.more)


@dataclass(frozen=True, slots=True)
class Failure:
    """A variant that could not be built, and why, in one sentence."""

    name: str
    reason: str


def build(
    checkpoint: Checkpoint,
    options: Options,
    backends: Sequence[str],
    quantize: Sequence[str],
    calibration: Calibration,
    workdir: Path,
    progress: Callable[[str], None],
) -> list[Candidate | Failure]:
    """The variants for ``backends`` (torch, onnx, openvino, tensorrt) in fp32 and the precisions of ``quantize``
    (int8, int8-static, fp16, bf16), in that order, with their files in ``workdir``.

    ``calibration`` gives encoded batches (INT64 ``[rows, tokens]`` by input name) and is called only for ranges of
    activations.  UNSUPPORTED for a task that one pass of an encoder does not answer, INVALID_ARG for an unknown
    backend or precision or a checkpoint that does not load.
    """
    wanted = plan(backends, quantize)
    network.head_of(checkpoint.task)
    return Builder(checkpoint, options, calibration, workdir, progress).build(wanted)


def plan(backends: Sequence[str], quantize: Sequence[str]) -> list[tuple[str, str]]:
    """Engine and precision of every variant, in order; INVALID_ARG for a name that nothing knows."""
    known = {precision for each in PRECISIONS.values() for precision in each}
    for backend in backends:
        if backend not in ENGINES:
            raise invalid(f"backend '{backend}' is unknown: choose from {', '.join(ENGINES)}")
    engines = list(dict.fromkeys(ENGINES[backend] for backend in backends))
    for precision in quantize:
        if precision not in known:
            raise invalid(f"precision '{precision}' is unknown: choose from {', '.join(sorted(known))}")
        if not any(precision in PRECISIONS[engine] for engine in engines):
            makers = [engine for engine in PRECISIONS if precision in PRECISIONS[engine]]
            raise invalid(f"no chosen backend makes {precision}: add one of {', '.join(makers)}")
    wanted = []
    for engine in engines:
        wanted.append((engine, "fp32"))
        wanted += [(engine, precision) for precision in dict.fromkeys(quantize) if precision in PRECISIONS[engine]]
    return wanted


class Builder:
    """One conversion: the network is loaded once, and exported and optimised once, for the first variant that
    needs it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: Options,
        calibration: Calibration,
        workdir: Path,
        progress: Callable[[str], None],
    ) -> None:
        self.calibration = calibration
        self.workdir = workdir
        self.progress = progress
        #: Files that others are made from.
        self.parts = workdir / "parts"
        progress("loading the checkpoint")
        self.network = network.load(checkpoint, options)
        #: Shared steps: what they gave, or what they raised, which the next variant meets again.
        self.steps: dict[str, Path | Exception] = {}

    def build(self, wanted: Sequence[tuple[str, str]]) -> list[Candidate | Failure]:
        """The variants in order."""
        makers = {
            "torch": self.torch,
            "onnxruntime": self.onnxruntime,
            "openvino": self.openvino,
            "tensorrt": self.tensorrt,
        }
        self.parts.mkdir(parents=True, exist_ok=True)
        built: list[Candidate | Failure] = []
        try:
            for engine, precision in wanted:
                name = f"{engine}-{precision}"
                try:
                    path = makers[engine](precision)
                    built.append(Candidate(name, engine, precision.removesuffix("-static"), path))
                except Exception as error:  # whatever a library raises ends one variant and not the conversion
                    built.append(Failure(name, reason(error)))
        finally:
            shutil.rmtree(self.parts, ignore_errors=True)
        return built

    def torch(self, precision: str) -> None:
        """Nothing to write: torch reads the checkpoint and converts as it loads."""
        if precision == "fp16":
            import torch

            if not torch.cuda.is_available():
                raise unsupported("fp16 with torch is for GPUs and there is none: use bf16 on a CPU")

    def onnxruntime(self, precision: str) -> Path:
        """A graph for ONNX Runtime."""
        target = self.workdir / f"onnxruntime-{precision}.onnx"
        if precision == "fp32":
            return self.optimised()
        if precision == "fp16":
            optimise.half(self.optimised(), self.network, target)
        elif precision == "int8":
            self.progress("quantising for ONNX Runtime, activations at run time")
            quantise.dynamic(self.optimised(), target)
        else:
            self.progress("quantising for ONNX Runtime by calibration")
            quantise.static(self.optimised(), samples(self.calibration()), target)
        return target

    def openvino(self, precision: str) -> Path:
        """An IR for OpenVINO; bf16 is a way of computing the fp32 one."""
        if precision in ("fp32", "bf16"):
            if precision == "bf16" and not openvino.computes_bf16():
                raise unsupported("this CPU has no bf16 arithmetic")
            return self.once("openvino", self.intermediate)
        target = self.workdir / f"openvino-{precision}.xml"
        if precision == "fp16":
            openvino.plain(self.exported(), self.network, target, half=True)
        else:
            self.progress("quantising for OpenVINO by calibration")
            openvino.quantised(self.exported(), self.network, samples(self.calibration()), target)
        return target

    def tensorrt(self, precision: str) -> Path:
        """The plain graph, for which ONNX Runtime's TensorRT provider builds an engine on the GPU that it serves on.

        No machine that this was tried on had one.
        """
        import onnxruntime

        if "TensorrtExecutionProvider" not in onnxruntime.get_available_providers():
            raise unsupported("this ONNX Runtime has no TensorRT: pip install onnxruntime-gpu tensorrt")
        return self.once("tensorrt", self.unfused)

    def exported(self) -> Path:
        """The plain fp32 graph."""
        return self.once("exported", self.export)

    def optimised(self) -> Path:
        """The fused fp32 graph, or the plain one where fusing fails."""
        return self.once("optimised", self.optimise)

    def once(self, name: str, step: Callable[[], Path]) -> Path:
        """What ``step`` gave when it was first taken."""
        if name not in self.steps:
            try:
                self.steps[name] = step()
            except Exception as error:
                self.steps[name] = error
        made = self.steps[name]
        if isinstance(made, Exception):
            raise made
        return made

    def export(self) -> Path:
        target = self.parts / "plain.onnx"
        self.progress("exporting to ONNX")
        exporter = export.export(self.network, target)
        if exporter != "torchscript":
            self.progress(f"exported with {exporter}: fewer operators can be fused")
        return target

    def unfused(self) -> Path:
        import onnx

        target = self.workdir / "tensorrt.onnx"
        onnx_graph.write(onnx.load(self.exported()), target)
        return target

    def optimise(self) -> Path:
        plain = self.exported()
        target = self.workdir / "onnxruntime-fp32.onnx"
        self.progress("fusing operators for ONNX Runtime")
        problem = optimise.optimise(plain, self.network, target)
        if problem:
            self.progress(f"the plain graph is kept, fusing failed: {problem}")
        return target

    def intermediate(self) -> Path:
        target = self.workdir / "openvino-fp32.xml"
        self.progress("converting to OpenVINO's IR")
        openvino.plain(self.exported(), self.network, target)
        return target
