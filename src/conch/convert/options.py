"""The options of ``conch convert``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from conch.options.declaration import Directory, ExistingDirectory, File, Range, Values, option

_MODEL: Final = "Model"
_VARIANTS: Final = "Variants"
_MEASURING: Final = "Measuring"
_REPORT: Final = "Report"

BACKENDS: Final = ("torch", "onnx", "openvino", "tensorrt")
PRECISIONS: Final = ("int8", "int8-static", "int4", "int4-awq", "bf16", "fp16", "none")
_Backend = Annotated[str, Values(known=BACKENDS)]
_Precision = Annotated[str, Values(known=PRECISIONS)]


@dataclass(frozen=True)
class ConversionOptions:
    """The options of a conversion. Empty tuples mean the defaults for the kind of model."""

    # fmt: off
    model: Annotated[str, Values("checkpoints")] = option(
        "", _MODEL, "A Hub id, or a folder with a checkpoint.", flags=("-m",), metavar="MODEL"
    )
    repository: Directory = option(Path("models"), _MODEL, "Model repository.", flags=("-o", "--output"))
    name: str = option("", _MODEL, "The model's name there (default: the checkpoint's).", metavar="NAME")
    task: Annotated[str, Values("tasks")] = option(
        "", _MODEL, "A task of transformers.pipeline (default: detected from the files).", metavar="TASK"
    )
    revision: str = option("", _MODEL, "Branch, tag or commit on the Hub.", metavar="NAME")
    trust_remote_code: bool = option(False, _MODEL, "Run Python code from the checkpoint.")
    layout: Literal["huggingface", "triton"] = option(
        "huggingface", _MODEL, "huggingface (default), or triton: three models; not for language models."
    )
    overwrite: bool = option(False, _MODEL, "Replace a model of that name.")
    backends: tuple[_Backend, ...] = option(
        (), _VARIANTS, "torch onnx openvino tensorrt (default: all but the last); for language models openvino, with or"
        " without torch (default: openvino).", flags=("--backend",), metavar="NAME…",
    )
    quantize: tuple[_Precision, ...] = option(
        (), _VARIANTS, "int8 int8-static bf16 fp16 none (default: int8); for language models int8 int4 int4-awq fp16"
        " none (default: int8 int4).", metavar="NAME…",
    )
    force: bool = option(False, _VARIANTS, "Accept refused variants too; the report shows which.")
    keep: Literal["auto", "all"] = option(
        "all", _VARIANTS, "Write all accepted variants (default), or only those that serve."
    )
    batch_sizes: tuple[int, ...] = option(
        (), _MEASURING, "Batch sizes to measure (default: 1 8 32; for language models 1 8).",
        flags=("--batch-size",), metavar="N…",
    )
    sequence_lengths: tuple[int, ...] = option(
        (), _MEASURING, "Lengths to measure, in tokens (default: 16 128 384; for language models 128 512).",
        flags=("--seq-len",), metavar="N…",
    )
    data: File | None = option(
        None, _MEASURING, "Texts, recordings or images to compare on: .txt .jsonl .csv (default: built in)."
    )
    threads: Annotated[int, Range(0)] = option(0, _MEASURING, "Cores to use (default: all).")
    seconds: Annotated[float, Range(0)] = option(40.0, _MEASURING, "Time for all measurements, in seconds.")
    expect: str = option(
        "", _MEASURING, "Workload to optimise for: batch x tokens, with weights (default: all measured shapes,"
        " equally).", metavar="BxN:W,…",
    )
    # fmt: on


@dataclass(frozen=True)
class ConvertOptions(ConversionOptions):
    """The options of the command: those of a conversion, and of its report."""

    # fmt: off
    markdown: File | None = option(None, _REPORT, "Also write the report to this file.")
    html: File | None = option(None, _REPORT, "Also write the page with charts to this file.")
    report: ExistingDirectory | None = option(
        None, _REPORT, "Show the report of a converted model again, and write it to --html and --markdown; converts"
        " nothing.",
    )
    verbose: bool = option(False, _REPORT, "Print all figures of each shape.")
    # fmt: on
