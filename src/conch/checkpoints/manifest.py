"""``conch.json``: where a converted model comes from, its variants with their figures, and the hashes of its files.

``conch convert`` writes it; the backend reads and verifies it whenever the model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Final

from conch.checkpoints.by_shape import Companion, Gain
from conch.checkpoints.contrasts import Contrasts
from conch.config.reading import open_regular, read_json
from conch.errors import ConchError, invalid

FILENAME: Final = "conch.json"
FORMAT: Final = 1
_PREFIX: Final = "sha256:"
#: The checkpoint's own weights, which engine torch runs.
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json", "pytorch_model*.index.json")


@dataclass(frozen=True, slots=True)
class Latency:
    """How long one run of the model takes (ms), for ``batch`` sequences of ``tokens`` tokens each.

    ``runs`` were measured; ``spread`` is how far their quartiles are apart, as a share of the median; ``busy`` says
    that the machine had other things to do meanwhile.
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
    """One form of a converted model: an engine with a precision.

    ``precision`` is ``fp32``, ``fp16``, ``bf16`` or ``int8``; ``path`` its file in the folder, empty for the
    checkpoint itself.  ``agreement`` holds the figures of each output, and of the task under ``task``; ``reasons``
    say by number why it did not pass.  ``disk_bytes`` are those of its files, ``memory_bytes`` what is resident of a
    process that runs nothing else (0: not measured).  ``contrasts`` show single texts where it differs.  ``kept`` says
    that its files are in the folder: without them it has figures, but no path, and does not serve.
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
        """Whether any of its latencies was measured on a machine that was busy."""
        return any(latency.busy for latency in self.latency)

    @property
    def usable(self) -> bool:
        """Whether it may serve: it agreed with the original, or the user insisted (``--force``), and is there."""
        return self.kept and (self.passed or self.forced)

    def files(self, names: Iterable[str]) -> set[str]:
        """Its own files among ``names``: a folder, a graph with the weights beside it, or the checkpoint's weights."""
        graph = PurePosixPath(self.path)
        if not self.path and self.engine != "torch":
            return set()
        if not self.path:
            return {name for name in names if "/" not in name and any(fnmatch(name, of) for of in _WEIGHTS)}
        if graph.parent.name:
            return {name for name in names if name.startswith(f"{graph.parent}/")}
        own = {self.path, f"{graph.stem}.bin", f"{self.path}.data"}
        return own.intersection(names)


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint that was converted: as it was named, its revision, and the hashes of its files."""

    model: str
    revision: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a ``conch.json``.  ``auto`` names the variant that serves; ``created`` is UTC in ISO 8601.

    ``by_shape`` is the variant that is held beside ``auto`` for the batches with which it is faster; ``choice`` says
    why these were chosen, a sentence each.  ``machine`` is what was measured on and how busy it was, ``warnings`` say
    what the verdict cannot tell.
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
        """The manifest of a folder, None where there is none.  Raises INVALID_ARG for one that cannot be understood."""
        path = folder / FILENAME
        try:
            document = read_json(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise invalid(f"{path} cannot be read: {error}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            found = document.get("format") if isinstance(document, dict) else None
            raise invalid(f"{path} has format {found}; this version of conch reads format {FORMAT}")
        try:
            manifest = cls.from_json(document)
            for name in (*manifest.files, *(variant.path for variant in manifest.variants if variant.path)):
                check_name(name)
            manifest._check_references()
        except ConchError as error:
            raise invalid(f"{path}: {error.message}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise invalid(f"{path} is not a manifest: {type(error).__name__}: {error}") from None
        return manifest

    def _check_references(self) -> None:
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise invalid(f"two variants have the same name ({', '.join(names)})")
        if self.auto and self.auto not in names:
            raise invalid(f"'auto' names the variant '{self.auto}', which is not there")
        if self.by_shape is not None and self.by_shape.variant not in names:
            raise invalid(f"'by_shape' names the variant '{self.by_shape.variant}', which is not there")
        for variant in self.variants:
            if variant.path and variant.path not in self.files:
                raise invalid(f"variant '{variant.name}' uses '{variant.path}', which has no hash")

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Manifest:
        """A manifest from its JSON; unknown keys are left out.  Raises what Python raises for a wrong shape."""
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
        """The manifest as JSON-ready values, in the order of the format."""
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
        """The content of the file."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"

    def write(self, folder: Path) -> None:
        """Write the manifest into ``folder``, whole or not at all."""
        aside = folder / f".{FILENAME}.{os.getpid()}"
        try:
            aside.write_text(self.to_text(), encoding="utf-8")
            aside.replace(folder / FILENAME)
        finally:
            aside.unlink(missing_ok=True)

    def verify(self, folder: Path) -> None:
        """Hash every file listed.  Raises INVALID_ARG, naming the first that is missing or not as it was written."""
        # Hashing leaves Python, so that threads share the cores.
        with ThreadPoolExecutor(max_workers=4) as pool:
            for name, found in zip(self.files, pool.map(lambda name: _hash(folder, name), self.files), strict=True):
                if found is None:
                    raise invalid(f"{folder / name} is missing, which {FILENAME} lists; convert the model again")
                if found != self.files[name]:
                    raise invalid(
                        f"{folder / name} is not the file that was converted: its hash is {found[:19]}…, "
                        f"{FILENAME} says {self.files[name][:19]}…; convert the model again"
                    )

    def keeping(self, names: Collection[str]) -> Manifest:
        """The manifest of a folder with the variants ``names`` and without the files of all others, whose figures
        stay."""
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
        """The variant of that name.  Raises INVALID_ARG when there is none or it was refused and not forced."""
        variant = next((one for one in self.variants if one.name == name), None)
        if variant is None:
            known = ", ".join(one.name for one in self.variants if one.usable)
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
        """The variant named; else ``auto``'s; with an engine, the fastest of its usable ones.

        Raises INVALID_ARG when there is none, or when what is asked for contradicts itself.
        """
        if name:
            variant = self.variant(name)
            if engine not in ("auto", variant.engine):
                raise invalid(f"variant '{name}' runs on engine '{variant.engine}', not on '{engine}'")
            return variant
        if engine == "auto":
            if not self.auto:
                known = ", ".join(one.name for one in self.variants)
                raise invalid(f"{FILENAME} chooses no variant; set parameter 'variant' to one of {known}")
            return self.variant(self.auto)
        usable = [one for one in self.variants if one.engine == engine and one.usable]
        if not usable:
            raise invalid(
                f"the model was converted without a usable variant for engine '{engine}'; "
                f"there are {', '.join(one.name for one in self.variants if one.usable) or 'none'}"
            )
        return next((one for one in usable if one.name == self.auto), None) or min(usable, key=_slowness)


def hashes(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """``sha256:…`` of files of ``folder`` by name; without ``names``, of every file in it but ``conch.json``.

    Names are relative, with ``/`` between parts, in order.  Raises INVALID_ARG for one that leads out or is missing.
    """
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    found = {}
    for name in sorted(set(names) - {FILENAME}):
        check_name(name)
        digest = _hash(folder, name)
        if digest is None:
            raise invalid(f"{folder / name} is missing")
        found[name] = digest
    return found


def check_name(name: str) -> None:
    """Raise INVALID_ARG unless ``name``, joined to a folder, stays inside it.

    Only the name is looked at: in the Hub's cache every file is a link to somewhere else.
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
    """The sum of the mean latencies of all measured shapes (ms); infinite without any."""
    return sum(one.mean_ms for one in variant.latency) if variant.latency else float("inf")


def _variant(document: Mapping[str, Any]) -> Variant:
    values = _known(Variant, document)
    values["latency"] = tuple(Latency(**_known(Latency, one)) for one in document.get("latency", ()))
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
    names = {one.name for one in fields(of)}
    return {name: value for name, value in document.items() if name in names}
