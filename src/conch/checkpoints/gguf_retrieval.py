"""Embedding models and rerankers in GGUF files: which task a file is for, and its configuration for that task.

Source of the keys and numbers: llama.cpp's llama-arch.cpp and llama.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conch.checkpoints.gguf import GgufFile
from conch.core.sampling import TEXT_GENERATION

EMBEDDING: Final = "feature-extraction"
RANKING: Final = "text-ranking"
#: Architectures that read a whole text at once and write none.
ENCODERS: Final = frozenset({
    "bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert", "nomic-bert",
    "nomic-bert-moe",
})  # fmt: skip
#: Modes of pooling by ``llama_pooling_type``.
_POOLING: Final[Mapping[int, str]] = {1: "mean", 2: "cls", 3: "lasttoken"}
_RANK: Final = 4
#: Layers of a classifier; a reranker has at least one.
_CLASSIFIER: Final = ("cls.weight", "cls.output.weight")
#: The beginning of the names of a classifier's tensors.
CLASSIFIER: Final = "cls."
#: Layers after pooling, which llama.cpp applies to the vectors of tokens.
PROJECTIONS: Final = ("dense_2", "dense_3")
#: Architectures whose classifier gives the probabilities of "yes" and "no".
_ANSWERS: Final = ("qwen3", "qwen3vl")


def gguf_task(file: GgufFile) -> str:
    """Return the task of a file: embedding or ranking texts, or else generating text."""
    pooling = _pooling_type(file)
    if pooling == _RANK or any(name in file.tensors for name in _CLASSIFIER):
        return RANKING
    return EMBEDDING if pooling >= 0 or file.text("general.architecture") in ENCODERS else TEXT_GENERATION


def gguf_pooling(file: GgufFile) -> str:
    """Return the pooling mode of a file, by default the mean of all tokens, as in sentence-transformers."""
    return _POOLING.get(_pooling_type(file), "mean")


def answers_yes_or_no(file: GgufFile) -> bool:
    """Whether a reranker gives the probabilities of "yes" and "no" in place of a score."""
    return file.text("general.architecture") in _ANSWERS


def retrieval_config(file: GgufFile) -> dict[str, Any]:
    """Return what config.json has for an embedding model or reranker in place of a language model's."""
    name = file.text("general.architecture")
    # llama.cpp takes no token types, and an architecture would name a language model's head.
    config: dict[str, Any] = {"architectures": [], "type_vocab_size": 1}
    if width := max(file.sizes(f"{name}.embedding_length_out"), default=0):
        config["hidden_size"] = width
    for projection in PROJECTIONS:
        if tensor := file.tensors.get(f"{projection}.weight"):
            config["hidden_size"] = tensor.shape[0]
    labels = file.texts(f"{name}.classifier.output_labels")
    if len(labels) > 1 and not answers_yes_or_no(file):
        config["id2label"] = dict(enumerate(labels))
    return config


def retrieval_problem(file: GgufFile, task: str) -> str:
    """Return why llama.cpp cannot serve a file for ``task``; empty if it can."""
    own = gguf_task(file)
    if task == EMBEDDING and own != RANKING:
        return ""
    if task != own:
        return f"is for task '{own}', not for '{task}'"
    types = file.tensors.get("token_types.weight")
    counted = types is not None and types.shape[:-1] not in ((), (1,))
    if counted and file.text("tokenizer.ggml.model") == "bert":
        return (
            "distinguishes the two texts of a pair by token types, which llama.cpp does not support: serve the "
            "original checkpoint"
        )
    return ""


def _pooling_type(file: GgufFile) -> int:
    return file.integer(f"{file.text('general.architecture')}.pooling_type")
