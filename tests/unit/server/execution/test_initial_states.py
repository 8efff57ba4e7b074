"""Where the states come from in which sequences begin."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from conch.config.schema import ModelConfig
from conch.core.errors import ConchError
from conch.server.execution.scheduling import read_states


def config(state: str, batch: int = 4) -> ModelConfig:
    text = f'max_batch_size: {batch} sequence_batching {{ state {{ input_name: "in" output_name: "out" {state} }} }}'
    return text_format.Parse(text, ModelConfig())


def initial(file: str, kind: str = "INT32") -> str:
    data = f'initial_state {{ name: "i" data_type: TYPE_{kind} dims: [ 1 ] data_file: "{file}" }}'
    return f"data_type: TYPE_{kind} dims: [ -1 ] {data}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "five").write_bytes(b"\5\0\0\0 and more")
    (tmp_path / "initial_state" / "text").write_bytes(b"\2\0\0\0hi")
    (tmp_path / "initial_state" / "short").write_bytes(b"ab")
    (tmp_path / "outside").write_bytes(b"\5\0\0\0")
    return tmp_path


@pytest.mark.parametrize(
    ("state", "batch", "shape", "data"),
    [
        ("data_type: TYPE_INT32 dims: [ 2, -1 ]", 4, (1, 2, 1), bytes(8)),
        ("data_type: TYPE_INT32 dims: [ 2 ]", 0, (2,), bytes(8)),
        ("data_type: TYPE_STRING dims: [ 2 ]", 4, (1, 2), bytes(8)),
        (initial("five"), 4, (1, 1), b"\5\0\0\0"),
        (initial("text", "STRING"), 4, (1, 1), b"\2\0\0\0hi"),
    ],
)
def test_first_state(state: str, batch: int, shape: tuple[int, ...], data: bytes, folder: Path) -> None:
    (tensor,) = read_states(config(state, batch), folder)
    assert (tensor.input, tensor.output) == ("in", "out")
    assert (tensor.first.shape, bytes(tensor.first.data)) == (shape, data)


@pytest.mark.parametrize(
    ("file", "status"),
    [
        (
            "short",
            "Invalid argument: initial_state setting expects 4 bytes, but the data provided from shortonly has 2 "
            "bytes.",
        ),
        ("nothing", "Internal: failed to read initial state file 'nothing': No such file or directory"),
        (
            "../outside",
            "Internal: initial state file '../outside' must be inside the folder 'initial_state' of the model",
        ),
    ],
)
def test_file_that_does_not_do(file: str, status: str, folder: Path) -> None:
    with pytest.raises(ConchError) as refused:
        read_states(config(initial(file)), folder)
    assert refused.value.status == status
