"""A repository that tests deploy to platforms, and conch as a platform starts it from what was written."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dockerfile_parse import DockerfileParser

from conch.cli import main
from tests.conformance.raw import get
from tests.deploy.processes import READING, become
from tests.deploy.registry import ROOT
from tests.events import eventually
from tests.models import write
from tests.servers import CONCH

PREPROCESSING = """
backend: "python"
input { name: "TEXT" data_type: TYPE_STRING dims: [1] }
output { name: "UPPER" data_type: TYPE_STRING dims: [1] }
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy() for request in requests]
        upper = [[text.decode().upper().encode() for text in batch] for batch in texts]
        made = [pb_utils.Tensor("UPPER", np.array(batch, dtype=object)) for batch in upper]
        return [pb_utils.InferenceResponse([tensor]) for tensor in made]
"""
ENSEMBLE = """
platform: "ensemble"
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
output { name: "text_output" data_type: TYPE_STRING dims: [1] }
ensemble_scheduling {
  step {
    model_name: "preprocessing" model_version: -1
    input_map { key: "TEXT" value: "text_input" }
    output_map { key: "UPPER" value: "text_output" }
  }
}
"""
#: A request to the ensemble and its answer, at ``infer`` and at ``generate``.
INFER = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["shell"]}]}
GENERATE = {"text_input": "shell", "max_tokens": 30}


def repository(folder: Path) -> Path:
    """The models ``ensemble`` and ``preprocessing``, with what editors and Python leave beside them."""
    write(folder, "preprocessing", PREPROCESSING, {"1/model.py": MODEL, "1/__pycache__/model.pyc": ""})
    write(folder, "ensemble", ENSEMBLE, {"config.pbtxt~": "old"})
    (folder / "ensemble" / "1").mkdir()
    write(folder, ".git", None, {"HEAD": "ref: refs/heads/main"})
    return folder


def deploy(platform: str, models: Path, out: Path, *options: str) -> Path:
    """The folder that ``conch deploy`` writes, without serving it: that is what the tests do."""
    command = ["deploy", platform, "--no-verify", "--model-repository", str(models), "--output", str(out), *options]
    assert main(command) == 0
    return out


def instructions(file: Path, name: str) -> list[str]:
    """The values of the instructions of one name in the last stage of a container file."""
    parser = DockerfileParser(fileobj=file.open("rb"))
    stages: list[list[dict[str, Any]]] = []
    for one in parser.structure:
        if one["instruction"] == "FROM":
            stages.append([])
        elif stages:
            stages[-1].append(one)
    return [str(one["value"]) for one in stages[-1] if one["instruction"] == name]


def environment_of(file: Path) -> dict[str, str]:
    """What a container file sets in the environment of its last stage."""
    pairs = (pair.partition("=") for value in instructions(file, "ENV") for pair in shlex.split(value))
    return {name: value for name, _, value in pairs}


def install(program: Path, folder: Path, places: Mapping[str, str]) -> Path:
    """A copy of a container's program in ``folder``, with what stands in this place for its own paths."""
    text = program.read_text()
    for inside, outside in places.items():
        assert inside in text
        text = text.replace(inside, outside)
    copy = folder / program.name
    copy.write_text(text)
    copy.chmod(program.stat().st_mode)
    return copy


def entry_point() -> list[str]:
    """That of the image which the platforms' images begin with, on this machine alone."""
    (value,) = instructions(ROOT / "deploy/container/Containerfile", "ENTRYPOINT")
    return [str(CONCH), *(word.replace("0.0.0.0", "127.0.0.1") for word in json.loads(value)[1:])]


@contextmanager
def started(
    command: Sequence[str],
    places: Mapping[str, str],
    environment: Mapping[str, str],
    health: tuple[str, str],
    log: Path,
    *,
    as_root: bool = False,
) -> Iterator[str]:
    """The address of a server that a container's command has started and that says at ``health`` that it is well.

    ``places`` has what stands in this place for words of the command; ``health`` is the address and the path. It runs
    as the image's user, who may read everything here and write to nothing but temporary files, or ``as_root``.
    """
    words = list(command)
    for inside, outside in places.items():
        words = [word.replace(inside, outside) for word in words]
    address, path = health
    if not as_root and (plain := become()):
        words = [*plain, *READING, *words]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("AIP_", "SAGEMAKER_"))}
    with log.open("wb") as output:
        own["PATH"] = f"{CONCH.parent}:{own['PATH']}"
        server = subprocess.Popen(
            words, env={**own, "HOME": "/tmp", **environment}, stdout=output, stderr=output, cwd="/"
        )

    def well() -> bool:
        assert server.poll() is None, log.read_text()
        try:
            return get(address, path).status == 200
        except OSError:
            return False

    try:
        eventually(well, "the server's health", 60)
        yield address
    finally:
        server.terminate()
        assert server.wait(60) == 0, log.read_text()
