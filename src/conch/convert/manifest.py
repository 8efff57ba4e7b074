"""The manifest of a conversion: what was done, with what, and what came out."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any, Final

from conch import __version__
from conch.backends.native.threads import usable_cores
from conch.checkpoints.manifest import Manifest, Source, Variant, hashes
from conch.convert.conversion import Conversion
from conch.convert.layout.huggingface import checkpoint_files
from conch.convert.statistics import SEED

_LIBRARIES: Final = (
    "torch", "transformers", "tokenizers", "onnx", "onnxruntime", "openvino", "openvino-genai", "nncf"
)  # fmt: skip


def manifest_of(conversion: Conversion[Any, Any], variants: Sequence[Variant], machine: Mapping[str, Any]) -> Manifest:
    """All that is known before a variant is chosen and the files are written."""
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
