"""Runs a conversion: builds the variants, compares, measures and judges them, and publishes the model.

Called by ``conch convert`` in its process.
"""

from __future__ import annotations

import datetime
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any, Final

from conch import __version__
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Companion, Contrasts, Gain, Latency, Manifest, Source, Variant, hashes
from conch.checkpoints.ranking import is_causal
from conch.convert.causal.conversion import CausalConversion
from conch.convert.conversion import Conversion, Progress
from conch.convert.encoder.conversion import NetworkConversion
from conch.convert.encoder.retrieval import CausalRankingConversion, EmbeddingConversion
from conch.convert.evidence import SEED
from conch.convert.footprint import on_disk, resident, together
from conch.convert.layout import checkpoint_files
from conch.convert.libraries import describe_error, silence_libraries
from conch.convert.measure import by_shape, measure
from conch.convert.plan import Plan
from conch.convert.publish import publish, require_free, workspace
from conch.convert.report.page import report
from conch.convert.report.table import short_report
from conch.convert.speech.conversion import SpeechConversion
from conch.convert.verdict import (
    NOT_ASKED_FOR,
    REFERENCE,
    BuiltVariant,
    beside,
    choose,
    cost_of,
    expected_speed_up,
    mean_speed_up,
)
from conch.core.errors import invalid
from conch.core.sampling import TEXT_GENERATION
from conch.machine import extras
from conch.machine.facts import description, load_average, usable_cores
from conch.machine.memory import heap_trim
from conch.machine.processes import Interference, InterferenceMeter
from conch.measure.reports.files import write_report
from conch.measure.reports.text import markdown
from conch.measure.texts.shapes import Mix, Shape

# A variant gains at a shape if it is 1.1 times as fast as ``auto`` by the medians, the quartiles of the two do not
# overlap, and neither figure is busy. It is held if these gains make the expected requests 1.05 times as fast.


#: The minimum speed-up at a shape to count there, and overall for a variant to be held.
WORTH_AT_A_SHAPE: Final = 1.1
WORTH_OVERALL: Final = 1.05
#: The minimum number of runs for quartiles, which are the noise that a difference is compared with.
MIN_RUNS: Final = 4
#: The minimum gain, because gains must be positive even if a busy machine delayed one figure.
_LEAST_GAIN: Final = 0.001


@dataclass(frozen=True, slots=True)
class PossibleCompanion:
    """A variant that may serve beside ``auto``, with its gains."""

    variant: Variant
    companion: Companion

    @property
    def worth_it(self) -> bool:
        """Whether both together are faster by more than noise."""
        return self.companion.overall >= WORTH_OVERALL

    @property
    def where(self) -> str:
        """The measured shapes at which it is faster, with the speed-ups: ``1x16 (1.31x), 1x128 (1.12x)``."""
        gained = (gain for gain in self.companion.gains if gain.gain >= WORTH_AT_A_SHAPE)
        return ", ".join(f"{gain.batch}x{gain.tokens} ({gain.gain:.2f}x)" for gain in gained)


def candidates(manifest: Manifest, engines: frozenset[str], mix: Mix) -> list[PossibleCompanion]:
    """Return the other passed variants on ``engines`` that are somewhere faster than ``auto``, the most useful first.

    ``mix`` are the expected requests; without it, all measured shapes have equal weight.
    """
    auto = manifest.variant(manifest.auto)
    possible = (
        _candidate(auto, variant, mix)
        for variant in manifest.variants
        if variant.passed
        and variant.name != auto.name
        and variant.engine in engines
        and variant.latency
        and auto.latency
    )
    return sorted(
        (candidate for candidate in possible if candidate.where), key=lambda candidate: -candidate.companion.overall
    )


def _candidate(auto: Variant, other: Variant, mix: Mix) -> PossibleCompanion:
    gains = tuple(_gains(auto, other))
    companion = Companion(other.name, gains)
    usual = cost_of(auto.latency)
    both = beside(usual, cost_of(other.latency), companion)
    shapes = [Shape(gain.batch, gain.tokens) for gain in gains]
    overall = expected_speed_up(both, usual, mix) if mix else mean_speed_up(both, usual, shapes)
    return PossibleCompanion(other, Companion(other.name, gains, round(overall, 3)))


def _gains(auto: Variant, other: Variant) -> Iterator[Gain]:
    usual, faster = by_shape(auto.latency), by_shape(other.latency)
    for shape in sorted(usual.keys() & faster.keys()):
        gain = round(_gain(usual[shape], faster[shape]), 3)
        yield Gain(shape.batch, shape.tokens, max(gain, _LEAST_GAIN))


def _gain(usual: Latency, other: Latency) -> float:
    """Return the speed-up of ``other``; 1 if the figures do not distinguish the two."""
    gain = usual.median_ms / other.median_ms
    if gain <= 1:
        return gain
    known = min(usual.runs, other.runs) >= MIN_RUNS and not (usual.busy or other.busy)
    apart = usual.median_ms * (1 - usual.spread / 2) > other.median_ms * (1 + other.spread / 2)
    return gain if known and apart and gain >= WORTH_AT_A_SHAPE else 1.0


_LIBRARIES: Final = (
    "torch", "transformers", "tokenizers", "onnx", "onnxruntime", "openvino", "nncf"
)  # fmt: skip


def manifest_of(conversion: Conversion[Any, Any], variants: Sequence[Variant], machine: Mapping[str, Any]) -> Manifest:
    """Return the manifest before a variant is chosen and the files are written."""
    plan, checkpoint, shapes = conversion.plan, conversion.checkpoint, conversion.shapes
    names = [str(name) for name in checkpoint_files(checkpoint, weights=True)]
    settings = {
        "backends": list(conversion.engines),
        "quantize": list(conversion.precisions),
        "batch_sizes": sorted({shape.batch for shape in shapes}),
        "sequence_lengths": sorted({shape.tokens for shape in shapes}),
        "data": str(plan.data) if plan.data is not None else "built-in",
        "samples": conversion.sample_count,
        "seed": SEED,
        "threads": plan.threads or usable_cores(),
        "device": "cpu",
        "expect": plan.expect,
        "command": plan.command,
        **conversion.settings,
    }
    return Manifest(
        source=Source(plan.model, checkpoint.revision, hashes(checkpoint.directory, names)),
        task=checkpoint.task,
        variants=tuple(variants),
        auto="",
        files={},
        conch=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"python": python_version(), **_versions()},
        settings=settings,
        machine=machine,
        warnings=tuple(conversion.warnings),
    )


def _versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


# If a package were missing, variants could not be built, and the conversion would publish only the others.


#: Packages for the report's charts.
_REPORT: Final = ("altair", "vl_convert")
_ALWAYS: Final = ("torch", "transformers", "tokenizers", *_REPORT)
#: The exporters, and ONNX Runtime, in which a graph is compared with the network for any engine.
_GRAPHS: Final = ("onnx", "onnxscript", "onnxruntime")
#: Packages for making and running variants of encoders, by backend.
_ENCODERS: Final[Mapping[str, Sequence[str]]] = {
    "onnx": _GRAPHS,
    "tensorrt": _GRAPHS,
    "openvino": (*_GRAPHS, "openvino"),
}
#: The same for language models, and for models that transcribe.
_LANGUAGE_MODELS: Final[Mapping[str, Sequence[str]]] = {"openvino": ("openvino",)}
SPEECH_RECOGNITION: Final = "automatic-speech-recognition"


def needed(plan: Plan, task: str) -> list[str]:
    """Return the modules that the plan's variants need for ``task``."""
    writes = task in (TEXT_GENERATION, SPEECH_RECOGNITION)
    by_backend = _LANGUAGE_MODELS if writes else _ENCODERS
    backends = ("openvino",) if writes and not plan.backends else plan.engines
    modules = [*_ALWAYS, *(module for backend in backends for module in by_backend.get(backend, ()))]
    usual = not plan.quantize
    if "openvino" in backends and (usual or any(precision.startswith("int") for precision in plan.precisions)):
        modules.append("nncf")
    return list(dict.fromkeys(modules))


def require_packages(plan: Plan, task: str = "") -> None:
    """Raise UNSUPPORTED for all missing modules, with the command that installs them.

    While the task is unknown, only modules needed by every kind of model that fits the plan are required.
    """
    tasks = (task,) if task else _possible(plan)
    first, *others = (needed(plan, task) for task in tasks)
    with silence_libraries():
        extras.require("conch convert", *(module for module in first if all(module in other for other in others)))


def _possible(plan: Plan) -> tuple[str, ...]:
    """Return a task of each kind of model that fits the plan."""
    writes = not plan.backends or ("openvino" in plan.engines and {"openvino", "torch"} >= set(plan.engines))
    return ("feature-extraction", TEXT_GENERATION) if writes and plan.layout != "triton" else ("feature-extraction",)


#: The maximum ratio of measuring time to planned time without a warning.
LATE: Final = 1.5


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """The result of a conversion: the manifest, and the published model directories."""

    manifest: Manifest
    folders: tuple[Path, ...]


def convert(plan: Plan, progress: Progress) -> ConvertedModel:
    """Run a conversion.

    ``progress`` is called with each step. Raises UNSUPPORTED for missing packages, ALREADY_EXISTS for an existing
    model, INVALID_ARG if no variant passes (with the reasons), and the errors of reading the checkpoint. A failure
    leaves nothing behind.
    """
    plan.check()
    require_packages(plan)
    require_free(plan.repository, plan.folders, plan.overwrite)
    with workspace(plan.repository) as work:
        progress(f"reading {plan.model}")
        checkpoint = Checkpoint.open(work, plan.options())
        if checkpoint.manifest is not None:
            raise invalid(f"'{plan.model}' is a converted model: convert {checkpoint.manifest.source.model} instead")
        require_packages(plan, checkpoint.task)
        (work / "built").mkdir()
        conversion = conversion_of(checkpoint)(plan, checkpoint, work / "built", progress)

        load_before = load_average()
        variants = conversion.build()
        _free_memory()
        built = [variant for variant in variants if isinstance(variant, BuiltVariant)]
        failed = [variant.to_manifest() for variant in variants if not isinstance(variant, BuiltVariant)]
        for variant in failed:
            progress(f"{variant.name}: {variant.reasons[0]}")
        judged = _judge(conversion, built)
        machine = _machine(load_before, conversion.interference)
        manifest = manifest_of(conversion, [*judged, *failed], machine)
        manifest = choose(
            manifest, conversion.serving_engines, force=plan.force, advice=conversion.advice, mix=plan.mix
        )
        for warning in manifest.warnings[len(conversion.warnings) :]:
            progress(f"warning: {warning}")
        manifest = _accompany(conversion, manifest, {variant.name: variant for variant in built})
        for reason in manifest.choice:
            progress(f"chosen: {reason}")

        progress("writing the model")
        if plan.keep == "auto":
            beside = [manifest.by_shape.variant] if manifest.by_shape is not None else []
            manifest = manifest.keeping([manifest.auto, *beside])
        manifest = _write(conversion, manifest, built, work / "made")
        publish(work / "made", work, plan.repository, plan.folders, plan.overwrite)
    return ConvertedModel(manifest, tuple(plan.repository / name for name in plan.folders))


def _free_memory() -> None:
    """Free the networks and graphs of the exporters, which reference each other, before variants are opened."""
    gc.collect()
    if (trim := heap_trim()) is not None:
        trim()


def conversion_of(checkpoint: Checkpoint) -> type[Conversion[Any, Any]]:
    """Return the conversion for the kind of model."""
    if checkpoint.task == TEXT_GENERATION:
        return CausalConversion
    if checkpoint.task == SPEECH_RECOGNITION:
        return SpeechConversion
    if checkpoint.task == "feature-extraction":
        return EmbeddingConversion
    ranks = checkpoint.task == "text-ranking" and is_causal(checkpoint.config)
    return CausalRankingConversion if ranks else NetworkConversion


def _machine(load_before: float, seen: Sequence[Interference]) -> Mapping[str, Any]:
    """Return the machine's description for the manifest, with interference and use of the CPU quota."""
    count = max(1, len(seen))
    return {
        **description(load_before, sum(interference.others for interference in seen) / count),
        "stolen": round(sum(interference.stolen for interference in seen) / count, 3),
        "throttled": round(sum(interference.throttled for interference in seen) / count, 3),
    }


def _judge(conversion: Conversion[Any, Any], built: Sequence[BuiltVariant]) -> list[Variant]:
    """Compare every variant with the reference and measure it, even if it disagrees."""
    order = sorted(built, key=lambda variant: variant.name != REFERENCE)
    groups = [order] if conversion.in_memory_together else [[variant] for variant in order]
    judged: dict[str, Variant] = {}
    reference: Any = None
    for group in groups:
        before = time.perf_counter()
        sizes = _weigh(conversion, group)
        weighing = time.perf_counter() - before
        reference, networks = _compare(conversion, group, reference, judged)
        for name in judged.keys() & sizes.keys():
            disk, memory = sizes[name]
            judged[name] = replace(judged[name], disk_bytes=disk, memory_bytes=memory)
        try:
            # Memory is measured in the same time budget, of which at least half remains for latencies on a busy
            # machine.
            seconds = conversion.plan.seconds / len(groups)
            _measure(conversion, networks, max(seconds - weighing, seconds / 2), judged)
        except Exception as error:  # an exception of a library at a shape that this variant does not support
            if conversion.in_memory_together or REFERENCE in networks:
                raise
            for name in networks:
                entry = replace(judged[name], agreement={}, passed=False)
                judged[name] = _refused(conversion, entry, f"it does not run: {describe_error(error)}")
        del networks  # the next group needs the memory
    if "torch" not in conversion.engines:
        judged[REFERENCE] = replace(judged[REFERENCE], passed=False, reasons=(NOT_ASKED_FOR,))
    return [judged[variant.name] for variant in built]


def _compare(
    conversion: Conversion[Any, Any], group: Sequence[BuiltVariant], reference: Any, judged: dict[str, Variant]
) -> tuple[Any, dict[str, Any]]:
    """Add the variants of ``group`` to ``judged``; returns the reference's outputs and the networks that ran, by name.

    Raises INVALID_ARG if the reference does not run; any other variant that raises is refused.
    """
    networks: dict[str, Any] = {}
    for variant in group:
        conversion.progress(f"comparing {variant.name} on {conversion.compared_on}")
        entry = variant.to_manifest(conversion.folder)
        try:
            network, outputs = conversion.evaluate(variant)
            reference = outputs if variant.name == REFERENCE else reference
            figures, reasons = conversion.compare(variant.precision, reference, outputs)
            entry = replace(entry, agreement=figures, contrasts=_contrasts(conversion, variant, reference, outputs))
            networks[variant.name] = network
        except Exception as error:  # an exception of a library that concerns one variant
            if variant.name == REFERENCE:
                why = describe_error(error)
                raise invalid(f"the reference for the comparison is missing: {REFERENCE}: {why}") from None
            reasons = (f"it does not run: {describe_error(error)}",)
        source = judged.get(variant.made_from)
        if source is not None and not source.passed:
            reasons = (f"{source.name}, from which it was made, was refused", *reasons)
        judged[variant.name] = _refused(conversion, entry, *reasons) if reasons else replace(entry, passed=True)
    return reference, networks


def _contrasts(
    conversion: Conversion[Any, Any], variant: BuiltVariant, reference: Any, outputs: Any
) -> Contrasts | None:
    """Return the single texts for the report; None for the reference, or if they cannot be described.

    A missing description does not refuse a variant.
    """
    if variant.name == REFERENCE:
        return None
    try:
        contrasts: Contrasts = conversion.contrast(reference, outputs)
    except Exception as error:  # an exception of a tokenizer for ids outside of its vocabulary
        why = describe_error(error)
        conversion.warn([f"the texts with the most different outputs of {variant.name} are not shown: {why}"])
        return None
    return contrasts


def _refused(conversion: Conversion[Any, Any], entry: Variant, *reasons: str) -> Variant:
    for reason in reasons:
        conversion.progress(f"{entry.name} refused: {reason}" if entry.agreement else f"{entry.name}: {reason}")
    return replace(entry, passed=False, reasons=reasons)


def _measure(
    conversion: Conversion[Any, Any], networks: Mapping[str, Any], seconds: float, judged: dict[str, Variant]
) -> None:
    """Add the latencies of ``networks``, measured in about ``seconds``, to their entries."""
    together, meter = conversion.in_memory_together, InterferenceMeter()
    start = time.perf_counter()
    if networks and not together:
        conversion.progress(f"measuring {', '.join(networks)}")
    measured = measure(
        {shape: conversion.runs(networks, shape) for shape in conversion.shapes},
        seconds,
        others=meter.since_last,
        progress=conversion.progress if together else lambda step: None,
    )
    conversion.interference.append(meter.since_first())
    taken = time.perf_counter() - start
    if networks and seconds > 0 and taken > LATE * seconds:
        conversion.warn(
            [
                f"--seconds {conversion.plan.seconds:g} is too little: to run {', '.join(networks)} twice at each of "
                f"{len(conversion.shapes)} shapes took {taken:.0f} s, but only {seconds:.0f} s were left"
            ]
        )
    for name, latencies in measured.items():
        judged[name] = replace(judged[name], latency=tuple(latencies))


def _accompany(conversion: Conversion[Any, Any], manifest: Manifest, built: Mapping[str, BuiltVariant]) -> Manifest:
    """Return the manifest with the variant that serves beside ``auto``, if one is worth it, and the reasons."""
    if not conversion.serves_by_shape:
        return manifest
    auto, choice = built[manifest.auto], list(manifest.choice)
    for candidate in candidates(manifest, conversion.serving_engines, conversion.plan.mix):
        name, overall = candidate.variant.name, candidate.companion.overall
        faster = f"'{name}' is faster at {candidate.where}"
        if not candidate.worth_it:
            choice.append(f"{faster}, a gain of {overall:.2f}x over all shapes: too little to keep both in memory")
            break  # the others gain less
        conversion.progress(f"comparing {manifest.auto} with {name}")
        figures, reasons = conversion.compare_pair(auto, built[name])
        if reasons:
            choice.append(
                f"{faster}, but cannot serve together with '{manifest.auto}', because the output for a text would "
                f"depend on the other texts in its batch: {'; '.join(reasons)}"
            )
            continue
        opening = partial(together, [conversion.opening(auto), conversion.opening(built[name])])
        (memory,) = resident({f"{auto.name} with {name}": opening}, 1, conversion.progress)
        choice.append(
            f"{faster} and serves there: {overall:.2f}x over all, for {memory / 1e6:.0f} MB resident with both where "
            f"'{manifest.auto}' alone has {manifest.variant(manifest.auto).memory_bytes / 1e6:.0f}"
        )
        companion = replace(candidate.companion, memory_bytes=memory, agreement=figures)
        return replace(manifest, by_shape=companion, choice=tuple(choice))
    return replace(manifest, choice=tuple(choice))


def _weigh(conversion: Conversion[Any, Any], group: Sequence[BuiltVariant]) -> dict[str, tuple[int, int]]:
    """Return each variant's size on disk and in memory (bytes); memory is 0 if there is no time to measure it."""
    at_once = 2 if conversion.in_memory_together else 1
    memory = [0] * len(group)
    if conversion.plan.seconds:
        memory = resident(
            {variant.name: conversion.opening(variant) for variant in group}, at_once, conversion.progress
        )
    return {
        variant.name: (on_disk(conversion.weights(variant)), resident_bytes)
        for variant, resident_bytes in zip(group, memory, strict=True)
    }


def _write(
    conversion: Conversion[Any, Any], manifest: Manifest, built: Sequence[BuiltVariant], target: Path
) -> Manifest:
    """Write model directories, manifest and reports to ``target``, which no server loads.

    Returns the manifest with the paths and hashes of the files there.
    """
    target.mkdir()
    model, paths = conversion.write_models(target, manifest, {variant.name: variant for variant in built})
    variants = tuple(replace(variant, path=paths.get(variant.name, "")) for variant in manifest.variants)
    manifest = replace(manifest, variants=variants, files=hashes(model / "1"))
    manifest.write(model / "1")
    (model / "report.md").write_text(markdown(short_report(manifest)), encoding="utf-8")
    write_report(report(manifest, model.name), model / "report.html")
    return manifest
