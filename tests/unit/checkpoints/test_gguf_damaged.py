"""A damaged GGUF file gives one clear error, whatever part of it is damaged, and takes little memory."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf_reference import GgufReference
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.core.errors import Code, ConchError
from tests.refusals import refused_argument
from tests.unit.checkpoints.gguf_files import TOKENS, model, numbers_in, write_model

EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
#: How much the memory of the process may grow with files of 22 kB (bytes).
MEMORY = 64 << 20


@pytest.fixture
def outcome(tmp_path: Path) -> Callable[[bytes], str]:
    """Reads a file and computes a token with it; returns the error, empty if there is none."""
    here: Any = SimpleNamespace(map=map)  # threads would take most of the time

    def read(data: bytes) -> str:
        (tmp_path / "m.gguf").write_bytes(data)
        try:
            checkpoint = Checkpoint.open(tmp_path, Options())
            assert checkpoint.gguf is not None
            assert isinstance(checkpoint.openvino_problem, str)
            open_tokenizer(checkpoint).encode("abc")
            GgufReference(checkpoint.gguf, here).score([([0, 2], 1)])
        except ConchError as error:
            assert error.code is Code.INVALID_ARG, error
            assert "\n" not in error.message
            return error.message
        return ""

    return read


@pytest.fixture
def bounded() -> Iterator[None]:
    """Fails if the process needs much more memory at any time than before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY >> 10


def test_whole_file_is_read(outcome: Callable[[bytes], str]) -> None:
    assert outcome(model(TOKENS)) == ""


@pytest.mark.usefixtures("bounded")
def test_file_that_is_cut_off_anywhere_is_refused(outcome: Callable[[bytes], str]) -> None:
    whole = model(TOKENS)
    header = sum(numbers_in(whole)[-1])
    cuts = [*range(0, header, 5), *range(header, len(whole) - 32, 997)]
    assert [size for size in cuts if not outcome(whole[:size])] == []


@pytest.mark.usefixtures("bounded")
def test_any_number_in_the_header_may_be_wrong(outcome: Callable[[bytes], str]) -> None:
    whole = model(TOKENS)
    results = {}
    for start, width in numbers_in(whole):
        for extreme in {extreme % (1 << 8 * width) for extreme in EXTREMES}:
            changed = extreme.to_bytes(width, "little")
            results[start, extreme] = outcome(whole[:start] + changed + whole[start + width :])
    refused = [message for message in results.values() if message]
    assert len(refused) > len(results) / 2
    assert all("m.gguf" in message or "reference" in message for message in refused), refused


DAMAGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no embeddings": ({}, {"token_embd.weight": None}, "m.gguf lacks tensor 'token_embd.weight'"),
    "embeddings of another width": (
        {}, {"token_embd.weight": ((64, 8), 8)},
        "tensor 'token_embd.weight' has shape (8, 64): 32 is expected instead of 64, by llama.embedding_length",
    ),
    "fewer tokens than embeddings": (
        {**TOKENS, "tokenizer.ggml.tokens": ["a", "b"]}, {"token_embd.weight": ((32, 8), 8)},
        "tensor 'token_embd.weight' has shape (8, 32): 2 is expected instead of 8, by tokenizer.ggml.tokens",
    ),
    "no final norm": ({}, {"output_norm.weight": None}, "m.gguf lacks tensor 'output_norm.weight'"),
    "output of another size": (
        {}, {"output.weight": ((32, 9), 8)},
        "tensor 'output.weight' has shape (9, 32): 8 is expected instead of 9, by tensor 'token_embd.weight'",
    ),
    "no keys": ({}, {"blk.1.attn_k.weight": None}, "m.gguf lacks tensor 'blk.1.attn_k.weight'"),
    "keys of another size": (
        {}, {"blk.1.attn_k.weight": ((32, 32), 8)},
        "tensor 'blk.1.attn_k.weight' has shape (32, 32): 16 is expected instead of 32, by "
        "llama.attention.head_count_kv and the size of a head",
    ),
    "a cube": ({}, {"blk.0.ffn_up.weight": ((32, 8, 8), 8)}, "'blk.0.ffn_up.weight' has 3 dimensions instead of 2"),
    "more layers": ({"llama.block_count": 3}, {}, "m.gguf lacks tensor 'blk.2.attn_output.weight'"),
    "endless layers": ({"llama.block_count": 2**31 - 1}, {}, "m.gguf lacks tensor 'blk.2.attn_output.weight'"),
    "fewer layers": ({"llama.block_count": 1}, {}, "llama.block_count is 1, and there are tensors of block 1"),
    "heads": (
        {"llama.attention.head_count": 5}, {},
        "llama.attention.head_count is 5, which llama.attention.head_count_kv, 2, does not divide",
    ),
    "width of heads": (
        {"llama.attention.head_count": 6}, {},
        "llama.embedding_length is 32, which llama.attention.head_count, 6, does not divide",
    ),
    "no heads": ({"llama.attention.head_count": 0}, {}, "llama.attention.head_count is 0, which"),
    "rotary positions": (
        {"llama.rope.dimension_count": 9}, {}, "llama.rope.dimension_count is 9, and a head has 8 numbers",
    ),
    "heads of other layers": (
        {"llama.attention.head_count": [4, 4, 4]}, {}, "llama.attention.head_count has 3 entries for 2 layers",
    ),
    "feed-forward size": (
        {"llama.feed_forward_length": 32}, {},
        "tensor 'blk.0.ffn_gate.weight' has shape (64, 32): 32 is expected instead of 64, by llama.feed_forward_length",
    ),
    "rotary divisors": (
        {}, {"rope_freqs.weight": ((4,), 1)}, "tensor 'rope_freqs.weight' must be a vector of type F32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_file_that_contradicts_itself_is_refused(tmp_path: Path, damage: str) -> None:
    metadata, tensors, message = DAMAGES[damage]
    write_model(tmp_path / "m.gguf", metadata, tensors)
    refused = refused_argument(Checkpoint.open, tmp_path, Options())
    assert refused.startswith(str(tmp_path)) and message in refused


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "unknown"])
def test_file_that_is_consistent_is_accepted(tmp_path: Path, architecture: str) -> None:
    write_model(tmp_path / "m.gguf", architecture=architecture)
    assert Checkpoint.open(tmp_path, Options()).gguf is not None


def test_each_layer_may_have_its_own_sizes(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", {"llama.feed_forward_length": [64, 64], "llama.attention.head_count": [4, 4]})
    assert Checkpoint.open(tmp_path, Options()).config["num_attention_heads"] == 4
