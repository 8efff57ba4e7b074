"""The facts that ``conch doctor`` reports, as they go into its JSON; each section is made by a module of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackageFact:
    """An optional package; ``version`` is empty where it is not installed.

    ``install`` is the command for one that is not there or too old, empty for any other; ``detail`` says what torch was
    built for (``CUDA 12.8``, ``CPU``), or that the version is too old.
    """

    name: str
    version: str
    purpose: str
    install: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GpuFact:
    """A GPU; ``memory`` in bytes."""

    name: str
    memory: int
    driver: str


@dataclass(frozen=True, slots=True)
class GpusFact:
    """The GPUs, which tool told of them, and in words why there are none."""

    found: tuple[GpuFact, ...]
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ProcessorFact:
    """The processor: ``cores`` of the machine, ``usable`` ones of this process, whether ``features`` are there."""

    name: str
    maker: str
    cores: int
    usable: int
    features: dict[str, bool]


@dataclass(frozen=True, slots=True)
class MemoryFact:
    """Memory in bytes; ``limit`` is the control group's, 0 without one.  ``memfd`` is how tensors are shared."""

    total: int
    available: int
    limit: int
    shm_total: int
    shm_free: int
    memfd: bool


@dataclass(frozen=True, slots=True)
class LimitsFact:
    """Limits of the process, soft and hard; -1 is unlimited.  ``memlock`` in bytes."""

    nofile: tuple[int, int]
    memlock: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PortFact:
    """A port of the server by default; ``taken_by`` is empty where it is free."""

    service: str
    port: int
    taken_by: str = ""


@dataclass(frozen=True, slots=True)
class CacheFact:
    """The Hugging Face Hub's cache: sizes and free space in bytes; ``offline`` is ``HF_HUB_OFFLINE``."""

    path: str
    models: int
    size: int
    free: int
    offline: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was found out."""

    conch: str
    protocol: str
    python: str
    platform: str
    uvloop: bool
    packages: tuple[PackageFact, ...]
    gpus: GpusFact
    processor: ProcessorFact
    memory: MemoryFact
    limits: LimitsFact
    ports: tuple[PortFact, ...]
    cache: CacheFact

    def package(self, name: str) -> PackageFact:
        """The package of this name.  Raises KeyError for another."""
        return {package.name: package for package in self.packages}[name]
