"""The servers in the comparison of text models; each is a column of its tables."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import converted
from benchmarks.load import Target
from benchmarks.peers import environment, graph, repository
from benchmarks.peers.servers import PaddingServer, WebServer
from benchmarks.texts import SENTENCE, checkpoint, mixed
from tests.oracle import TritonServer
from tests.servers import ConchServer

#: The description of each server by name.
PEERS: Final = {
    "transformers": "Triton, transformers in model.py",
    "ensemble": "Triton, tokenizer → ONNX Runtime int8",
    "ensemble-same": "the same with conch's int8 graph",
    "fastapi": "FastAPI, ONNX Runtime int8",
    "padding": "conch, padding in arrival order",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A server and its model; ``ours`` is conch unchanged, ``padded`` is conch without batching by length
    (the name ends with the variant)."""

    name: str
    target: Target
    ours: bool = False
    padded: bool = False

    @property
    def inference_protocol(self) -> bool:
        """Whether perf_analyzer can send requests to it."""
        return bool(self.target.model)


@contextlib.contextmanager
def start(folder: Path, variants: Sequence[str], peers: Sequence[str], max_batch: int) -> Iterator[list[Column]]:
    """Return all servers, ready: conch with a model for each variant, and the peers."""
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as running:
        converted.serve(Path(home) / "conch", folder, variants)
        conch = running.enter_context(ConchServer(Path(home) / "conch", "--log-info=false"))
        targets = {name: Target(conch.http, name, "text_input", "embedding") for name in variants}
        columns = [Column(f"conch {name}", target, ours=True) for name, target in targets.items()]
        if "padding" in peers:
            converted.serve(Path(home) / "padding", folder, variants, backend="padding", max_batch=max_batch)
            padding = running.enter_context(PaddingServer(Path(home) / "padding", "--log-info=false"))
            for name in variants:
                target = Target(padding.http, name, "text_input", "embedding")
                columns.append(Column(f"padding {name}", target, padded=True))
        graphs = {}
        if {"ensemble", "fastapi"} & set(peers):
            graphs["ensemble"] = graph.graph()
        if "ensemble-same" in peers and (folder / "onnxruntime-int8.onnx").exists():
            graphs["ensemble-same"] = folder / "onnxruntime-int8.onnx"
        models = [name for name in ("transformers", "ensemble", "ensemble-same") if name in peers]
        models = [name for name in models if name == "transformers" or name in graphs]
        if models:
            selected = {name: file for name, file in graphs.items() if name in models}
            triton_models = Path(home) / "triton"
            repository.write(triton_models, max_batch, with_transformers="transformers" in models, graphs=selected)
            triton = running.enter_context(TritonServer(triton_models, python=environment.python()))
            columns += [Column(f"Triton {name}", Target(triton.http, name)) for name in models]
        if "fastapi" in peers:
            web = running.enter_context(WebServer(environment.python(), checkpoint(), graphs["ensemble"]))
            columns.append(Column("FastAPI", Target(web.http)))
        yield columns


def deviations(columns: Sequence[Column]) -> str:
    """Describe the difference of the servers' results from fp32; raises RuntimeError if one is of another model."""
    texts = [SENTENCE, *mixed(16)]
    embeddings = {column.name: np.stack([column.target.embedding(text) for text in texts]) for column in columns}
    exact = next((name for name in embeddings if name.endswith(("transformers", "fp32"))), columns[0].name)
    deviating = []
    for name, embedding in embeddings.items():
        cosine = float((embedding * embeddings[exact]).sum(1).min())
        if not cosine > 0.8:
            raise RuntimeError(f"{name} answers something else than {exact}: cosine {cosine:.3f}")
        if name != exact:
            deviating.append(f"{name} {cosine:.4f}")
    return f"Smallest cosine with {exact} on {len(texts)} texts: {', '.join(deviating)}.\n"
