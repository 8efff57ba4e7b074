"""The servers of ``/v1/embeddings`` in the comparison; each has the models ``minilm`` and ``large``."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from benchmarks.load import Target
from benchmarks.peers import embeddings, environment, graph
from benchmarks.peers.servers import Program, wait_until_ready
from benchmarks.retrieval import models
from benchmarks.texts import checkpoint
from tests.servers import ConchServer

#: The environment of each peer, of ``peers/environment.py``.
PEERS: Final = {
    "sentence-transformers": "sentence-transformers",
    "openvino": "openvino",
    "infinity": "infinity",
    "onnxruntime": environment.PEERS,
}
CONCH: Final = "conch"
MINILM: Final = "minilm"
LARGE: Final = "large"


class Column(NamedTuple):
    """A server, with the names of its models and its process."""

    name: str
    address: str
    served: Sequence[str]
    pid: int

    def target(self, model: str) -> Target:
        return Target(self.address, model, openai=True)

    def tree(self) -> list[psutil.Process]:
        """Return the server's processes."""
        root = psutil.Process(self.pid)
        return [root, *root.children(recursive=True)]


@contextlib.contextmanager
def start(home: Path, repository: Path, peers: Sequence[str]) -> Iterator[list[Column]]:
    """Start conch over ``repository`` and the peers; models and logs are below ``home``."""
    with contextlib.ExitStack() as running:
        conch = running.enter_context(ConchServer(repository, "--log-info=false", log=home / "conch.log", wait=False))
        assert conch.process is not None
        wait_until_ready(conch.http, conch.process, path="/v2/health/ready", timeout=600)
        columns = [Column(CONCH, conch.http, (MINILM, LARGE), conch.process.pid)]
        for name in peers:
            folders = peer_folders(home, name)
            server = running.enter_context(Program(*_command(name, folders), ready="/health", log=home / f"{name}.log",
                                                   env={"HF_HUB_OFFLINE": "1"}))  # fmt: skip
            columns.append(Column(name, server.http, tuple(folders), server.process.pid))
        yield columns


def peer_folders(home: Path, name: str) -> dict[str, Path]:
    """Return the models of a peer, made on first use."""
    if name != "onnxruntime":
        return {MINILM: checkpoint(), LARGE: models.source(home, LARGE)}
    folder = home / "onnxruntime"
    folder.mkdir(exist_ok=True)
    for source, target in ((graph.graph(), "model.onnx"), (checkpoint() / "tokenizer.json", "tokenizer.json")):
        shutil.copy(source, folder / target)
    return {MINILM: folder}


def _command(name: str, folders: dict[str, Path]) -> list[str]:
    python = environment.python(PEERS[name])
    if name != "infinity":
        return [
            str(python), embeddings.__file__, "{port}", name, *(f"{model}={path}" for model, path in folders.items())
        ]  # fmt: skip
    served = [word for model, path in folders.items()
              for word in ("--model-id", str(path), "--served-model-name", model)]  # fmt: skip
    return [
        str(python.with_name("infinity_emb")), "v2", *served, "--engine", "torch", "--device", "cpu",
        "--url-prefix", "/v1", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning",
    ]  # fmt: skip
