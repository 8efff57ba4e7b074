"""Selects the variants that may serve, and the fastest of them: ``auto``.

The server relies on the result, which is written to ``conch.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from conch.checkpoints.manifest import Manifest, Variant
from conch.convert.expected import speed_up_for
from conch.convert.measure import speed_up
from conch.convert.variant import REFERENCE
from conch.core.errors import invalid
from conch.machine.interference import Interference
from conch.measure.texts.shapes import Mix

#: Why the reference does not serve if torch was not requested.
NOT_ASKED_FOR: Final = "reference only: torch is not among --backend"


def choose(
    manifest: Manifest, engines: frozenset[str], *, force: bool, advice: str, mix: Mix | None = None
) -> Manifest:
    """Return the manifest with ``auto``, the fastest variant on ``engines`` that may serve.

    Speed is that for the requests of ``mix``, or without it the mean over all measured shapes.  ``force`` accepts
    refused variants that ran.  Raises INVALID_ARG, with the reasons and the ``advice``, if there is none.
    """
    reference = next(variant for variant in manifest.variants if variant.name == REFERENCE)
    variants = tuple(_forced(variant) if force else variant for variant in manifest.variants)
    speed_ups = {
        variant.name: speed_up_for(mix, variant, reference) if mix else speed_up(variant.latency, reference.latency)
        for variant in variants
        if variant.usable and variant.engine in engines
    }
    auto = fastest(speed_ups)
    if not auto:
        reasons = "; ".join(f"{variant.name}: {variant.reasons[0]}" for variant in variants if variant.reasons)
        raise invalid(f"no variant may serve ({reasons}); {advice}")
    rests_on = [variant for variant in variants if variant.name in speed_ups or variant.name == REFERENCE]
    why = _why(auto, speed_ups, mix, disturbed=any(variant.busy for variant in rests_on))
    chosen = replace(manifest, variants=variants, auto=auto, choice=(why,))
    return replace(chosen, warnings=(*manifest.warnings, *busy(chosen)))


def _why(auto: str, speed_ups: Mapping[str, float], mix: Mix | None, *, disturbed: bool) -> str:
    """Return why ``auto`` was chosen, in a sentence; without figures if measurements were ``disturbed``."""
    over = f"for {', '.join(f'{shape} ({share:.0%})' for shape, share in mix.items())}" if mix else "over all shapes"
    others = sorted((name for name in speed_ups if name != auto), key=lambda name: -speed_ups[name])
    if not others:
        return f"'{auto}' is the only variant that may serve"
    if disturbed:
        return f"'{auto}' was the fastest {over}, but other processes used the machine: by how much is not known"
    second = f"; next is '{others[0]}' with {speed_ups[others[0]]:.2f}x"
    return f"'{auto}' is {speed_ups[auto]:.2f}x as fast as {REFERENCE} {over}{second}"


def busy(manifest: Manifest) -> list[str]:
    """Return a warning if the choice is based on figures of a busy machine."""
    figures = [latency for variant in manifest.variants for latency in variant.latency]
    disturbed = sum(latency.busy for latency in figures)
    if not disturbed:
        return []
    return [
        f"the machine was busy ({interference(manifest)}): {disturbed} of {len(figures)} latencies are not "
        f"reliable, and another variant than '{manifest.auto}' may be the fastest; convert again when it is idle"
    ]


def interference(manifest: Manifest) -> Interference:
    """Return the interference while variants were measured; old manifests contain only the share of cores."""
    machine = manifest.machine
    return Interference(machine.get("others", 0.0), machine.get("stolen", 0.0), machine.get("throttled", 0))


def fastest(speed_ups: Mapping[str, float]) -> str:
    """Return the name with the highest speed-up; empty if there is none."""
    return max(speed_ups, key=lambda name: speed_ups[name], default="")


def _forced(variant: Variant) -> Variant:
    refused = not variant.passed and bool(variant.latency) and variant.reasons != (NOT_ASKED_FOR,)
    return replace(variant, forced=True) if refused else variant
