"""Interprets a store's listing of a repository: its models, their files and versions, and whether it is valid."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from conch.core.errors import ConchError, invalid
from conch.repository.fingerprint import Fingerprint, counts, fingerprint_of
from conch.repository.names import is_directory_name
from conch.repository.stores.store import RemoteFile
from conch.repository.stores.urls import StoreUrl

_WEIGHTS = (".safetensors", ".gguf", ".onnx")


@dataclass(frozen=True)
class StoredModel:
    """The files of one model, with paths relative to its directory; paths that end with a slash are directories."""

    name: str
    listed: tuple[RemoteFile, ...]

    @property
    def files(self) -> list[RemoteFile]:
        return [file for file in self.listed if not file.path.endswith("/")]

    @cached_property
    def directories(self) -> list[str]:
        """The directories in the model's directory, without hidden ones."""
        names = {file.path.partition("/")[0] for file in self.listed if "/" in file.path}
        return sorted(name for name in names if is_directory_name(name))

    def names_in(self, directory: str) -> frozenset[str]:
        """Return the names of the entries in a directory of the model."""
        inside = (
            file.path.removeprefix(f"{directory}/") for file in self.listed if file.path.startswith(f"{directory}/")
        )
        return frozenset(path.partition("/")[0] for path in inside if path)

    def find(self, path: str) -> RemoteFile | None:
        return next((file for file in self.listed if file.path == path), None)

    def fingerprint(self, config_name: str | None) -> Fingerprint:
        """Return a fingerprint that changes whenever the files change."""
        stamps = ((file.path, _number(file.identity), file.size) for file in self.files if counts(file.path))
        return fingerprint_of(stamps, self.directories, config_name)


def models_in(files: Iterable[RemoteFile]) -> dict[str, StoredModel]:
    """Return the models in a listing, by name."""
    files_of: dict[str, list[RemoteFile]] = {}
    for file in files:
        name, inside, path = file.path.partition("/")
        if inside and is_directory_name(name):
            files_of.setdefault(name, []).append(replace(file, path=path) if path else replace(file, path="./"))
    return {
        name: StoredModel(name, tuple(file for file in files_of[name] if file.path != "./"))
        for name in sorted(files_of)
    }


def check_repository(url: StoreUrl, files: Sequence[RemoteFile], models: Mapping[str, StoredModel]) -> None:
    """Raise INVALID_ARG, with a hint that suggests the right URL, if a listing is not a model repository."""
    if not files:
        raise nothing_there(url)
    if any(_is_model(model) for model in models.values()):
        return
    loose = {file.path for file in files if "/" not in file.path}
    if "config.pbtxt" in loose or (models and all(name.isdigit() for name in models)):
        raise invalid(
            f"model repository {url} is a model, not a repository of models: give {url.text.rpartition('/')[0]}"
        )
    if "config.json" in loose or any(name.endswith(_WEIGHTS) for name in loose):
        whole = url.scheme == "hf" and not url.prefix
        revision = f" --revision={url.revision}" if url.revision else ""
        hint = f"serve it with 'conch serve {url.bucket}{revision}'" if whole else "give a directory of models"
        raise invalid(f"model repository {url} is a checkpoint, not a repository of models: {hint}")
    for name, model in models.items():
        if any(_is_model(stored) for stored in models_in(model.listed).values()):
            raise invalid(
                f"model repository {url} is not a repository of models, but {name} in it is: give {url}/{name}"
            )


def nothing_there(url: StoreUrl) -> ConchError:
    """Return the error for a repository without files; stores do not distinguish it from a missing repository."""
    return invalid(f"model repository {url} does not exist: the store has no files there")


def _is_model(model: StoredModel) -> bool:
    return model.find("config.pbtxt") is not None or any(name.isdigit() for name in model.directories)


def _number(identity: str) -> int:
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "big")
