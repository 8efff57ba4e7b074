"""Servers of conch with tiny models, as the replicas of a cluster have them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import conch
from conch.deploy.ray.registry import ReplicaRecord, ServedModel
from tests.models import write

#: Answers with its text behind the word that it is written with, or fails for the text "fail".
CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().flat[0].decode()
        if text == "fail":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("as it was told"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(["WORD " + text], np.object_))])
"""

_CONFIG = """
backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
output { name: "OUT" data_type: TYPE_STRING dims: 1 }
"""


def write_echo(repository: Path, name: str = "echo", word: str = "echo", extra: str = "") -> None:
    write(repository, name, _CONFIG + extra, {"1/model.py": CODE.replace("WORD", word)})


@contextmanager
def serving(repository: Path, **options: Any) -> Iterator[conch.Server]:
    with conch.Server(model_repository=repository, http_port=0, grpc_port=0, **options) as server:
        yield server


def record(id: str, server: conch.Server, *names: str, loaded: bool = True, started: int = 0) -> ReplicaRecord:
    """What a replica with ``server`` announces; where it is not ``loaded``, it says nothing of its models."""
    models = tuple(
        ServedModel(
            name,
            json.dumps(server.config(name)),
            (1,),
            tuple((output, tuple(labels)) for output, labels in server.labels(name).items()),
        )
        if loaded
        else ServedModel(name)
        for name in names
    )
    return ReplicaRecord(id, "echo", id, started, "node", server.urls["http"], server.urls["grpc"], models)
