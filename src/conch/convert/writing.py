"""The result of a conversion as files: model directories, manifest and reports, in a folder that nobody loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Manifest, Variant, hashes
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.convert.encoder.variants import Candidate
from conch.convert.layout import Trio, checkpoint_files, copy, huggingface_config
from conch.convert.plan import Plan
from conch.convert.report import document

#: Told of a graph that was edited, and what it was made from; raises when it says something else.
Prove = Callable[[Path, Candidate], None]

#: Where variants are measured, and so where their verdict holds.
_KIND = "KIND_CPU"


def write(
    made: Path,
    plan: Plan,
    checkpoint: Checkpoint,
    manifest: Manifest,
    candidates: Mapping[str, Candidate],
    prove: Prove,
) -> Manifest:
    """Write the plan's model directories into ``made``; returns the manifest with the paths and hashes of files there.

    Files of candidates, which are below the folder ``built`` beside it, are moved.  Raises UNSUPPORTED for a network
    that the layout has no place for.
    """
    made.mkdir()
    if plan.layout == "triton":
        trio = Trio(plan.served_name, checkpoint.task)
        lower = bool((checkpoint.json("sentence_bert_config.json") or {}).get("do_lower_case"))
        pad_id = open_tokenizer(checkpoint).special.pad_id or 0
        trio.write(made, checkpoint, candidates[manifest.auto].files, _KIND, pad_id, lower)
        model = made / trio.model
        prove(model / "1" / "model.onnx", candidates[manifest.auto])
    else:
        model = made / plan.served_name
        usable = [candidates[one.name] for one in manifest.variants if one.usable]
        _write_one(model, plan, checkpoint, usable, made.with_name("built"))
    manifest = replace(
        manifest,
        variants=tuple(replace(one, path=_path(plan, one, manifest.auto)) for one in manifest.variants),
        files=hashes(model / "1"),
    )
    manifest.write(model / "1")
    (model / "report.md").write_text(document.markdown(manifest), encoding="utf-8")
    (model / "report.html").write_text(document.html(manifest), encoding="utf-8")
    return manifest


def _write_one(model: Path, plan: Plan, checkpoint: Checkpoint, usable: Sequence[Candidate], built: Path) -> None:
    target = model / "1"
    target.mkdir(parents=True)
    weights = any(one.path is None for one in usable)
    copy(checkpoint, checkpoint_files(checkpoint, weights=weights, code=plan.trust_remote_code), target)
    for path in {file for one in usable for file in one.files}:
        place = target / path.relative_to(built)
        place.parent.mkdir(exist_ok=True)
        path.rename(place)
    parameters = {"task": plan.task} if plan.task else {}
    if plan.trust_remote_code:
        parameters["trust_remote_code"] = "true"
    if plan.threads:
        parameters["threads"] = str(plan.threads)
    (model / "config.pbtxt").write_text(huggingface_config(parameters, _KIND), encoding="utf-8")


def _path(plan: Plan, one: Variant, auto: str) -> str:
    """A variant's file among those written; what may not serve was not."""
    if plan.layout == "triton":
        return "model.onnx" if one.name == auto else ""
    return one.path if one.usable else ""
