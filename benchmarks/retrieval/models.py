"""The models of the comparison, saved by sentence-transformers and converted by conch, in a folder that is kept.

``minilm`` is all-MiniLM-L6-v2. ``large`` has the shape of a large encoder (1,024 dimensions) in two layers. ``ranker``
and ``splade`` are MiniLM with a head of random weights, ``static`` is a table of 256 dimensions.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.texts import checkpoint
from tests.servers import CONCH

CONVERTED: Final = ("minilm", "large", "ranker", "splade")
#: The variants that may serve, and the shapes of the runs into which the server divides the texts, on two cores.
MEASURED: Final = ("--backend", "onnx", "openvino", "--batch-size", "1", "8", "--seq-len", "16", "128")


def source(home: Path, name: str) -> Path:
    """Return the folder of a model before its conversion, made on first use."""
    if name == "minilm":
        return checkpoint()
    folder = home / "sources" / name
    if not folder.exists():
        partial = folder.with_name(f"{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        _MAKERS[name](partial)
        partial.rename(folder)
    return folder


def served(home: Path, name: str) -> Path:
    """Return the folder of a model that conch serves, made on first use: converted, if it has a network."""
    if name not in CONVERTED:
        return source(home, name)
    folder = home / "converted" / name / "1"
    if not folder.exists():
        command = [str(CONCH), "convert", "-m", str(source(home, name)), "-o", str(home / "converted"), "--name", name]
        done = subprocess.run([*command, *MEASURED], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"conch convert, {name}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return folder


def repository(home: Path, folders: dict[str, Path]) -> Path:
    """Write a repository of these models below ``home``."""
    for name, folder in folders.items():
        (home / name / "1").mkdir(parents=True)
        parameter = f'parameters {{ key: "model" value {{ string_value: "{folder}" }} }}'
        (home / name / "config.pbtxt").write_text(f'backend: "huggingface"\n{parameter}\n')
    return home


def _large(folder: Path) -> None:
    """Write MiniLM's folder with another network, which the older sentence-transformers of peers read, too."""
    from transformers import BertConfig, BertModel

    shutil.copytree(checkpoint(), folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.onnx"))
    config = BertConfig(hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, intermediate_size=4096)
    BertModel(config).save_pretrained(folder)
    pooling = folder / "1_Pooling" / "config.json"
    settings = {**json.loads(pooling.read_text()), "word_embedding_dimension": config.hidden_size}
    pooling.write_text(json.dumps(settings))


def _ranker(folder: Path) -> None:
    _with_head("AutoModelForSequenceClassification", folder, num_labels=1)


def _splade(folder: Path) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    network = folder / "network"
    _with_head("AutoModelForMaskedLM", network)
    modules: list[Any] = [Transformer(str(network), transformer_task="fill-mask"), SpladePooling()]
    SparseEncoder(modules=modules, device="cpu").save(str(folder), create_model_card=False)
    shutil.rmtree(network)


def _static(folder: Path) -> None:
    import numpy as np
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint() / "tokenizer.json"))
    table = np.random.default_rng(0).standard_normal((tokenizer.get_vocab_size(), 256)).astype(np.float32)
    module = StaticEmbedding(tokenizer, embedding_weights=table)
    SentenceTransformer(modules=[module], device="cpu").save(str(folder), create_model_card=False)


def _with_head(head: str, folder: Path, **settings: Any) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    getattr(transformers, head).from_pretrained(checkpoint(), **settings).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(checkpoint()).save_pretrained(folder)


_MAKERS: Final[dict[str, Callable[[Path], None]]] = {
    "large": _large, "ranker": _ranker, "splade": _splade, "static": _static,
}  # fmt: skip
