"""The table of a conversion: its columns, and how figures of both kinds of models are written in them.

Pure; everything is taken from the manifest, so that it can be shown again.  All writers of reports get their rows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from conch.checkpoints.manifest import Latency, Manifest, Variant
from conch.convert.measure import Shape, speed_up
from conch.convert.variant import REFERENCE
from conch.convert.verdict import NOT_ASKED_FOR

_ENGINES: Final = {
    "torch": "PyTorch",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "tensorrt": "TensorRT",
}
#: Stands where there is no figure.
_NONE: Final = "–"


@dataclass(frozen=True, slots=True)
class Notation:
    """How figures of one kind of model are written.

    ``unit`` is that of the speeds; ``speeds_heading`` is above a cell with all of a variant's speeds, which ``speeds``
    writes in several lines, and ``heading`` above those of one shape, which ``speed`` writes.  ``agreement`` takes the
    manifest's figures of a variant, and its size in MB if that is known.
    """

    unit: str
    speeds_heading: str
    legend: str
    heading: Callable[[Shape], str]
    speed: Callable[[Latency], str]
    speeds: Callable[[Variant], str]
    agreement: Callable[[Mapping[str, Mapping[str, Any]], float | None], str]


def notation_of(manifest: Manifest) -> Notation:
    """The notation of language models, or that of all other models."""
    return _LANGUAGE_MODELS if manifest.task == "text-generation" else _ENCODERS


def headings(manifest: Manifest) -> list[str]:
    """The columns: title, a speed for each shape, speed-up, agreement, verdict."""
    heading = notation_of(manifest).heading
    return ["engine (precision)", *map(heading, shapes(manifest)), "speed-up", "agreement", "verdict"]


def rows(manifest: Manifest) -> Iterator[tuple[Variant, list[str]]]:
    """Each variant, measured or not, with its cells below the headings, in the manifest's order."""
    notation = notation_of(manifest)
    reference = next((variant for variant in manifest.variants if variant.name == REFERENCE), None)
    megabytes = manifest.settings.get("megabytes", {})
    for variant in manifest.variants:
        latencies = [latency_at(variant, shape) for shape in shapes(manifest)]
        factor = speed_up(variant.latency, reference.latency) if reference and variant.latency else None
        yield (
            variant,
            [
                title(variant),
                *(_NONE if latency is None else notation.speed(latency) for latency in latencies),
                _NONE if factor is None else f"{factor:.2f}x",
                notation.agreement(variant.agreement, megabytes.get(variant.name)) or _NONE,
                verdict(variant, manifest.auto),
            ],
        )


def shapes(manifest: Manifest) -> list[Shape]:
    """Every shape that was measured, in order."""
    return sorted({Shape(one.batch, one.tokens) for variant in manifest.variants for one in variant.latency})


def latency_at(variant: Variant, shape: Shape) -> Latency | None:
    """The variant's latency at ``shape``; None where it was not measured."""
    return next((one for one in variant.latency if (one.batch, one.tokens) == (shape.batch, shape.tokens)), None)


def title(variant: Variant) -> str:
    """``ONNX Runtime (int8)``; whatever else the name says follows the precision."""
    rest = [part for part in variant.name.split("-")[1:] if part != variant.precision]
    return f"{_ENGINES.get(variant.engine, variant.engine)} ({', '.join([variant.precision, *rest])})"


def verdict(variant: Variant, auto: str) -> str:
    """Whether the variant serves or may serve; if not, the first reason."""
    if variant.name == auto:
        return "auto (forced)" if variant.forced else "auto"
    if variant.passed:
        return "passes"
    if variant.reasons == (NOT_ASKED_FOR,):
        return "reference"
    reason = variant.reasons[0] if variant.reasons else ""
    return f"forced: {reason}" if variant.forced else f"refused: {reason}" if variant.agreement else reason


def _grid(variant: Variant) -> str:
    """Medians with a line for each batch size and a column for each length."""
    batches = sorted({one.batch for one in variant.latency})
    lengths = sorted({one.tokens for one in variant.latency})
    lines = ["  x" + "".join(f"{length:>8}" for length in lengths)] if batches else []
    for batch in batches:
        cells = (latency_at(variant, Shape(batch, length)) for length in lengths)
        lines.append(f"{batch:>3}" + "".join(f"{_NONE if one is None else _milliseconds(one):>8}" for one in cells))
    return "\n".join(lines)


def _milliseconds(latency: Latency) -> str:
    return f"{latency.median_ms:.2f}"


def _outputs(figures: Mapping[str, Mapping[str, Any]], megabytes: float | None) -> str:
    """The smallest cosine of each output, and the task's metric: ``logits ≥ 0.9912; same label 0.993 (0.96 … 1)``."""
    parts = []
    for name, one in figures.items():
        if name == "task":
            low, high = (one["value"] - one["delta"] + one[bound] for bound in ("low", "high"))
            parts.append(f"{one['name']} {one['value']:.4f} ({low:.4f} … {high:.4f})")
        elif one.get("cosine_min") is not None:
            parts.append(f"{name} ≥ {one['cosine_min']:.4f}")
    return "; ".join(parts)


_ENCODERS: Final = Notation(
    unit="median ms by batch x tokens",
    speeds_heading="batch x tokens",
    legend="Latency is the median of one run at batch x tokens. Speed-up is the geometric mean over the shapes, "
    "against PyTorch in fp32. Agreement is the smallest cosine of each output with PyTorch's, and the task's metric "
    "with its 95 % interval.",
    heading=lambda shape: f"{shape} ms",
    speed=_milliseconds,
    speeds=_grid,
    agreement=_outputs,
)


def _step(shape: Shape | Latency) -> str:
    return f"write x{shape.batch}" if shape.tokens == 1 else f"read {shape.tokens}"


def _tokens_a_second(latency: Latency) -> str:
    value = latency.batch * latency.tokens / latency.median_ms * 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _lines(variant: Variant) -> str:
    """Tokens a second, a line for each measurement."""
    order = sorted(variant.latency, key=lambda one: (one.tokens, one.batch))
    return "\n".join(f"  {_step(one):<10}{_tokens_a_second(one):>8}" for one in order)


def _predictions(figures: Mapping[str, Mapping[str, Any]], megabytes: float | None) -> str:
    """``perplexity 30.51 (+0.87 %: +0.39 … +1.35); next token 0.9461; greedy 0.45; 135 MB``."""
    parts = []
    if (one := figures.get("perplexity")) is not None:
        delta, low, high = (100 * one[name] for name in ("delta", "low", "high"))
        interval = f" ({delta:+.2f} %: {low:+.2f} … {high:+.2f})" if delta or low or high else ""
        parts.append(f"perplexity {one['value']:.2f}{interval}")
    if (one := figures.get("top_1")) is not None:
        parts.append(f"next token {one['value']:.4f}")
    if (one := figures.get("greedy")) is not None:
        parts.append(f"greedy {one['prefix']:.2f}")
    if megabytes is not None:
        parts.append(f"{megabytes:.0f} MB" if megabytes >= 10 else f"{megabytes:.1f} MB")
    return "; ".join(parts)


_LANGUAGE_MODELS: Final = Notation(
    unit="tokens a second",
    speeds_heading="speed",
    legend="Writing is decoding with so many sequences in one batch, reading is a prompt of so many tokens; both in "
    "tokens a second, by the median of single runs. Speed-up is the geometric mean over all of these, against PyTorch "
    "in fp32. Perplexity is on the compared texts, with its difference from PyTorch's and the 95 % interval of that; "
    "next token is the share of places in them at which both find the same one likeliest; greedy is how much of "
    "continuations without sampling is the same before the first difference.",
    heading=lambda shape: f"{_step(shape)} tok/s",
    speed=_tokens_a_second,
    speeds=_lines,
    agreement=_predictions,
)
