"""Tables of token vectors and Routers answer as sentence-transformers does; tables need no PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Router
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from tokenizers import Tokenizer
from torch import nn

from conch.backends.base.arrays import Strings
from conch.backends.tasks.huggingface_backend import describe_task
from conch.backends.tasks.task import ExecutionWork
from conch.backends.tasks.tokens import TextPreparation, TokenizedRequest
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import ConchError
from tests.retrieval_models import NEIGHBOURS, SIZE, backbone, close, completed, dense, each, embed, saved, vectors
from tests.task_requests import open_model
from tests.text_checkpoints import answer, request, strings, wordpiece


def check(folder: Path, tasks: tuple[str | None, ...] = (None, "query", "document")) -> None:
    reference, task = SentenceTransformer(str(folder), device="cpu"), open_model(folder)
    for name in tasks:
        inputs = {} if name is None else {"task": name}
        encode = {None: reference.encode, "query": reference.encode_query, "document": reference.encode_document}[name]
        expected = np.stack([encode(text) for text in NEIGHBOURS])
        close(vectors(each(task, NEIGHBOURS, **inputs)), expected)
        close(vectors(embed(task, NEIGHBOURS, **inputs)), expected)


def table(folder: Path, size: int = SIZE) -> StaticEmbedding:
    """A table of random vectors for the tokens of a tiny tokenizer."""
    folder.mkdir(exist_ok=True)
    wordpiece(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return StaticEmbedding(tokenizer, embedding_weights=torch.randn(tokenizer.get_vocab_size(), size))


def test_static_embedding(tmp_path: Path) -> None:
    folder = saved(tmp_path / "folder", table(tmp_path / "table"), Normalize(), truncate_dim=9)
    assert not (folder / "config.json").exists()
    check(folder)
    assert open_model(folder).runtime_facts == {"similarity": "cosine", "engine": "numpy"}


@pytest.mark.parametrize("by_model", [False, True])
def test_a_table_refuses_long_texts_if_it_is_told_to(tmp_path: Path, by_model: bool) -> None:
    folder = saved(tmp_path / "folder", table(tmp_path / "table"))
    task = open_model(folder, max_length=3, **({"truncation": "refuse"} if by_model else {}))
    asked = request(text_input=["library", "where is the library"])
    assert answer(task, request(text_input=["library"])).outputs
    if not by_model:
        assert answer(task, asked).parameters == {"truncated": 1}
        asked.parameters["truncation"] = "refuse"
    with pytest.raises(ConchError, match="input 'text_input' has 10 tokens in row 1; the model takes at most 3"):
        task.prepare(asked)


def test_model2vec(tmp_path: Path) -> None:
    folder = saved(tmp_path / "folder", table(tmp_path / "table"), Normalize())
    rows = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float16)
    count = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    mapping = np.arange(count) % 40
    weights = np.linspace(0.1, 2, count, dtype=np.float32)
    (folder / "model.safetensors").unlink()
    save_file(
        {"embeddings": rows.astype(np.float32), "mapping": mapping, "weights": weights}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "architectures": ["StaticModel"]}))
    check(folder)


def test_a_table_is_served_without_pytorch(tmp_path: Path) -> None:
    folder = saved(tmp_path / "folder", table(tmp_path / "table"), Normalize())
    script = (
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path\nfrom conch.backends.base.arrays import Request\n"
        "from conch.backends.tasks.huggingface_backend import EngineOpener, make_task\n"
        "from conch.backends.tasks.task import ExecutionWork\nfrom conch.checkpoints.folder import Checkpoint\n"
        "from conch.core.tensors import WireTensor, pack_bytes\n"
        "checkpoint = Checkpoint.open(Path(sys.argv[1]))\n"
        "task = make_task(checkpoint, EngineOpener(checkpoint, {'kind': 'CPU', 'device_id': 0, 'count': 1}))\n"
        "text = WireTensor('text_input', 'BYTES', (1, 1), pack_bytes([b'the station']))\n"
        "[result] = task.execute([task.prepare(Request({'text_input': text}, frozenset()))], ExecutionWork())\n"
        "print(*result.outputs['embedding'][0])"
    )
    found = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    close(
        np.array(found.stdout.split(), np.float32), SentenceTransformer(str(folder), device="cpu").encode("the station")
    )


def test_tokens_are_those_of_the_folder_of_the_module(tmp_path: Path) -> None:
    routes = {name: [table(tmp_path / "table")] for name in ("query", "document")}
    folder = saved(tmp_path / "folder", Router(routes, default_route="document"), Normalize())
    assert not (folder / "tokenizer.json").exists()
    task = open_model(folder)
    preparation = TextPreparation(Checkpoint.open(folder), task)
    prepared = preparation.prepare(request("tokens", text_input=[["the station"]]))
    assert isinstance(prepared, TokenizedRequest)
    tokens = prepared.result.outputs["tokens"]
    assert isinstance(tokens, Strings)
    [[document]] = strings(tokens)
    ids = Tokenizer.from_file(str(tmp_path / "table" / "tokenizer.json")).encode("the station").ids
    assert json.loads(document)["ids"] == ids
    encoded = preparation.prepare(request("embedding", text_input=[[""]], token_ids=np.array([ids], np.int32)))
    close(vectors(completed(task.execute([encoded], ExecutionWork()))), vectors(embed(task, ["the station"])))


def test_routes_of_queries_and_documents(tmp_path: Path) -> None:
    documents = [backbone(tmp_path / "backbone"), Pooling(SIZE)]
    router = Router.for_query_document([table(tmp_path / "table")], documents)
    check(saved(tmp_path / "folder", router, Normalize()))


def test_a_router_after_the_network_and_one_within_a_route(tmp_path: Path) -> None:
    inner = Router({"one": [dense(nn.Tanh(), 7)], "two": [dense(nn.ReLU(), 7)]}, default_route="two")
    mappings = {("query", None): "asked", (None, "text"): "said"}
    outer = Router({"asked": [dense(nn.Sigmoid(), 7)], "said": [inner]}, route_mappings=mappings)
    folder = saved(tmp_path / "folder", backbone(tmp_path / "backbone"), Pooling(SIZE), outer)
    check(folder, (None, "query"))


def test_a_task_without_a_route_is_refused_and_lists_the_others(tmp_path: Path) -> None:
    router = Router({"a": [table(tmp_path / "table")], "b": [table(tmp_path / "table")]}, default_route="b")
    task = open_model(saved(tmp_path / "folder", router))
    with pytest.raises(ConchError, match="task is 'query'; the model has a, b"):
        embed(task, ["the"], task="query")
    assert vectors(embed(task, ["the"], task="a")).shape == (1, SIZE)


def test_model2vec_folder_without_modules_is_refused_by_its_name(tmp_path: Path) -> None:
    wordpiece(tmp_path)
    save_file({"embeddings": np.ones((40, 8), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "model2vec", "architectures": ["StaticModel"]}))
    checkpoint = Checkpoint.open(tmp_path, Options.from_values({"task": "feature-extraction"}))
    with pytest.raises(ConchError, match=r"is a Model2Vec folder without modules\.json: save it with"):
        describe_task(checkpoint)
