"""The data of warm-up samples, and its bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.config.pbtxt import parse
from conch.core.errors import Code, ConchError
from conch.server.execution.starting import WarmupSample, read_samples


def samples(inputs: str, directory: Path, *, batch_size: int = 1, limit: int = 1 << 20) -> list[WarmupSample]:
    sample = f'model_warmup {{ name: "s" batch_size: {batch_size} inputs {{ key: "x" value {{ {inputs} }} }} }}'
    return read_samples(parse(f'name: "m" backend: "python" {sample}', "c"), directory, limit)


def test_data_is_zeros_or_random(tmp_path: Path) -> None:
    [zeros] = samples("data_type: TYPE_FP32 dims: [2, 3] zero_data: true", tmp_path)
    assert zeros.inputs[0].data == bytes(24) and zeros.inputs[0].shape == (2, 3)
    [texts] = samples("data_type: TYPE_STRING dims: [3] zero_data: true", tmp_path)
    assert texts.inputs[0].data == bytes(12)
    [truths] = samples("data_type: TYPE_BOOL dims: [1000] random_data: true", tmp_path)
    assert set(bytes(truths.inputs[0].data)) == {0, 1}
    [numbers] = samples("data_type: TYPE_INT8 dims: [3000000] random_data: true", tmp_path, limit=1 << 22)
    assert len(numbers.inputs[0].data) == 3_000_000


@pytest.mark.parametrize("data", ["zero_data: true", "random_data: true"])
@pytest.mark.parametrize(
    ("dims", "batch_size"), [("[262145]", 1), ("[1000000000, 1000000000, 1000000000]", 1), ("[1]", 257)]
)
def test_a_sample_that_is_too_large_is_refused_before_it_is_made(
    data: str, dims: str, batch_size: int, tmp_path: Path
) -> None:
    with pytest.raises(ConchError) as caught:
        samples(f"data_type: TYPE_FP32 dims: {dims} {data}", tmp_path, batch_size=batch_size)
    assert caught.value.code is Code.INVALID_ARG
    assert "warmup sample 's' has" in caught.value.message and "--max-warmup-bytes" in caught.value.message


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup/data").write_bytes(bytes(5000))
    inputs = 'data_type: TYPE_INT8 dims: [10] input_data_file: "data"'
    assert samples(inputs, tmp_path, limit=5000)[0].inputs[0].data == bytes(10)
    with pytest.raises(ConchError, match="max-warmup-bytes"):
        samples(inputs, tmp_path, limit=4999)
