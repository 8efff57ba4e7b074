"""A built variant before its verdict; afterwards it is a ``Variant`` of the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conch.checkpoints.manifest import Variant

#: The variant with which all others are compared.
REFERENCE: Final = "torch-fp32"


@dataclass(frozen=True, slots=True)
class BuiltVariant:
    """A built variant: ``path`` is its graph, None for torch, which reads the checkpoint itself.

    Two variants may share a file (OpenVINO computes one IR in fp32 or bf16).  ``more`` are further files besides the
    graph and its weights.  ``made_from`` is the variant that this one was made from; if that is refused, so is this
    one.
    """

    name: str
    engine: str
    precision: str
    path: Path | None
    more: tuple[Path, ...] = ()
    made_from: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the variant: the graph, the weights beside it, and ``more``."""
        if self.path is None:
            return self.more
        beside = (self.path.with_suffix(".bin"), self.path.with_name(self.path.name + ".data"))
        return (self.path, *(file for file in beside if file.exists()), *self.more)

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
