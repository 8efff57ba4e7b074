"""BGE-M3's three kinds of vectors come from one pass, and equal those computed here in PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from conch.backends.tasks.huggingface_backend import describe_task
from conch.checkpoints.folder import Checkpoint
from tests.retrieval_models import NEIGHBOURS, SIZE, close, embed, pooled, sparse, token_vectors, vectors
from tests.task_requests import open_model


def test_three_kinds_of_vectors_from_one_pass(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "folder", modes="cls")
    weights, tokens = torch.nn.Linear(SIZE, 1), torch.nn.Linear(SIZE, 6)
    torch.save(weights.state_dict(), folder / "sparse_linear.pt")
    torch.save(tokens.state_dict(), folder / "colbert_linear.pt")
    result = embed(open_model(folder), NEIGHBOURS)
    close(vectors(result), SentenceTransformer(str(folder), device="cpu").encode(list(NEIGHBOURS)))
    tokenizer, network = AutoTokenizer.from_pretrained(str(folder)), AutoModel.from_pretrained(str(folder))
    unused = {tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    found, rows = sparse(result, len(tokenizer)), token_vectors(result)
    for text, own, row in zip(NEIGHBOURS, found, rows, strict=True):
        encoded = tokenizer(text, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = network(**encoded).last_hidden_state[0]
            close(row, torch.nn.functional.normalize(tokens(hidden[1:]), dim=-1))
            expected = np.zeros(len(tokenizer), np.float32)
            for id, weight in zip(
                encoded["input_ids"][0].tolist(), torch.relu(weights(hidden))[:, 0].tolist(), strict=True
            ):
                expected[id] = max(expected[id], 0 if id in unused else weight)
        close(own, expected)


def test_the_outputs_are_declared(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "folder", modes="cls")
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        torch.save({}, folder / name)
    outputs = describe_task(Checkpoint.open(folder)).outputs
    assert [(output.name, output.dims) for output in outputs][:5] == [
        ("embedding", (SIZE,)),
        ("sparse_indices", (-1,)),
        ("sparse_values", (-1,)),
        ("token_embeddings", (-1, -1)),
        ("num_vectors", (1,)),
    ]
