"""GGUF files: what they say, and one clear error for each that is wrong, cut off or hostile."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from conch.checkpoints.gguf import GgufFile, TensorInfo, config_of, read_gguf
from conch.core.errors import Code, ConchError
from tests.refusals import refused_argument
from tests.unit.checkpoints.gguf_files import LLAMA, content, text, write

TENSORS = [("token_embd.weight", (32, 8), 2, 0), ("output_norm.weight", (32,), 0, 160)]


def test_everything_in_a_file_is_read(tmp_path: Path) -> None:
    values = {"a": "日", "b": 7, "c": 0.1, "d": True, "e": ["x", "", "y"], "f": [1, -2], "g": [0.5]}
    path = write(tmp_path / "m.gguf", values, tensors=TENSORS, data=160 + 128)
    file = read_gguf(path)

    assert (file.path, file.version) == (path, 3)
    assert file.metadata["c"] == 0.1 and file.text("a") == "日" and file.integer("b") == 7 and file.flag("d")
    assert (file.texts("e"), file.numbers("f"), file.numbers("g")) == (["x", "", "y"], [1, -2], [0.5])
    assert (file.text("none"), file.integer("none"), file.texts("none"), file.numbers("none")) == ("", -1, [], [])
    start = len(path.read_bytes()) - 288
    assert file.tensors == {
        "token_embd.weight": TensorInfo("token_embd.weight", (8, 32), 2, start, 8 * 18),
        "output_norm.weight": TensorInfo("output_norm.weight", (32,), 0, start + 160, 128),
    }


@pytest.mark.parametrize(
    ("types", "quantised"),
    [((0, 1, 30), False), ((28, 24, 27), False), ((1, 2), True), ((8, 0), True)],
    ids=["plain", "F64 and integers", "Q4_0", "Q8_0"],
)
def test_weights_are_quantised_where_a_matrix_is(tmp_path: Path, types: tuple[int, ...], quantised: bool) -> None:
    tensors = [(str(kind), (32, 8), kind, 2048 * place) for place, kind in enumerate(types)]
    vector = ("norm", (32,), 8, 2048 * len(types))
    path = write(tmp_path / "m.gguf", {}, tensors=[*tensors, vector], data=2048 * (len(types) + 1))
    assert read_gguf(path).quantised is quantised


def test_configuration_is_in_the_terms_of_config_json(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.bos_token_id": 0}
    assert config_of(read_gguf(write(tmp_path / "m.gguf", {**LLAMA, **extra}))) == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 256,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-05,
        "vocab_size": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }


@pytest.mark.parametrize(
    ("theirs", "ours"), [("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma3", "gemma3_text"), ("x", "x")]
)
def test_architectures_have_their_names_in_transformers(tmp_path: Path, theirs: str, ours: str) -> None:
    values = {key.replace("llama.", f"{theirs}."): value for key, value in LLAMA.items()}
    values |= {"general.architecture": theirs, f"{theirs}.feed_forward_length": [64, 96]}
    config = config_of(read_gguf(write(tmp_path / "m.gguf", values)))
    assert (config["model_type"], config["intermediate_size"]) == (ours, 96)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": None}, "contains no model: general.architecture is missing"),
        ({"general.architecture": 3}, "general.architecture must be a text"),
        ({"general.type": "adapter"}, "is of type 'adapter', not a model"),
        ({"general.type": "mmproj"}, "is a multimodal projector (mmproj), not a model"),
        ({"general.architecture": "clip"}, "use the file of the language model, and this one as parameter 'mmproj'"),
        ({"llama.context_length": None}, "llama.context_length is missing"),
        ({"llama.block_count": "two"}, "llama.block_count must be a whole number from 0 to 2147483647"),
        ({"llama.block_count": True}, "llama.block_count must be a whole number from 0 to 2147483647"),
        ({"llama.context_length": 2**31}, "llama.context_length must be a whole number from 0 to 2147483647"),
        ({"llama.attention.head_count": [4, -4]}, "llama.attention.head_count must be a whole number from 0 to"),
        ({"llama.attention.head_count": [4.5]}, "llama.attention.head_count must be a whole number from 0 to"),
        ({"llama.rope.freq_base": math.nan}, "llama.rope.freq_base must be a finite number"),
        ({"llama.rope.freq_base": "1"}, "llama.rope.freq_base must be a finite number"),
        (
            {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 2},
            "tokenizer.ggml.eos_token_id is 2, and there are 2 tokens",
        ),
        ({"tokenizer.ggml.tokens": [1]}, "tokenizer.ggml.tokens must be a list of texts"),
    ],
)
def test_model_that_cannot_be_one_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    values = {key: value for key, value in {**LLAMA, **change}.items() if value is not None}
    assert message in refused_argument(lambda: config_of(read_gguf(write(tmp_path / "m.gguf", values))))


def head(tensors: int, values: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


HUGE = 2**63
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a GGUF file: it does not begin with 'GGUF'"),
    "something else": (b"PK\x03\x04" * 9, "is not a GGUF file"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    "no header": (b"GGUF\x03", "it was cut off"),
    "same keys": (content({"a": 1, "b": 2}).replace(text("b"), text("a")), "the value of 'a': the key occurs twice"),
    "old": (head(0, 0, 1), "is a GGUF file with version 1; versions 2 and 3, little-endian, are read"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "is a GGUF file with big-endian numbers"),
    "many tensors": (head(HUGE, 0), "it was cut off, or declares more data than it contains"),
    "many values": (head(0, HUGE), "it was cut off, or declares more data than it contains"),
    "long name": (
        head(0, 1) + struct.pack("<Q", HUGE) + bytes(64),
        "it was cut off, or declares more data than it contains",
    ),
    "long list": (head(0, 1) + text("a") + struct.pack("<IIQ", 9, 10, HUGE), "declares more data than it contains"),
    "long list of texts": (
        head(0, 1) + text("a") + struct.pack("<IIQ", 9, 8, HUGE),
        "declares more data than it contains",
    ),
    "lists of lists": (head(0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1) * 9, "it has lists of lists"),
    "unknown value": (head(0, 1) + text("a") + struct.pack("<I", 77), "the value of 'a': it is of type 77, which is"),
    "many numbers": (
        head(0, 1) + text("a") + struct.pack("<IIQ", 9, 0, 8_000_001) + bytes(8_000_001),
        "the value of 'a': the lists up to this one have more than 8000000 items",
    ),
    "alignment of 0": (content({"general.alignment": 0}), "general.alignment must be a power of two up to 1048576"),
    "alignment of 24": (content({"general.alignment": 24}), "general.alignment must be a power of two up to 1048576"),
    "dimensions": (content({}, [("w", (1,) * 9, 0, 0)]), "tensor 'w': it has 9 dimensions"),
    "tensor's type": (content({}, [("w", (1,), 99, 0)]), "tensor 'w': it is of type 99, which is not known here"),
    "blocks": (
        content({}, [("w", (33,), 2, 0)]),
        "tensor 'w': the length of its rows is not a multiple of the block size 32",
    ),
    "blocks of several rows": (
        content({}, [("w", (16, 2), 2, 0)], 32),
        "the length of its rows is not a multiple of the block size",
    ),
    "no numbers": (content({}, [("w", (4, 0), 0, 0)]), "tensor 'w': it is empty"),
    "same names": (content({}, [("w", (1,), 0, 0)] * 2, 4), "tensor 'w': two tensors have the same name"),
    "a line break": (content({}, [("a\nb", (1,), 99, 0)]), r"tensor 'a\nb': it is of type 99"),
    "overlap": (content({}, [("w", (9,), 0, 0), ("v", (1,), 0, 32)], 64), "tensors 'w' and 'v' overlap in the file"),
    "offset": (content({}, [("w", (1,), 0, 4)], 64), "the offset of tensor 'w' is not a multiple of 32"),
    "no weights": (content({}, [("w", (HUGE, HUGE), 0, 0)], 64), "was cut off: it has"),
    "far away": (content({}, [("w", (1,), 0, 2**64 - 32)], 64), "was cut off: it has"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_file_is_refused(tmp_path: Path, kind: str) -> None:
    data, message = WRONG[kind]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refused = refused_argument(lambda: read_gguf(path))
    assert refused.startswith(str(path)) and message in refused


def test_every_cut_and_many_flipped_bytes_give_an_error_or_a_file(tmp_path: Path) -> None:
    whole = content({**LLAMA, "tokenizer.ggml.tokens": ["a", "b", "c"]}, TENSORS, 288)
    path = tmp_path / "m.gguf"
    draw = random.Random(5)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refused_argument(lambda: read_gguf(path))
    for _ in range(2000):
        changed = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(whole) - 288)] = draw.randrange(256)
        path.write_bytes(changed)
        try:
            assert isinstance(read_gguf(path), GgufFile)
            config_of(read_gguf(path))
        except ConchError as error:
            assert error.code is Code.INVALID_ARG


def test_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert refused_argument(lambda: read_gguf(tmp_path / "m.gguf")).endswith(
        "cannot be read: No such file or directory"
    )
