"""Files of a checkpoint: ``model.json``, ``config.json``, ``conch.json`` and GGUF."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf_reference import GgufReference
from conch.checkpoints.manifest import Manifest
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.core.errors import ConchError
from tests.fuzz.target import target
from tests.unit.checkpoints.folders import checkpoint
from tests.unit.checkpoints.gguf_files import LLAMA, TOKENS, content, model

_TOKENS: Final = (
    b'"model"', b'"task"', b'"engine"', b'"trust_remote_code"', b'"../"', b'"/etc/passwd"', b'"~"', b"{", b"}", b"[",
    b"]",
    b"null", b"true", b'"id2label"', b'"architectures"', b'"max_length"', b'"variants"', b'"files"', b"\\u0000",
    b"1e400",
)  # fmt: skip


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="conch-fuzz-") as folder:
        yield Path(folder)


@target(
    seeds=[
        b'{"task": "text-classification", "engine": "torch", "max_length": 5, "top_k": 1}',
        b'{"model": ".", "trust_remote_code": true, "chat_template": "x.jinja", "lora_modules": {"a": "b"}}',
        b'{"model": "org/name", "offline": true, "normalize": "yes", "pooling": "cls"}',
    ],
    tokens=_TOKENS,
    most=1024,
)
def model_json(data: bytes) -> None:
    with _folder() as folder:
        checkpoint(folder, model__json=data)
        with contextlib.suppress(ConchError):
            opened = Checkpoint.open(folder)
            assert not opened.options.trust_remote_code
            assert opened.directory.is_relative_to(folder.resolve())


@target(
    seeds=[
        b'{"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}',
        b'{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 8, "eos_token_id": [1, 2]}',
        b'{"model_type": "own", "auto_map": {"AutoModel": "a.B"}, "custom_pipelines": {"x": {"impl": "a.B"}}}',
    ],
    tokens=_TOKENS,
    most=1024,
)
def config_json_of_a_checkpoint(data: bytes) -> None:
    with _folder() as folder:
        checkpoint(folder, config__json=data, model__json='{"trust_remote_code": true}')
        with contextlib.suppress(ConchError):
            assert not Checkpoint.open(folder).options.trust_remote_code


@target(
    seeds=[
        json.dumps(
            {
                "format": 1,
                "conch": "1",
                "source": {"model": "a", "revision": "", "files": {}},
                "task": "feature-extraction",
                "variants": [
                    {"name": "a", "engine": "torch", "precision": "fp32", "passed": True, "latency": [
                        {"batch": 1, "tokens": 2, "mean_ms": 1, "sd_ms": 1, "min_ms": 1, "max_ms": 1, "median_ms": 1,
                         "p95_ms": 1, "p99_ms": 1}]},
                    {"name": "b", "engine": "openvino", "precision": "int8", "path": "model.safetensors"},
                ],
                "auto": "a",
                "files": {"model.safetensors": "sha256:00"},
            }
        ).encode()
    ],
    tokens=_TOKENS,
)  # fmt: skip
def conversion_manifest(data: bytes) -> None:
    with _folder() as folder:
        checkpoint(folder, conch__json=data)
        with contextlib.suppress(ConchError):
            manifest = Manifest.read(folder)
            assert manifest is not None
            with contextlib.suppress(ConchError):
                manifest.verify(folder)
            for engine in ("auto", "torch", "openvino"):
                with contextlib.suppress(ConchError):
                    manifest.select("", engine)
            Manifest.from_json(manifest.to_json())


_SENTENCEPIECE: Final = {
    **TOKENS, "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5] * 8, "tokenizer.ggml.merges": None,
}  # fmt: skip


@target(
    seeds=[
        content({**LLAMA, "tokenizer.ggml.tokens": ["a", "b"]}, [("x", (4, 2), 0, 0)], data=32),
        model(TOKENS),
        model(_SENTENCEPIECE, architecture="qwen3"),
    ],
    tokens=[b"general.architecture", b"llama", b"tokenizer.ggml", b"GGUF", b"blk.0.", b".weight", b"general.alignment"],
    most=1 << 17,
)
def gguf(data: bytes) -> None:
    """A file, its tokenizer, and a token computed with its weights."""
    here: Any = SimpleNamespace(map=map)
    with _folder() as folder:
        (folder / "model.gguf").write_bytes(data)
        with contextlib.suppress(ConchError):
            checkpoint = Checkpoint.open(folder)
            assert checkpoint.gguf is not None
            assert isinstance(checkpoint.openvino_problem, str)
            with contextlib.suppress(ConchError):
                tokenizer = open_tokenizer(checkpoint)
                tokenizer.decode(tokenizer.encode("abc"))
            GgufReference(checkpoint.gguf, here).score([([0, 1], 1)])
