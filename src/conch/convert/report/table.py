"""The table of a conversion: its columns, and the notation of figures for both kinds of models.

Everything is taken from the manifest, so that reports can be regenerated. All report writers get their rows here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from conch.checkpoints.manifest import Latency, Manifest, Variant
from conch.convert.measure import by_shape, speed_up
from conch.convert.verdict import NOT_ASKED_FOR, REFERENCE, interference
from conch.core.sampling import TEXT_GENERATION
from conch.measure.reports.numbers import NONE
from conch.measure.reports.report import (
    Block,
    Bullets,
    Cell,
    Column,
    Note,
    Paragraph,
    Properties,
    Report,
    Row,
    Table,
    Tone,
)
from conch.measure.texts.shapes import Shape

_ENGINES: Final = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "tensorrt": "TensorRT"}
#: The figures of batch invariance in a variant's agreement.
NEIGHBOURS: Final = "neighbours"
_SIZES: Final = (
    "Speed-up is the geometric mean over the shapes, against PyTorch in fp32. The percentage after it is the largest "
    "spread: half the interquartile range, relative to the median. 'busy' means that other processes used more than a "
    "tenth of the cores, other guests of the host more than 2 %, or the quota of the control group was used up. Disk "
    "is the size of the variant's weights, memory the resident memory of a process that runs only the variant. "
)
#: The minimum number of runs for quartiles.
_MIN_RUNS: Final = 4


class EncoderNotation:
    """Formats figures of encoders: latencies, cosines, and the task's metric."""

    unit: str = "median ms by batch x tokens"
    #: The heading of a cell with all speeds of a variant.
    speeds_heading: str = "batch x tokens"
    legend: str = (
        "Latency is the median of one run at batch x tokens. "
        + _SIZES
        + "Agreement is the smallest cosine of each output with PyTorch's, and the task's metric with "
        "its 95 % interval. 'In a batch' is the smallest cosine between the result for a row alone and its result in "
        "a batch, or the share of rows with the same result."
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
            lines.append(f"{batch:>3}" + "".join(f"{self.speed(cell) if cell else NONE:>8}" for cell in cells))
        return "\n".join(lines)

    def agreement(self, figures: Mapping[str, Mapping[str, Any]]) -> str:
        """Format smallest cosines and the metric: ``logits ≥ 0.9912; same label 0.993 (0.96 … 1)``."""
        parts = []
        for name, output in figures.items():
            if name in ("task", "recall"):
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

    unit = "tokens per second"
    speeds_heading = "speed"
    legend = (
        "'write xN' is decoding with N sequences in one batch, 'read N' is processing a prompt of N tokens; both in "
        "tokens per second, from the median of single runs. "
        + _SIZES
        + "Perplexity is measured on the compared texts, with its difference from PyTorch's and the 95 % interval of "
        "the difference. 'next token' is the share of positions at which both models consider the same token most "
        "likely. 'greedy' is the share of continuations without sampling before the first difference."
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


class SpeechNotation(EncoderNotation):
    """Formats figures of models that transcribe: the time for windows, and word error rates."""

    unit = "median ms for windows"
    speeds_heading = "windows x tokens"
    legend = (
        "Latency is the median time for windows x tokens: windows of sound in one batch, and tokens written for each. "
        + _SIZES
        + "Word error rate compares with the spoken texts; its difference from PyTorch's has a 95 % interval. "
        "'changed' is the word error rate compared with PyTorch's transcripts."
    )

    def agreement(self, figures: Mapping[str, Mapping[str, Any]]) -> str:
        """Format as ``word error rate 5.21 % (+0.17 %: -0.10 … +0.42); changed 0.42 %``."""
        parts = []
        if "word_error_rate" in figures:
            value, delta, low, high = (
                100 * figures["word_error_rate"][name] for name in ("value", "delta", "low", "high")
            )
            interval = f" ({delta:+.2f} %: {low:+.2f} … {high:+.2f})" if delta or low or high else ""
            parts.append(f"word error rate {value:.2f} %{interval}")
        if "transcripts" in figures:
            parts.append(f"changed {100 * figures['transcripts']['changed']:.2f} %")
        return "; ".join(parts)


def notation_of(manifest: Manifest) -> EncoderNotation:
    """Return the notation for the manifest's kind of model."""
    if manifest.task == "automatic-speech-recognition":
        return SpeechNotation()
    return LanguageModelNotation() if manifest.task == TEXT_GENERATION else EncoderNotation()


def variants_table(manifest: Manifest, speeds: Literal["columns", "cell", "none"] = "none") -> Table:
    """Return a table of all variants, measured or not, in the manifest's order.

    ``speeds`` decides whether each shape has a column, all of them share a cell, or they are omitted.
    """
    notation = notation_of(manifest)
    reference = reference_of(manifest).latency
    all_shapes = shapes(manifest) if speeds == "columns" else []
    columns = [
        Column("engine (precision)"),
        *(Column(notation.heading(shape), True) for shape in all_shapes),
        *([Column(notation.speeds_heading, narrow="stack")] if speeds == "cell" else []),
        Column("speed-up", True),
        Column("disk", True, megabytes),
        Column("memory", True, megabytes, narrow="stack"),
        Column("agreement"),
        Column("in a batch", narrow="stack"),
        Column("verdict"),
    ]
    rows = []
    for variant in manifest.variants:
        latencies = by_shape(variant.latency)
        cells: list[Cell] = [
            title(variant),
            *(notation.speed(latencies[shape]) if shape in latencies else None for shape in all_shapes),
            *([notation.speeds(variant)] if speeds == "cell" else []),
            _speed_up(variant, reference) if reference and latencies else None,
            variant.disk_bytes or None,
            variant.memory_bytes or None,
            notation.agreement(variant.agreement) or None,
            notation.in_batch(variant.agreement) or None,
            verdict(variant, manifest.auto),
        ]
        rows.append(Row(cells, tone_of(variant, manifest)))
    return Table("All variants", columns, rows)


def tone_of(variant: Variant, manifest: Manifest) -> Tone:
    """Return the emphasis of a variant: the one that serves, unless its speed is not reliable, or a refused one."""
    if variant.name == manifest.auto:
        return "" if is_disturbed(manifest) else "good"
    return "bad" if is_refused(variant) else "" if variant.usable else "muted"


def is_refused(variant: Variant) -> bool:
    """Return whether a variant was refused."""
    return bool(variant.reasons) and not variant.passed and variant.reasons != (NOT_ASKED_FOR,)


def is_disturbed(manifest: Manifest) -> bool:
    """Return whether the speed of the serving variant was measured on a busy machine."""
    return is_busy(manifest.variant(manifest.auto), reference_of(manifest).latency)


def reference_of(manifest: Manifest) -> Variant:
    """Return the variant with which all others are compared, whether or not it may serve."""
    return next(variant for variant in manifest.variants if variant.name == REFERENCE)


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


def megabytes(size: float) -> str:
    """Format a size (bytes) as ``90.9 MB``."""
    value = size / 1e6
    return f"{value:.0f} MB" if value >= 100 else f"{value:.1f} MB"


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
        f"{runs[0]} to {runs[-1]} runs per figure, {busy} of {len(runs)} figures busy"
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


def log_lines(manifest: Manifest) -> Iterator[str]:
    """Yield one line per variant and shape: mean, sd, min, max, median, 95p, 99p, in milliseconds."""
    for shape in shapes(manifest):
        for variant in manifest.variants:
            if (run := by_shape(variant.latency).get(shape)) is not None:
                yield (
                    f"[{title(variant)}] {shape}: mean={run.mean_ms:.2f}ms, sd={run.sd_ms:.2f}ms, "
                    f"min={run.min_ms:.2f}ms, max={run.max_ms:.2f}ms, median={run.median_ms:.2f}ms, "
                    f"95p={run.p95_ms:.2f}ms, 99p={run.p99_ms:.2f}ms, runs={run.runs}{', busy' if run.busy else ''}"
                )


def facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield names and values of the facts about the conversion: source, versions, and measurement conditions."""
    settings = manifest.settings
    yield "task", manifest.task
    if manifest.source.revision:
        yield "revision", manifest.source.revision
    yield "converted", f"{manifest.created} by conch {manifest.conch}"
    yield "measured on", conditions(manifest)
    tokens = f" of {settings['tokens']} tokens" if "tokens" in settings else ""
    yield "compared on", f"{settings.get('samples', '?')} samples{tokens}, {settings.get('data', 'built-in')}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())


def short_report(manifest: Manifest) -> Report:
    """Return the report in Markdown: facts, warnings, the choice, and all figures in a table."""
    refused = [
        f"Refused: {variant.name}: {'; '.join(variant.reasons)}."
        for variant in manifest.variants
        if variant.reasons and not variant.usable and variant.reasons != (NOT_ASKED_FOR,)
    ]
    blocks: list[Block] = [
        Properties(list(facts(manifest))),
        *_warnings(manifest),
        *([Bullets(manifest.choice)] if manifest.choice else []),
        replace(variants_table(manifest, "columns"), caption=""),
        Paragraph(" ".join([notation_of(manifest).legend, *refused])),
    ]
    return Report(manifest.source.model, "", [], blocks)


def summary(manifest: Manifest) -> list[Block]:
    """Return the result for a terminal: the variants, the measurement conditions and the warnings."""
    caption = f"{manifest.source.model} ({manifest.task}), {notation_of(manifest).unit}"
    return [
        replace(variants_table(manifest, "cell"), caption=caption),
        Paragraph(f"Measured on {conditions(manifest)}."),
        *_warnings(manifest),
    ]


def _warnings(manifest: Manifest) -> list[Note]:
    return [Note("warning", f"{warning}.") for warning in manifest.warnings]
