"""Reduces converted models in an artifact to the variants that serve.

Reads configurations and manifests; writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from conch.checkpoints.hub import MODEL_DIRECTORY, MODEL_FILE, read_model_file
from conch.checkpoints.manifest import FILENAME, Manifest
from conch.checkpoints.options import Options, files_for
from conch.config.schema import ModelConfig
from conch.config.signature import parameters
from conch.deploy.contents import Contents

#: What ``conch convert`` writes beside a model for its readers.
_REPORTS: Final = ("report.md", "report.html")


def only_serving(root: Path, found: Contents, configs: Mapping[str, ModelConfig]) -> Contents:
    """The contents of the repository ``root`` without the variants that ``configs`` do not serve, and the reports.

    A model that may run on a GPU, where the checkpoint's own weights run, stays as it is, and so does one whose folder
    another model names as its checkpoint.
    """
    entries = {entry.name: entry for entry in found.entries}
    named = set(_named_folders(root, found, configs))
    left_out = list(found.left_out)
    for entry in found.entries:
        model, *inside = entry.name.split("/")
        if model not in configs or len(inside) != 2 or inside[1] != FILENAME or entry.source is None:
            continue
        folder = entry.source.parent
        manifest = Manifest.read(folder)
        if manifest is None or folder.resolve() in named or not _on_cpus(configs[model]):
            continue
        kept = manifest.keeping(_serving(manifest, configs[model]))
        gone = [f"{model}/{inside[0]}/{file}" for file in manifest.files.keys() - kept.files.keys()]
        gone += [f"{model}/{report}" for report in _REPORTS]
        left_out += [name for name in gone if entries.pop(name, None) is not None]
        text = kept.to_text().encode()
        entries[entry.name] = replace(entry, size=len(text), text=text)
    return Contents(tuple(entries.values()), tuple(sorted(left_out)))


def _serving(manifest: Manifest, config: ModelConfig) -> set[str]:
    """The names of the variants that serve."""
    options = Options.from_values(parameters(config))
    names = {manifest.select(options.variant, files_for(options.engine)).name}
    if manifest.by_shape is not None and not options.variant and options.engine == "auto" and options.by_shape:
        names.add(manifest.by_shape.variant)
    return names


def _on_cpus(config: ModelConfig) -> bool:
    groups = config.instance_group
    return bool(groups) and all(group.kind == ModelInstanceGroup.KIND_CPU for group in groups)


def _named_folders(root: Path, found: Contents, configs: Mapping[str, ModelConfig]) -> Iterator[Path]:
    """The folders that models name as their checkpoints."""
    for model, version in {tuple(entry.name.split("/")[:2]) for entry in found.entries if "/" in entry.name}:
        directory = root / model / version
        if model not in configs or not directory.is_dir():
            continue
        document = read_model_file(directory) if (directory / MODEL_FILE).is_file() else {}
        for named in (parameters(configs[model]).get("model"), document.get("model")):
            if isinstance(named, str) and named:
                path = named.replace(MODEL_DIRECTORY, str(directory.parent))
                yield from ((place / path).resolve() for place in (directory, directory.parent))
