"""Where the Hugging Face Hub's cache is, and how much it holds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from conch.cli.doctor.facts import CacheFact


def cache(environment: Mapping[str, str] = os.environ) -> CacheFact:
    """The cache that models are downloaded into, as ``huggingface_hub`` finds it."""
    path = _location(environment)
    models = [directory for directory in path.glob("models--*") if directory.is_dir()]
    size = sum(blob.stat().st_size for model in models for blob in model.glob("blobs/*") if blob.is_file())
    existing = next(directory for directory in (path, *path.parents) if directory.exists())
    return CacheFact(
        path=str(path),
        models=len(models),
        size=size,
        free=shutil.disk_usage(existing).free,
        offline=environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
    )


def cached_models(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The ids of the models in the cache, sorted."""
    folders = _location(environment).glob("models--*")
    return sorted("/".join(folder.name.split("--")[1:]) for folder in folders)


def _location(environment: Mapping[str, str]) -> Path:
    # Unlike Path's, this leaves "~" as it is where there is no home.
    if "HF_HUB_CACHE" in environment:
        return Path(os.path.expanduser(environment["HF_HUB_CACHE"]))
    if "HF_HOME" in environment:
        return Path(os.path.expanduser(environment["HF_HOME"])) / "hub"
    return Path(os.path.expanduser(environment.get("XDG_CACHE_HOME", "~/.cache"))) / "huggingface" / "hub"
