"""From variants that were judged to the manifest: what was done, with what, and which variant serves.

Used by both kinds of conversion, of encoders and of language models.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any, Final

from conch import __version__
from conch.backends.native.threads import usable_cores
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Manifest, Source, Variant, hashes
from conch.convert import verdict
from conch.convert.encoder.agreement import SEED
from conch.convert.layout import checkpoint_files
from conch.convert.measure import Shape, speed_up
from conch.convert.plan import Plan
from conch.errors import invalid

#: The variant that all others are compared with.
REFERENCE: Final = "torch-fp32"
_LIBRARIES: Final = (
    "torch", "transformers", "tokenizers", "onnx", "onnxruntime", "openvino", "openvino-genai", "nncf"
)  # fmt: skip


def manifest_of(
    plan: Plan,
    checkpoint: Checkpoint,
    found: Sequence[Variant],
    *,
    engines: Sequence[str],
    precisions: Sequence[str],
    shapes: Sequence[Shape],
    samples: int,
    **more: Any,
) -> Manifest:
    """What is known before a variant is chosen; ``more`` are further settings."""
    names = [str(name) for name in checkpoint_files(checkpoint, weights=True)]
    settings = {
        "backends": list(engines),
        "quantize": list(precisions),
        "batch_sizes": sorted({shape.batch for shape in shapes}),
        "sequence_lengths": sorted({shape.tokens for shape in shapes}),
        "data": str(plan.data) if plan.data is not None else "built-in",
        "samples": samples,
        "seed": SEED,
        "threads": plan.threads or usable_cores(),
        "device": "cpu",
        **more,
    }
    return Manifest(
        source=Source(plan.model, checkpoint.revision, hashes(checkpoint.directory, names)),
        task=checkpoint.task,
        variants=tuple(found),
        auto="",
        files={},
        conch=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"python": python_version(), **_versions()},
        settings=settings,
    )


def choose(
    plan: Plan, manifest: Manifest, engines: frozenset[str], *, otherwise: str = "--force accepts those that ran"
) -> Manifest:
    """The manifest with the fastest variant on ``engines`` that may serve; INVALID_ARG when there is none, with
    ``otherwise`` for what can be done then."""
    reference = next(one for one in manifest.variants if one.name == REFERENCE)
    chosen = [_forced(plan, one) for one in manifest.variants]
    factors = {
        one.name: speed_up(one.latency, reference.latency) for one in chosen if one.usable and one.engine in engines
    }
    auto = verdict.choose(factors)
    if not auto:
        reasons = "; ".join(f"{one.name}: {one.reasons[0]}" for one in chosen if one.reasons)
        raise invalid(f"no variant may serve ({reasons}); {otherwise}")
    return replace(manifest, variants=tuple(chosen), auto=auto)


def failed(name: str, reason: str) -> Variant:
    """A variant that there is not."""
    engine, _, precision = name.partition("-")
    return Variant(name, engine, precision, reasons=(reason,))


def _forced(plan: Plan, one: Variant) -> Variant:
    forced = plan.force and not one.passed and bool(one.latency) and one.reasons != (verdict.NOT_ASKED_FOR,)
    return replace(one, forced=True) if forced else one


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
