"""What a conversion has to know about a kind of model: encoders in ``encoder``, language models in ``causal``.

``run`` takes the steps in their order, and calls one of the two through this class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from conch.checkpoints.contrasts import Contrasts
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Manifest
from conch.convert.footprint import Opening
from conch.convert.layout.huggingface import checkpoint_files, write_huggingface
from conch.convert.measure import Run
from conch.convert.plan import Plan
from conch.convert.variant import BuiltVariant, FailedVariant
from conch.machine.interference import Interference
from conch.texts.shapes import Shape

Network = TypeVar("Network")
Answers = TypeVar("Answers")
Progress = Callable[[str], None]


class Conversion(ABC, Generic[Network, Answers]):
    """One conversion: what was asked for, and what differs between kinds of models.

    ``Network`` is an opened variant and ``Answers`` what it says about all samples.  ``folder`` is where variants are
    built; ``engines``, ``precisions`` and ``shapes`` are what is built and measured; ``sample_count`` texts of
    ``compared_on`` (as the log has it) are compared.
    """

    #: Whether all variants are in memory together, so that they are measured in turns, or one after another.
    in_memory_together: bool
    #: What can be done when no variant may serve.
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
        #: What the verdict cannot tell, a sentence each.
        self.warnings: list[str] = []
        #: What others took of the machine while each group of variants was measured.
        self.interference: list[Interference] = []

    def warn(self, warnings: Sequence[str]) -> None:
        """Keep warnings for the report, and print them."""
        for warning in warnings:
            self.progress(f"warning: {warning}")
        self.warnings += warnings

    @property
    @abstractmethod
    def serving_engines(self) -> frozenset[str]:
        """The engines that may become ``auto``."""

    @abstractmethod
    def contrast(self, reference: Answers, answers: Answers) -> Contrasts:
        """Single texts where the answers of a variant differ from the reference's, for people to look at."""

    @property
    def serves_by_shape(self) -> bool:
        """Whether two variants may serve together, each for the shapes with which it is faster."""
        return False

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the manifest that only this kind of model has."""
        return {}

    @abstractmethod
    def build(self) -> list[BuiltVariant | FailedVariant]:
        """Build every variant in ``folder``, the reference among them."""

    @abstractmethod
    def evaluate(self, variant: BuiltVariant) -> tuple[Network, Answers]:
        """Open a variant and run the samples through it.  What a library raises goes through."""

    @abstractmethod
    def compare(
        self, precision: str, reference: Answers, answers: Answers
    ) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
        """The figures of a variant's agreement with the reference, as the manifest has them, and why it is refused: a
        sentence for each tolerance of ``precision`` that it exceeds, nothing when it passes."""

    def compare_pair(self, first: BuiltVariant, second: BuiltVariant) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """How close the answers of two variants are, and why they must not serve together: a sentence for each bound
        that they miss.  Called where ``serves_by_shape``."""
        raise NotImplementedError

    @abstractmethod
    def opening(self, variant: BuiltVariant) -> Opening:
        """What opens a variant alone, in another process, and runs it at the largest shape."""

    def weights(self, variant: BuiltVariant) -> Sequence[Path]:
        """The files without which a variant does not run: its own, or the checkpoint's weights."""
        if variant.path is not None:
            return [file for file in variant.files if file not in variant.more]
        directory = self.checkpoint.directory
        others = checkpoint_files(self.checkpoint, weights=False)
        return [directory / name for name in checkpoint_files(self.checkpoint, weights=True) if name not in others]

    @abstractmethod
    def runs(self, networks: Mapping[str, Network], shape: Shape) -> dict[str, Run]:
        """What is measured of each network at ``shape``."""

    def write_models(
        self, target: Path, manifest: Manifest, built: Mapping[str, BuiltVariant]
    ) -> tuple[Path, dict[str, str]]:
        """Write the model directories below ``target``: the one that gets the manifest, and the path of each variant's
        file in its version by the variant's name.  Files of variants are moved."""
        model = target / self.plan.served_name
        usable = [built[variant.name] for variant in manifest.variants if variant.usable]
        write_huggingface(model, self.checkpoint, usable, self.folder, self.plan.parameters)
        return model, {variant.name: variant.to_manifest(self.folder).path for variant in usable}
