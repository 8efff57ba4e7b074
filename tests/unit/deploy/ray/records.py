"""Records of replicas and ingresses, and waiting for a condition."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from conch.deploy.ray.registry import IngressRecord, RegistrySnapshot, ReplicaRecord, ServedModel

#: The configuration of a model that repeats a text.
ECHO: Mapping[str, Any] = {
    "name": "echo",
    "backend": "python",
    "input": [{"name": "IN", "data_type": "TYPE_STRING", "dims": [1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]}],
}


def served(name: str = "echo", versions: tuple[int, ...] = (1,), **config: Any) -> ServedModel:
    """A model that is loaded, with ``config`` beside or in place of what :data:`ECHO` has."""
    return ServedModel(name, json.dumps({**ECHO, "name": name, **config}), versions)


def replica(
    id: str = "a", *models: ServedModel, grpc: str = "", started: int = 0, version: str = "1", deployment: str = "echo"
) -> ReplicaRecord:
    url = grpc or f"grpc://{id}:1"
    return ReplicaRecord(id, deployment, version, started, "node", url.replace("grpc", "http", 1), url, models)


def ingress(id: str = "i") -> IngressRecord:
    return IngressRecord(id, "node", {"http": ("127.0.0.1", 8000)})


def snapshot(*replicas: ReplicaRecord, revision: int = 1, deregistered: tuple[str, ...] = ()) -> RegistrySnapshot:
    return RegistrySnapshot(revision, replicas, frozenset(deregistered))
