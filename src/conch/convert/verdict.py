"""Built variants, their expected times, and the verdict: which of them may serve, and the fastest, ``auto``.

The server relies on the result, which is written to ``conch.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, fsum, log
from pathlib import Path
from typing import Final

from conch.checkpoints.manifest import Companion, Latency, Manifest, ShapeTable, Variant
from conch.convert.measure import speed_up
from conch.core.errors import invalid
from conch.core.lengths import CPU_TOKENS, runs
from conch.machine.processes import Interference
from conch.measure.texts.shapes import Mix, Shape

# Times are in milliseconds. A variant is measured at a few shapes; times at others are interpolated.


#: The time of one run at a shape (ms).
Cost = Callable[[Shape], float]


def check_mix(mix: Mix, measured: Sequence[Shape]) -> None:
    """Raise INVALID_ARG for a shape outside of the measured ones, where no estimate is possible."""
    batches, lengths = {shape.batch for shape in measured}, {shape.tokens for shape in measured}
    for shape in mix:
        for value, values, flag in ((shape.batch, batches, "--batch-size"), (shape.tokens, lengths, "--seq-len")):
            if not min(values) <= value <= max(values):
                raise invalid(
                    f"--expect {shape} is outside of what is measured ({flag} {' '.join(map(str, sorted(values)))}): "
                    f"add {flag} {value}"
                )


def cost_of(latency: Sequence[Latency]) -> Cost:
    """Return the time of a variant at any shape, from its medians."""
    table = ShapeTable({(point.batch, point.tokens): point.median_ms for point in latency})
    return lambda shape: table.at(shape.batch, shape.tokens)


def beside(usual: Cost, other: Cost, companion: Companion) -> Cost:
    """Return the time of both variants together: that of ``other`` where ``companion`` selects it."""
    return lambda shape: (other if companion.faster_at(shape.batch, shape.tokens) else usual)(shape)


def served(shape: Shape) -> Iterable[Shape]:
    """Return the runs into which the server divides a request, which are limited to the tokens of a CPU batch."""
    return [Shape(len(run), shape.tokens) for run in runs([shape.tokens] * shape.batch, budget=CPU_TOKENS)]


def milliseconds(cost: Cost, shape: Shape) -> float:
    """Return the time of a request of ``shape`` as the server runs it (ms)."""
    return fsum(cost(run) for run in served(shape))


def expected_speed_up(faster: Cost, slower: Cost, mix: Mix) -> float:
    """Return how many times faster ``faster`` is than ``slower`` for ``mix``: the ratio of the mean times."""
    times = [fsum(weight * milliseconds(cost, shape) for shape, weight in mix.items()) for cost in (slower, faster)]
    return times[0] / times[1]


def mean_speed_up(faster: Cost, slower: Cost, shapes: Sequence[Shape]) -> float:
    """Return how many times faster ``faster`` is than ``slower``: the geometric mean over ``shapes``."""
    logs = [log(milliseconds(slower, shape) / milliseconds(faster, shape)) for shape in shapes]
    return exp(fsum(logs) / len(logs))


def speed_up_for(mix: Mix, faster: Variant, slower: Variant) -> float:
    """Return the speed-up of two variants for ``mix``; nan if one was not measured."""
    if not faster.latency or not slower.latency:
        return float("nan")
    return expected_speed_up(cost_of(faster.latency), cost_of(slower.latency), mix)


#: The variant with which all others are compared.
REFERENCE: Final = "torch-fp32"


@dataclass(frozen=True, slots=True)
class BuiltVariant:
    """A built variant: ``path`` is its graph, None for torch, which reads the checkpoint itself.

    Two variants may share a file (OpenVINO computes one IR in fp32 or bf16). ``made_from`` is the variant that this one
    was made from; if that is refused, so is this one. A model with several networks has a graph of that name in each of
    ``folders``, relative to that of ``path``.
    """

    name: str
    engine: str
    precision: str
    path: Path | None
    made_from: str = ""
    folders: tuple[str, ...] = ("",)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the variant: the graphs and the weights beside them."""
        if self.path is None:
            return ()
        graphs = [self.path.parent / folder / self.path.name for folder in self.folders]
        beside = [file for graph in graphs for file in (graph.with_suffix(".bin"), Path(f"{graph}.data"))]
        return (*graphs, *(file for file in beside if file.exists()))

    def to_manifest(self, folder: Path) -> Variant:
        """Return the manifest entry, not judged yet, with a path relative to ``folder``."""
        path = self.path.relative_to(folder).as_posix() if self.path is not None else ""
        return Variant(self.name, self.engine, self.precision, path)


@dataclass(frozen=True, slots=True)
class FailedVariant:
    """A variant that could not be built, and the reason in one sentence."""

    name: str
    reason: str

    def to_manifest(self) -> Variant:
        """Return the manifest entry with the reason."""
        engine, _, precision = self.name.partition("-")
        return Variant(self.name, engine, precision, reasons=(self.reason,))


#: Why the reference does not serve if torch was not requested.
NOT_ASKED_FOR: Final = "reference only: torch is not among --backend"


def choose(
    manifest: Manifest, engines: frozenset[str], *, force: bool, advice: str, mix: Mix | None = None
) -> Manifest:
    """Return the manifest with ``auto``, the fastest variant on ``engines`` that may serve.

    Speed is that for the requests of ``mix``, or without it the mean over all measured shapes. ``force`` accepts
    refused variants that ran. Raises INVALID_ARG, with the reasons and the ``advice``, if there is none.
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
        raise invalid(f"no variant was accepted ({reasons}); {advice}")
    rests_on = [variant for variant in variants if variant.name in speed_ups or variant.name == REFERENCE]
    why = _why(auto, speed_ups, mix, disturbed=any(variant.busy for variant in rests_on))
    chosen = replace(manifest, variants=variants, auto=auto, choice=(why,))
    return replace(chosen, warnings=(*manifest.warnings, *busy(chosen)))


def _why(auto: str, speed_ups: Mapping[str, float], mix: Mix | None, *, disturbed: bool) -> str:
    """Return why ``auto`` was chosen, in a sentence; without figures if measurements were ``disturbed``."""
    over = f"for {', '.join(f'{shape} ({share:.0%})' for shape, share in mix.items())}" if mix else "over all shapes"
    others = sorted((name for name in speed_ups if name != auto), key=lambda name: -speed_ups[name])
    if not others:
        return f"'{auto}' is the only accepted variant"
    if disturbed:
        return f"'{auto}' was the fastest {over}, but other processes used the machine, so the factor is unknown"
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
        f"reliable, and a variant other than '{manifest.auto}' may be the fastest; convert again when it is idle"
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
