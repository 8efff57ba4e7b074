"""``conch.json``, the manifest of a converted model: its source, variants with measurements, and file hashes.

``conch convert`` writes it; the backend reads and verifies it when the model is loaded. ``by_shape`` selects between
two variants by the shape of a batch: the backend loads both and runs the faster one for each shape.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatch
from functools import cached_property
from math import exp, log
from pathlib import Path, PurePosixPath
from typing import Any, Final

from conch.config.reading import open_regular, read_json
from conch.core.errors import ConchError, error_text, invalid, why_unreadable
from conch.core.lengths import on_grid

#: The minimum gain for which the other variant runs; smaller gains are within the variation of measurements.
LEAST_GAIN: Final = 1.05


@dataclass(frozen=True, slots=True)
class Gain:
    """The speedup of a variant over ``auto`` for ``batch`` sequences of ``tokens`` tokens each.

    It is 1 if the difference is within the variation of the measurements.
    """

    batch: int
    tokens: int
    gain: float


@dataclass(frozen=True)
class Companion:
    """The variant that is loaded in addition to ``auto`` and runs the shapes for which it is faster.

    ``gains`` has a gain for each combination of measured batch size and length. ``overall`` is the speedup of both
    variants together over ``auto`` alone. ``memory_bytes`` is the resident memory of a process with both (0: not
    measured). ``agreement`` compares the outputs of the two variants: ``cosine_min`` and ``argmax``, None if not
    meaningful. Raises ValueError if ``gains`` is not a complete table.
    """

    variant: str
    gains: tuple[Gain, ...]
    overall: float = 1.0
    memory_bytes: int = 0
    agreement: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._table.at(1, 1)

    def faster_at(self, rows: int, tokens: int) -> bool:
        """Whether this variant is the faster one for ``rows`` sequences of ``tokens`` tokens.

        Rounds the shape up to the padding grid, so that the choice does not depend on whether an engine pads.
        """
        return self._table.at(*on_grid(rows, tokens)) >= LEAST_GAIN

    @cached_property
    def _table(self) -> ShapeTable:
        return ShapeTable({(gain.batch, gain.tokens): gain.gain for gain in self.gains})


class ShapeTable:
    """A table of positive numbers by batch size and tokens, with interpolation.

    Raises ValueError unless each combination of batch size and length has a number, and all sizes are at least 1.
    """

    def __init__(self, values: Mapping[tuple[int, int], float]) -> None:
        if min((side for shape in values for side in shape), default=1) < 1:
            raise ValueError("a table by shape needs a number for each batch size and length, each at least 1")
        self._logs = {shape: log(value) for shape, value in values.items()}
        self._batches = sorted({batch for batch, _ in values})
        self._lengths = sorted({tokens for _, tokens in values})
        if not values or len(values) != len(self._batches) * len(self._lengths):
            raise ValueError("a table by shape needs a number for each batch size with each length")

    def at(self, rows: int, tokens: int) -> float:
        """Return the number at a shape: interpolated on logarithmic scales, or the nearest number outside the table."""
        (top, bottom, down), (left, right, across) = _between(self._batches, rows), _between(self._lengths, tokens)
        above, below = (
            self._logs[batch, left] * (1 - across) + self._logs[batch, right] * across for batch in (top, bottom)
        )
        return exp(above * (1 - down) + below * down)


def _between(measured: Sequence[int], value: int) -> tuple[int, int, float]:
    """Return the two measured values around ``value``, and its relative position between them from 0 to 1."""
    above = bisect_right(measured, value)
    if above == 0 or above == len(measured):
        nearest = measured[max(0, above - 1)]
        return nearest, nearest, 0.0
    low, high = measured[above - 1], measured[above]
    return low, high, log(value / low) / log(high / low)


@dataclass(frozen=True, slots=True)
class Contrast:
    """A text with descriptions of the checkpoint's and the variant's output.

    ``cosine`` is the similarity of the two outputs, None if not meaningful.
    """

    text: str
    reference: str
    variant: str
    difference: float
    cosine: float | None = None


@dataclass(frozen=True, slots=True)
class Contrasts:
    """The differences of a variant.

    ``differences`` is a sorted sample of a few hundred values, of texts or tokens, with the original distribution;
    ``measure`` describes them. ``worst`` has the texts with the largest differences, the worst first.
    """

    measure: str
    differences: tuple[float, ...]
    worst: tuple[Contrast, ...]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Contrasts:
        """Parse the contrasts of a manifest. Raises built-in exceptions for an invalid structure."""
        worst = tuple(
            Contrast(
                str(entry["text"]), str(entry["reference"]), str(entry["variant"]), float(entry["difference"]),
                None if entry.get("cosine") is None else float(entry["cosine"]),
            )
            for entry in document["worst"]
        )  # fmt: skip
        return cls(str(document["measure"]), tuple(map(float, document["differences"])), worst)


FILENAME: Final = "conch.json"
FORMAT: Final = 1
_PREFIX: Final = "sha256:"
#: The checkpoint's own weights, for engine torch.
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json", "pytorch_model*.index.json")


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of one run of the model in milliseconds, for ``batch`` sequences of ``tokens`` tokens each.

    ``runs`` is the number of measured runs; ``spread`` is their interquartile range divided by the median; ``busy`` is
    true if there was interference on the machine.
    """

    batch: int
    tokens: int
    mean_ms: float
    sd_ms: float
    min_ms: float
    max_ms: float
    median_ms: float
    p95_ms: float
    p99_ms: float
    runs: int = 0
    spread: float = 0.0
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a converted model: an engine with a precision.

    ``precision`` is ``fp32``, ``fp16``, ``bf16`` or ``int8``; ``path`` is its file in the folder, or in the folder of
    each network of the model, empty for the checkpoint itself. ``agreement`` has the figures of the parity check by
    output, and those of the task under ``task`` (of embedding models also ``recall``); ``reasons`` explains, with
    figures, why the check failed. ``disk_bytes`` is the size of its files;
    ``memory_bytes`` is the resident memory of a process that runs only this variant (0: not measured). ``contrasts``
    has texts for which outputs differ. ``kept`` is true if its files are in the folder; a variant without files keeps
    its figures but has no path and cannot serve.
    """

    name: str
    engine: str
    precision: str
    path: str = ""
    latency: tuple[Latency, ...] = ()
    agreement: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    passed: bool = False
    reasons: tuple[str, ...] = ()
    forced: bool = False
    disk_bytes: int = 0
    memory_bytes: int = 0
    contrasts: Contrasts | None = None
    kept: bool = True

    @property
    def busy(self) -> bool:
        """Whether a latency was measured on a busy machine."""
        return any(latency.busy for latency in self.latency)

    @property
    def usable(self) -> bool:
        """Whether the variant may serve: it has files, and it passed the parity check or was forced (``--force``)."""
        return self.kept and (self.passed or self.forced)

    def files(self, names: Iterable[str]) -> set[str]:
        """Return the variant's files among ``names``: a folder, graphs with weights, or the checkpoint's weights."""
        graph = PurePosixPath(self.path)
        if not self.path and self.engine != "torch":
            return set()
        if not self.path:
            return {name for name in names if "/" not in name and any(fnmatch(name, of) for of in _WEIGHTS)}
        if graph.parent.name:
            return {name for name in names if name.startswith(f"{graph.parent}/")}
        own = {self.path, f"{graph.stem}.bin", f"{self.path}.data"}
        return {name for name in names if PurePosixPath(name).name in own}


@dataclass(frozen=True, slots=True)
class Source:
    """The converted checkpoint: the name that the user gave, its revision, and the hashes of its files."""

    model: str
    revision: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a ``conch.json``. ``auto`` names the variant that serves; ``created`` is UTC in ISO 8601.

    ``by_shape`` is a second variant for the shapes where it is faster than ``auto``; ``choice`` explains the choice of
    ``auto`` in sentences. ``machine`` describes the machine of the measurements and its load; ``warnings`` are the
    limits of the verdict.
    """

    source: Source
    task: str
    variants: tuple[Variant, ...]
    auto: str
    files: Mapping[str, str]
    conch: str = ""
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    by_shape: Companion | None = None
    choice: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a folder; returns None without one. Raises INVALID_ARG for an invalid manifest."""
        path = folder / FILENAME
        try:
            document = read_json(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise invalid(f"{path} cannot be read: {why_unreadable(error)}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            version = document.get("format") if isinstance(document, dict) else None
            raise invalid(f"{path} has format {version}; this version of conch reads format {FORMAT}")
        try:
            manifest = cls.from_json(document)
            for name in (*manifest.files, *(variant.path for variant in manifest.variants if variant.path)):
                check_name(name)
            manifest._check_references()
        except ConchError as error:
            raise invalid(f"{path}: {error.message}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise invalid(f"{path} is not a manifest: {error_text(error)}") from None
        return manifest

    def _check_references(self) -> None:
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise invalid(f"two variants have the same name ({', '.join(names)})")
        if self.auto and self.auto not in names:
            raise invalid(f"'auto' names the variant '{self.auto}', which does not exist")
        if self.by_shape is not None and self.by_shape.variant not in names:
            raise invalid(f"'by_shape' names the variant '{self.by_shape.variant}', which does not exist")
        for variant in self.variants:
            if variant.path and not variant.files(self.files):
                raise invalid(f"variant '{variant.name}' uses '{variant.path}', which has no hash")

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Manifest:
        """Parse a manifest from JSON; ignores unknown keys. Raises built-in exceptions for an invalid structure."""
        values = _known(cls, document)
        _check_texts("manifest", values, "task", "auto")
        values["source"] = Source(**_known(Source, document["source"]))
        values["variants"] = tuple(_variant(variant) for variant in document["variants"])
        for name in ("warnings", "choice"):
            values[name] = tuple(map(str, document.get(name, ())))
        values["by_shape"] = _companion(document.get("by_shape"))
        values["files"] = {str(name): str(digest) for name, digest in document["files"].items()}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values, in the order of the format."""
        values = asdict(self)
        order = (
            "conch",
            "created",
            "source",
            "task",
            "versions",
            "settings",
            "machine",
            "warnings",
            "variants",
            "auto",
            "by_shape",
            "choice",
            "files",
        )
        return {"format": FORMAT, **{name: values[name] for name in order}}

    def to_text(self) -> str:
        """Return the content of the file."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"

    def write(self, folder: Path) -> None:
        """Write the manifest to ``folder`` atomically."""
        aside = folder / f".{FILENAME}.{os.getpid()}"
        try:
            aside.write_text(self.to_text(), encoding="utf-8")
            aside.replace(folder / FILENAME)
        finally:
            aside.unlink(missing_ok=True)

    def verify(self, folder: Path) -> None:
        """Verify the hashes of all listed files. Raises INVALID_ARG, naming the first missing or modified file."""
        # Hashing releases the interpreter lock, so threads run in parallel.
        with ThreadPoolExecutor(max_workers=4) as pool:
            for name, digest in zip(self.files, pool.map(lambda name: _hash(folder, name), self.files), strict=True):
                if digest is None:
                    raise invalid(f"{folder / name} is missing, which {FILENAME} lists; convert the model again")
                if digest != self.files[name]:
                    raise invalid(
                        f"{folder / name} is not the file that was converted: its hash is {digest[:19]}…, "
                        f"but {FILENAME} has {self.files[name][:19]}…; convert the model again"
                    )

    def keeping(self, names: Collection[str]) -> Manifest:
        """Return the manifest for a folder that has only the files of the variants ``names``.

        Other variants keep their figures.
        """
        kept = [variant for variant in self.variants if variant.name in names]
        needed = {file for variant in kept for file in variant.files(self.files)}
        others = {file for variant in self.variants if variant not in kept for file in variant.files(self.files)}
        variants = tuple(
            variant if variant in kept else replace(variant, kept=False, path="", contrasts=None)
            for variant in self.variants
        )
        files = {name: digest for name, digest in self.files.items() if name in needed or name not in others}
        return replace(self, variants=variants, files=files)

    def variant(self, name: str) -> Variant:
        """Return a variant by name. Raises INVALID_ARG if it does not exist, has no files, or is not usable."""
        variant = next((variant for variant in self.variants if variant.name == name), None)
        if variant is None:
            known = ", ".join(variant.name for variant in self.variants if variant.usable)
            raise invalid(f"there is no variant '{name}'; usable: {known or 'none'}")
        if not variant.kept:
            raise invalid(
                f"the files of variant '{name}' were left out: convert the model again with --keep all, or serve the"
                " repository that it was deployed from"
            )
        if not variant.usable:
            reasons = "; ".join(variant.reasons) or "no figures"
            raise invalid(
                f"variant '{name}' was refused when the model was converted ({reasons}); "
                "choose another one, or convert the model with --force"
            )
        return variant

    def select(self, name: str = "", engine: str = "auto") -> Variant:
        """Select a variant: ``name`` if given, else ``auto`` or, for a given engine, its fastest usable variant.

        For an engine, ``auto`` takes precedence if it is one of its variants. Raises INVALID_ARG if there is no such
        variant, or if ``name`` runs on another engine.
        """
        if name:
            variant = self.variant(name)
            if engine not in ("auto", variant.engine):
                raise invalid(f"variant '{name}' runs on engine '{variant.engine}', not on '{engine}'")
            return variant
        if engine == "auto":
            if not self.auto:
                known = ", ".join(variant.name for variant in self.variants)
                raise invalid(f"{FILENAME} chooses no variant; set parameter 'variant' to one of {known}")
            return self.variant(self.auto)
        usable = [variant for variant in self.variants if variant.engine == engine and variant.usable]
        if not usable:
            raise invalid(
                f"the model was converted without a usable variant for engine '{engine}'; "
                f"there are {', '.join(variant.name for variant in self.variants if variant.usable) or 'none'}"
            )
        return next((variant for variant in usable if variant.name == self.auto), None) or min(usable, key=_slowness)


def hashes(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Return the hashes (``sha256:…``) of files in ``folder`` by name; by default of all files except ``conch.json``.

    Names are relative with ``/`` as separator, and sorted. Raises INVALID_ARG for a file that is missing or outside the
    folder.
    """
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    digests = {}
    for name in sorted(set(names) - {FILENAME}):
        check_name(name)
        digest = _hash(folder, name)
        if digest is None:
            raise invalid(f"{folder / name} is missing")
        digests[name] = digest
    return digests


def check_name(name: str) -> None:
    """Raise INVALID_ARG unless ``name``, joined to a folder, stays inside it.

    Checks only the name and follows no links, because all files in the Hub's cache are links to another folder.
    """
    path = PurePosixPath(name)
    plain = name and not any(mark in name for mark in "\\\0:") and path.as_posix() == name and name != "."
    if not plain or path.is_absolute() or ".." in path.parts:
        raise invalid(f"file name {json.dumps(name)} leads out of the folder or is not a plain name")


def _hash(folder: Path, name: str) -> str | None:
    try:
        with open_regular(folder / name) as file:
            return _PREFIX + hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _slowness(variant: Variant) -> float:
    """Return the sum of the mean latencies of all measured shapes in milliseconds; infinite without measurements."""
    return sum(latency.mean_ms for latency in variant.latency) if variant.latency else float("inf")


def _variant(document: Mapping[str, Any]) -> Variant:
    values = _known(Variant, document)
    values["latency"] = tuple(Latency(**_known(Latency, latency)) for latency in document.get("latency", ()))
    values["reasons"] = tuple(map(str, document.get("reasons", ())))
    contrasts = document.get("contrasts")
    values["contrasts"] = None if contrasts is None else Contrasts.from_json(contrasts)
    _check_texts("variant", values, "name", "engine", "precision", "path")
    return Variant(**values)


def _companion(document: Mapping[str, Any] | None) -> Companion | None:
    if document is None:
        return None
    gains = tuple(Gain(**_known(Gain, gain)) for gain in document["gains"])
    return Companion(**{**_known(Companion, document), "gains": gains})


def _check_texts(of: str, values: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(values.get(name, ""), str):
            raise TypeError(f"{of}'s {name} must be a text")


def _known(of: type[Any], document: Mapping[str, Any]) -> dict[str, Any]:
    names = {declared.name for declared in fields(of)}
    return {name: value for name, value in document.items() if name in names}
