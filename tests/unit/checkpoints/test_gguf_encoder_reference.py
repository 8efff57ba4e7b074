"""The reference for embeddings of GGUF files gives the vectors of transformers for the same weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from conch.checkpoints.gguf import read_gguf
from conch.checkpoints.gguf_encoder_reference import token_vectors
from conch.core.errors import ConchError
from tests.unit.checkpoints import gguf_models
from tests.unit.checkpoints.gguf_encoders import dequantised, wordpieces, write_encoder

IDS = [5, 9, 1, 30, 30, 8]


def vectors(path: Path, **limits: float) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return token_vectors(read_gguf(path), pool, IDS, **limits)


def write_bert(path: Path, kind: str) -> Any:
    torch.manual_seed(4)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    network = transformers.BertModel(config).eval()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"word{number}" for number in range(36))]
    write_encoder(path, network, wordpieces(pieces), kind=kind)
    return dequantised(path, network)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_bert_has_the_vectors_of_transformers(tmp_path: Path, kind: str) -> None:
    network = write_bert(tmp_path / "m.gguf", kind)
    with torch.inference_mode():
        expected = network(torch.tensor([IDS])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(vectors(tmp_path / "m.gguf"), expected, atol=2e-5)


def test_decoder_has_the_vectors_of_transformers(tmp_path: Path) -> None:
    network = gguf_models.model("qwen3")
    gguf_models.write(tmp_path / "m.gguf", "qwen3", network)
    with torch.inference_mode():
        expected = network.model(torch.tensor([IDS])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(vectors(tmp_path / "m.gguf"), expected, atol=1e-4 * np.abs(expected).max())


def test_file_that_takes_too_long_or_has_another_network_is_not_computed(tmp_path: Path) -> None:
    write_bert(tmp_path / "m.gguf", "F32")
    with pytest.raises(ConchError, match="s of processor time"):
        vectors(tmp_path / "m.gguf", limit=-1.0)
    gguf_models.write(
        tmp_path / "q.gguf", "qwen3", gguf_models.model("qwen3"), metadata={"qwen3.attention.causal": False}
    )
    with pytest.raises(ConchError, match="architecture 'qwen3' with attention to later tokens"):
        vectors(tmp_path / "q.gguf")
