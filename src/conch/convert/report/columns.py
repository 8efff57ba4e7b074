"""The table of a conversion: its columns, and the notation of figures for both kinds of models.

Everything is taken from the manifest, so that reports can be regenerated.  All report writers get their rows here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from conch.checkpoints.manifest import Latency, Manifest, Variant
from conch.convert.measure import by_shape, speed_up
from conch.convert.verdict import NOT_ASKED_FOR, REFERENCE, interference
from conch.core.sampling import TEXT_GENERATION
from conch.measure.texts.shapes import Shape

_ENGINES: Final = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "tensorrt": "TensorRT"}
#: The figures of batch invariance in a variant's agreement.
NEIGHBOURS: Final = "neighbours"
_SIZES: Final = (
    "Speed-up is the geometric mean over the shapes, against PyTorch in fp32; behind it half the distance of the "
    "quartiles, as a share of the median, where that is largest; busy: other processes used more than a tenth of the "
    "cores, other guests of the host more than 2 %, or the quota of the control group was used up. Disk is the "
    "variant's weights, memory what is resident of a process that runs it alone. "
)
#: The minimum number of runs for quartiles.
_MIN_RUNS: Final = 4
#: Placeholder for a missing figure.
_NONE: Final = "–"


class EncoderNotation:
    """Formats figures of encoders: latencies, cosines, and the task's metric."""

    unit: str = "median ms by batch x tokens"
    #: The heading of a cell with all speeds of a variant.
    speeds_heading: str = "batch x tokens"
    legend: str = (
        "Latency is the median of one run at batch x tokens. "
        + _SIZES
        + "Agreement is the smallest cosine of each output with PyTorch's, and the task's metric with "
        "its 95 % interval. In a batch: the smallest cosine of a row's answer alone with its answer among other rows, "
        "or the share of rows whose answer is the same."
    )

    def heading(self, shape: Shape) -> str:
        """Return the heading of the speed column at ``shape``, with the unit."""
        return f"{shape} ms"

    def speed(self, latency: Latency) -> str:
        """Format the speed at one shape."""
        return f"{latency.median_ms:.2f}" if latency.median_ms < 1000 else f"{latency.median_ms:.1f}"

    def speeds(self, variant: Variant) -> str:
        """Format all speeds: a line per batch size and a column per length."""
        latencies = by_shape(variant.latency)
        lengths = sorted({shape.tokens for shape in latencies})
        lines = ["  x" + "".join(f"{length:>8}" for length in lengths)] if lengths else []
        for batch in sorted({shape.batch for shape in latencies}):
            cells = (latencies.get(Shape(batch, length)) for length in lengths)
            lines.append(f"{batch:>3}" + "".join(f"{self.speed(cell) if cell else _NONE:>8}" for cell in cells))
        return "\n".join(lines)

    def agreement(self, figures: Mapping[str, Mapping[str, Any]]) -> str:
        """Format smallest cosines and the metric: ``logits ≥ 0.9912; same label 0.993 (0.96 … 1)``."""
        parts = []
        for name, output in figures.items():
            if name == "task":
                low, high = (output["value"] - output["delta"] + output[bound] for bound in ("low", "high"))
                parts.append(f"{output['name']} {output['value']:.4f} ({low:.4f} … {high:.4f})")
            elif name != NEIGHBOURS and output.get("cosine_min") is not None:
                parts.append(f"{name} ≥ {output['cosine_min']:.4f}")
        return "; ".join(parts)

    def in_batch(self, figures: Mapping[str, Mapping[str, Any]]) -> str:
        """Format a row alone against the same row in a batch: ``≥ 0.9912``, or for few classes ``0.9900 same``."""
        invariance = figures.get(NEIGHBOURS, {})
        if invariance.get("argmax") is not None:
            return f"{invariance['argmax']:.4f} same"
        return f"≥ {invariance['cosine_min']:.4f}" if invariance.get("cosine_min") is not None else ""


class LanguageModelNotation(EncoderNotation):
    """Formats figures of language models: tokens per second, perplexity, next tokens and continuations."""

    unit = "tokens a second"
    speeds_heading = "speed"
    legend = (
        "Writing is decoding with so many sequences in one batch, reading is a prompt of so many tokens; both in "
        "tokens a second, by the median of single runs. "
        + _SIZES
        + "Perplexity is on the compared texts, with its difference from PyTorch's and the 95 % "
        "interval of that; next token is the share of places in them at which both find the same one likeliest; greedy "
        "is how much of continuations without sampling is the same before the first difference."
    )

    def heading(self, shape: Shape) -> str:
        return f"{self._step(shape)} tok/s"

    def speed(self, latency: Latency) -> str:
        value = latency.batch * latency.tokens / latency.median_ms * 1000
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}"

    def speeds(self, variant: Variant) -> str:
        """Format all speeds, one per line."""
        order = sorted(by_shape(variant.latency).items(), key=lambda item: (item[0].tokens, item[0].batch))
        return "\n".join(f"  {self._step(shape):<10}{self.speed(latency):>8}" for shape, latency in order)

    def agreement(self, figures: Mapping[str, Mapping[str, Any]]) -> str:
        """Format as ``perplexity 30.51 (+0.87 %: +0.39 … +1.35); next token 0.9461; greedy 0.45``."""
        parts = []
        if figures:
            perplexity = figures["perplexity"]
            delta, low, high = (100 * perplexity[name] for name in ("delta", "low", "high"))
            interval = f" ({delta:+.2f} %: {low:+.2f} … {high:+.2f})" if delta or low or high else ""
            parts = [
                f"perplexity {perplexity['value']:.2f}{interval}",
                f"next token {figures['top_1']['value']:.4f}",
                f"greedy {figures['greedy']['prefix']:.2f}",
            ]
        return "; ".join(parts)

    @staticmethod
    def _step(shape: Shape) -> str:
        return f"write x{shape.batch}" if shape.tokens == 1 else f"read {shape.tokens}"


def notation_of(manifest: Manifest) -> EncoderNotation:
    """Return the notation for the manifest's kind of model."""
    return LanguageModelNotation() if manifest.task == TEXT_GENERATION else EncoderNotation()


def headings(manifest: Manifest) -> list[str]:
    """Return the headings: title, speed at each shape, speed-up, disk, memory, agreement, batch invariance, verdict."""
    heading = notation_of(manifest).heading
    return [
        "engine (precision)",
        *map(heading, shapes(manifest)),
        "speed-up",
        "disk",
        "memory",
        "agreement",
        "in a batch",
        "verdict",
    ]


def rows(manifest: Manifest) -> Iterator[tuple[Variant, list[str]]]:
    """Yield each variant, measured or not, with its cells, in the manifest's order."""
    notation = notation_of(manifest)
    reference = next((variant.latency for variant in manifest.variants if variant.name == REFERENCE), ())
    for variant in manifest.variants:
        latencies = by_shape(variant.latency)
        yield (
            variant,
            [
                title(variant),
                *(notation.speed(latencies[shape]) if shape in latencies else _NONE for shape in shapes(manifest)),
                _speed_up(variant, reference) if reference and latencies else _NONE,
                megabytes(variant.disk_bytes),
                megabytes(variant.memory_bytes),
                notation.agreement(variant.agreement) or _NONE,
                notation.in_batch(variant.agreement) or _NONE,
                verdict(variant, manifest.auto),
            ],
        )


def shapes(manifest: Manifest) -> list[Shape]:
    """Return all measured shapes, sorted."""
    return sorted({shape for variant in manifest.variants for shape in by_shape(variant.latency)})


def title(variant: Variant) -> str:
    """Format as ``ONNX Runtime (int8)``; other parts of the name follow the precision."""
    rest = [part for part in variant.name.split("-")[1:] if part != variant.precision]
    return f"{_ENGINES.get(variant.engine, variant.engine)} ({', '.join([variant.precision, *rest])})"


def _speed_up(variant: Variant, reference: Sequence[Latency]) -> str:
    """Format as ``3.95x ±4%``: half the largest quartile distance of all shapes, followed by ``busy`` if disturbed."""
    spreads = [latency.spread / 2 for latency in variant.latency if latency.runs >= _MIN_RUNS]
    spread = f" ±{max(spreads):.0%}" if spreads else ""
    return f"{speed_up(variant.latency, reference):.2f}x{spread}{' busy' if is_busy(variant, reference) else ''}"


def is_busy(variant: Variant, reference: Sequence[Latency]) -> bool:
    """Return whether a variant's speed-up over the ``reference`` was measured on a busy machine."""
    return variant.busy or any(latency.busy for latency in reference)


def megabytes(count: int) -> str:
    """Format a size (bytes) as ``90.9 MB``; 0 means not measured."""
    value = count / 1e6
    return _NONE if not count else f"{value:.0f} MB" if value >= 100 else f"{value:.1f} MB"


def conditions(manifest: Manifest) -> str:
    """Describe the machine and its load: ``AMD EPYC, 2 of 2 cores; load average 0.3 before …``."""
    machine, settings = manifest.machine, manifest.settings
    latencies = [latency for variant in manifest.variants for latency in variant.latency]
    if not machine or not latencies:
        return f"{settings.get('device', 'cpu')}, {settings.get('threads', '?')} threads"
    runs = sorted(latency.runs for latency in latencies)
    busy = sum(latency.busy for latency in latencies)
    return (
        f"{machine['processor']}, {settings.get('threads', '?')} of {machine['cores']} cores; load average "
        f"{machine['load_before']:.1f} before and {machine['load_during']:.1f} during; {interference(manifest)}; "
        f"{runs[0]} to {runs[-1]} runs a figure, {busy} of {len(runs)} figures busy"
    )


def verdict(variant: Variant, auto: str) -> str:
    """Return whether the variant serves or may serve; if not, the first reason."""
    if variant.name == auto:
        marks = [mark for mark, has in (("forced", variant.forced), ("busy", variant.busy)) if has]
        return f"auto ({', '.join(marks)})" if marks else "auto"
    if variant.passed:
        return "passes" if variant.kept else "passes, left out"
    if variant.reasons == (NOT_ASKED_FOR,):
        return "reference"
    reason = variant.reasons[0] if variant.reasons else ""
    return f"forced: {reason}" if variant.forced else f"refused: {reason}" if variant.agreement else reason
