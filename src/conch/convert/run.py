"""One conversion from beginning to end: build the variants, compare, measure, judge, write, move into place.

Called by ``conch convert`` in its process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from conch.checkpoints.contrasts import Contrasts
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Manifest, Variant, hashes
from conch.convert.causal.conversion import CausalConversion
from conch.convert.companion import candidates
from conch.convert.conversion import Conversion, Progress
from conch.convert.encoder.conversion import EncoderConversion
from conch.convert.footprint import on_disk, resident, together
from conch.convert.libraries import describe_error
from conch.convert.manifest import manifest_of
from conch.convert.measure import measure
from conch.convert.plan import Plan
from conch.convert.publish import publish, require_free, workspace
from conch.convert.report import document
from conch.convert.report.page import page_of
from conch.convert.requirements import require_packages
from conch.convert.variant import REFERENCE, BuiltVariant
from conch.convert.verdict import NOT_ASKED_FOR, choose
from conch.errors import invalid
from conch.machine.bystanders import Bystanders, Interference
from conch.machine.facts import description, load_average
from conch.reports.writing import write_page
from conch.sampling import TEXT_GENERATION

#: How many times the seconds that there are measuring may take without a warning.
LATE: Final = 1.5


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """What a conversion made: the manifest, and the model directories that appeared."""

    manifest: Manifest
    folders: tuple[Path, ...]


def convert(plan: Plan, progress: Progress) -> ConvertedModel:
    """Convert as planned.

    ``progress`` is told each step.  Raises UNSUPPORTED for missing packages, ALREADY_EXISTS for a model that is there,
    INVALID_ARG when no variant passes (with the reasons), and what reading the checkpoint raises.  Nothing is left
    behind by a failure.
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
        kind: type[Conversion[Any, Any]] = CausalConversion if checkpoint.task == TEXT_GENERATION else EncoderConversion
        (work / "built").mkdir()
        conversion = kind(plan, checkpoint, work / "built", progress)

        load_before = load_average()
        variants = conversion.build()
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


def _machine(load_before: float, seen: Sequence[Interference]) -> Mapping[str, Any]:
    """The machine for the manifest, with what others took of it and how much of the time its quota was used up."""
    count = max(1, len(seen))
    return {
        **description(load_before, sum(one.others for one in seen) / count),
        "stolen": round(sum(one.stolen for one in seen) / count, 3),
        "throttled": round(sum(one.throttled for one in seen) / count, 3),
    }


def _judge(conversion: Conversion[Any, Any], built: Sequence[BuiltVariant]) -> list[Variant]:
    """Compare every variant with the reference, and measure it, whether or not it agrees."""
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
            # Memory is measured in the same time, which at least half is left of where others keep the cores busy.
            seconds = conversion.plan.seconds / len(groups)
            _measure(conversion, networks, max(seconds - weighing, seconds / 2), judged)
        except Exception as error:  # a library's, about a shape that this variant does not take
            if conversion.in_memory_together or REFERENCE in networks:
                raise
            for name in networks:
                entry = replace(judged[name], agreement={}, passed=False)
                judged[name] = _refused(conversion, entry, f"it does not run: {describe_error(error)}")
        del networks  # The next group needs the memory.
    if "torch" not in conversion.engines:
        judged[REFERENCE] = replace(judged[REFERENCE], passed=False, reasons=(NOT_ASKED_FOR,))
    return [judged[variant.name] for variant in built]


def _compare(
    conversion: Conversion[Any, Any], group: Sequence[BuiltVariant], reference: Any, judged: dict[str, Variant]
) -> tuple[Any, dict[str, Any]]:
    """Add the variants of ``group`` to ``judged``; returns the reference's answers and the networks that ran, by name.

    Raises INVALID_ARG when the reference does not run; any other variant that raises is refused.
    """
    networks: dict[str, Any] = {}
    for variant in group:
        conversion.progress(f"comparing {variant.name} on {conversion.compared_on}")
        entry = variant.to_manifest(conversion.folder)
        try:
            network, answers = conversion.evaluate(variant)
            reference = answers if variant.name == REFERENCE else reference
            figures, reasons = conversion.compare(variant.precision, reference, answers)
            entry = replace(entry, agreement=figures, contrasts=_contrasts(conversion, variant, reference, answers))
            networks[variant.name] = network
        except Exception as error:  # a library's, about one variant
            if variant.name == REFERENCE:
                why = describe_error(error)
                raise invalid(f"there is no reference to compare with: {REFERENCE}: {why}") from None
            reasons = (f"it does not run: {describe_error(error)}",)
        source = judged.get(variant.made_from)
        if source is not None and not source.passed:
            reasons = (f"{source.name}, which it was made from, was refused", *reasons)
        judged[variant.name] = _refused(conversion, entry, *reasons) if reasons else replace(entry, passed=True)
    return reference, networks


def _contrasts(
    conversion: Conversion[Any, Any], variant: BuiltVariant, reference: Any, answers: Any
) -> Contrasts | None:
    """What the report shows of single texts; None of the reference, and where that cannot be put in words, which is no
    reason to refuse a variant."""
    if variant.name == REFERENCE:
        return None
    try:
        found: Contrasts = conversion.contrast(reference, answers)
    except Exception as error:  # a tokenizer's, of what its own vocabulary does not have
        why = describe_error(error)
        conversion.warn([f"the texts whose answers differ most with {variant.name} are not shown: {why}"])
        return None
    return found


def _refused(conversion: Conversion[Any, Any], entry: Variant, *reasons: str) -> Variant:
    for reason in reasons:
        conversion.progress(f"{entry.name} refused: {reason}" if entry.agreement else f"{entry.name}: {reason}")
    return replace(entry, passed=False, reasons=reasons)


def _measure(
    conversion: Conversion[Any, Any], networks: Mapping[str, Any], seconds: float, judged: dict[str, Variant]
) -> None:
    """Add the latencies of ``networks`` to their entries, in about ``seconds``."""
    together, bystanders = conversion.in_memory_together, Bystanders()
    start = time.perf_counter()
    if networks and not together:
        conversion.progress(f"measuring {', '.join(networks)}")
    measured = measure(
        {shape: conversion.runs(networks, shape) for shape in conversion.shapes},
        seconds,
        others=bystanders.since_last,
        progress=conversion.progress if together else lambda step: None,
    )
    conversion.interference.append(bystanders.since_first())
    taken = time.perf_counter() - start
    if networks and seconds > 0 and taken > LATE * seconds:
        conversion.warn(
            [
                f"--seconds {conversion.plan.seconds:g} is too little: to run {', '.join(networks)} twice at each of "
                f"{len(conversion.shapes)} shapes took {taken:.0f} s where {seconds:.0f} were left"
            ]
        )
    for name, latencies in measured.items():
        judged[name] = replace(judged[name], latency=tuple(latencies))


def _accompany(conversion: Conversion[Any, Any], manifest: Manifest, built: Mapping[str, BuiltVariant]) -> Manifest:
    """The manifest with the variant that is held beside ``auto`` where it is faster, if one is worth it; and why."""
    if not conversion.serves_by_shape:
        return manifest
    auto, choice = built[manifest.auto], list(manifest.choice)
    for one in candidates(manifest, conversion.serving_engines, conversion.plan.mix):
        name, overall = one.variant.name, one.companion.overall
        faster = f"'{name}' is faster at {one.where}"
        if not one.worth_it:
            choice.append(f"{faster}, which makes {overall:.2f}x over all: too little to hold both")
            break  # the others gain less
        conversion.progress(f"comparing {manifest.auto} with {name}")
        figures, reasons = conversion.compare_pair(auto, built[name])
        if reasons:
            choice.append(
                f"{faster}, but cannot serve beside '{manifest.auto}', as a text's answer would depend on the texts "
                f"beside it: {'; '.join(reasons)}"
            )
            continue
        memory = resident([partial(together, [conversion.opening(auto), conversion.opening(built[name])])], 1)[0]
        choice.append(
            f"{faster} and serves there: {overall:.2f}x over all, for {memory / 1e6:.0f} MB resident with both where "
            f"'{manifest.auto}' alone has {manifest.variant(manifest.auto).memory_bytes / 1e6:.0f}"
        )
        companion = replace(one.companion, memory_bytes=memory, agreement=figures)
        return replace(manifest, by_shape=companion, choice=tuple(choice))
    return replace(manifest, choice=tuple(choice))


def _weigh(conversion: Conversion[Any, Any], group: Sequence[BuiltVariant]) -> dict[str, tuple[int, int]]:
    """The bytes that each variant of a group takes on the disk and, unless no time is given for it, in memory."""
    at_once = 2 if conversion.in_memory_together else 1
    memory = [0] * len(group)
    if conversion.plan.seconds:
        conversion.progress(f"measuring the memory of {', '.join(variant.name for variant in group)}")
        memory = resident([conversion.opening(variant) for variant in group], at_once)
    return {
        variant.name: (on_disk(conversion.weights(variant)), resident_bytes)
        for variant, resident_bytes in zip(group, memory, strict=True)
    }


def _write(
    conversion: Conversion[Any, Any], manifest: Manifest, built: Sequence[BuiltVariant], target: Path
) -> Manifest:
    """Write model directories, manifest and reports into ``target``, which nobody loads; returns the manifest with the
    paths and hashes of the files there."""
    target.mkdir()
    model, paths = conversion.write_models(target, manifest, {variant.name: variant for variant in built})
    variants = tuple(replace(variant, path=paths.get(variant.name, "")) for variant in manifest.variants)
    manifest = replace(manifest, variants=variants, files=hashes(model / "1"))
    manifest.write(model / "1")
    (model / "report.md").write_text(document.markdown(manifest), encoding="utf-8")
    write_page(page_of(manifest), model / "report.html")
    return manifest
