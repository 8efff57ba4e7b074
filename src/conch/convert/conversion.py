"""The interface of a conversion for a kind of model: encoders in ``encoder``, language models in ``causal``.

``run`` executes the steps in order and calls one of the two implementations through this class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np

from conch.backends.base.arrays import Array
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Contrast, Contrasts, Manifest
from conch.convert.footprint import Opening
from conch.convert.layout import checkpoint_files, write_huggingface
from conch.convert.measure import Run
from conch.convert.plan import Plan
from conch.convert.verdict import BuiltVariant, FailedVariant
from conch.machine.processes import Interference
from conch.measure.texts.shapes import Shape

Network = TypeVar("Network")
Outputs = TypeVar("Outputs")
Progress = Callable[[str], None]


class Conversion(ABC, Generic[Network, Outputs]):
    """One conversion: its plan, and the steps that differ between kinds of models.

    ``Network`` is an opened variant and ``Outputs`` its outputs for all samples. Variants are built in ``folder``.
    ``engines``, ``precisions`` and ``shapes`` are built and measured. ``sample_count`` texts are compared;
    ``compared_on`` describes them in the log.
    """

    #: Whether all variants are in memory at once and measured alternately, or one after another.
    in_memory_together: bool
    #: Advice if no variant may serve.
    advice: str = "--force accepts those that ran"

    engines: Sequence[str]
    precisions: Sequence[str]
    shapes: Sequence[Shape]
    sample_count: int
    compared_on: str

    def __init__(self, plan: Plan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
        self.plan = plan
        self.checkpoint = checkpoint
        self.folder = folder
        self.progress = progress
        #: Limits of the verdict, one sentence each.
        self.warnings: list[str] = []
        #: Interference by other processes while each group of variants was measured.
        self.interference: list[Interference] = []

    def warn(self, warnings: Sequence[str]) -> None:
        """Print warnings and keep them for the report."""
        for warning in warnings:
            self.progress(f"warning: {warning}")
        self.warnings += warnings

    @property
    @abstractmethod
    def serving_engines(self) -> frozenset[str]:
        """The engines that may become ``auto``."""

    @abstractmethod
    def contrast(self, reference: Outputs, actual: Outputs) -> Contrasts:
        """Return single texts for which a variant's outputs differ from the reference's, for the report."""

    @property
    def serves_by_shape(self) -> bool:
        """Whether two variants may serve together, each for the shapes at which it is faster."""
        return False

    @property
    def settings(self) -> dict[str, Any]:
        """Manifest settings specific to this kind of model."""
        return {}

    @abstractmethod
    def build(self) -> list[BuiltVariant | FailedVariant]:
        """Build all variants in ``folder``, including the reference."""

    @abstractmethod
    def evaluate(self, variant: BuiltVariant) -> tuple[Network, Outputs]:
        """Open a variant and run the samples through it. Exceptions of libraries are not caught."""

    @abstractmethod
    def compare(
        self, precision: str, reference: Outputs, actual: Outputs
    ) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
        """Compare a variant with the reference.

        Returns the figures of agreement, as in the manifest, and the reasons to refuse the variant: one sentence for
        each exceeded tolerance of ``precision``, none if it passes.
        """

    def compare_pair(self, first: BuiltVariant, second: BuiltVariant) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Compare the outputs of two variants that may serve together.

        Returns figures, and the reasons why they must not, one sentence per missed bound. Called if
        ``serves_by_shape``.
        """
        raise NotImplementedError

    @abstractmethod
    def opening(self, variant: BuiltVariant) -> Opening:
        """Return a function that opens a variant in another process and runs it at the largest shape."""

    def weights(self, variant: BuiltVariant) -> Sequence[Path]:
        """Return the files that a variant needs to run: its own, or the checkpoint's weights."""
        if variant.path is not None:
            return variant.files
        directory = self.checkpoint.directory
        others = checkpoint_files(self.checkpoint, weights=False)
        return [directory / name for name in checkpoint_files(self.checkpoint, weights=True) if name not in others]

    @abstractmethod
    def runs(self, networks: Mapping[str, Network], shape: Shape) -> dict[str, Run]:
        """Return the run to measure for each network at ``shape``."""

    def write_models(
        self, target: Path, manifest: Manifest, built: Mapping[str, BuiltVariant]
    ) -> tuple[Path, dict[str, str]]:
        """Write the model directories below ``target``; files of variants are moved.

        Returns the model directory for the manifest, and the path of each variant's file in its version, by variant
        name.
        """
        model = target / self.plan.served_name
        usable = [built[variant.name] for variant in manifest.variants if variant.usable]
        write_huggingface(model, self.checkpoint, usable, self.folder, self.plan.parameters)
        return model, {variant.name: variant.to_manifest(self.folder).path for variant in usable}


#: The maximum numbers of sampled differences and of texts shown.
MOST_DIFFERENCES: Final = 200
WORST: Final = 10
#: The maximum length of a text shown (characters).
MOST_CHARACTERS: Final = 240


def kept(measure: str, differences: Array, by_text: Sequence[float], describe: Callable[[int], Contrast]) -> Contrasts:
    """Return the contrasts for a report.

    ``differences`` are of texts or of tokens, ``by_text`` of texts. ``describe`` formats a text by index; texts
    without a difference are omitted.
    """
    order = sorted(range(len(by_text)), key=lambda index: -by_text[index])
    worst = tuple(describe(index) for index in order[:WORST] if by_text[index] > 0)
    return Contrasts(measure, sampled(differences), worst)


def sampled(differences: Array) -> tuple[float, ...]:
    """Return at most ``MOST_DIFFERENCES`` differences at even ranks, including the smallest and the largest."""
    values = np.sort(differences[np.isfinite(differences)].astype(np.float64))
    if len(values) > MOST_DIFFERENCES:
        values = values[np.linspace(0, len(values) - 1, MOST_DIFFERENCES).round().astype(np.int64)]
    return tuple(float(f"{value:.4g}") for value in values)


def shortened(text: str, max_characters: int = MOST_CHARACTERS) -> str:
    """Put a text on one line and truncate it, after a word if possible."""
    line = " ".join(text.split())
    if len(line) <= max_characters:
        return line
    words, _, cut = line[: max_characters - 1].rpartition(" ")
    return f"{words or cut} …"
