"""Options that take several values after one flag."""

from __future__ import annotations

import pytest

from conch.cli.options import spread

FLAGS = {"--seq-len", "--backend"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--seq-len 16 128 128", "--seq-len 16 --seq-len 128 --seq-len 128"),
        ("--seq-len 16,128", "--seq-len 16 --seq-len 128"),
        ("--seq-len=16,128 384", "--seq-len 16 --seq-len 128 --seq-len 384"),
        ("--seq-len 16 --seq-len 128", "--seq-len 16 --seq-len 128"),
        ("-m x --name sts --backend onnx torch --verbose --seq-len 16",
         "-m x --name sts --backend onnx --backend torch --verbose --seq-len 16"),
        ("--name=a --backend", "--name=a --backend"),
        ("--backend --verbose", "--backend --verbose"),
        ("--seq-len -1 2", "--seq-len -1 --seq-len 2"),
        ("--backend a -- b c", "--backend a -- b c"),
    ],
)  # fmt: skip
def test_flag_stands_before_each_value(line: str, expected: str) -> None:
    assert spread(line.split(), FLAGS) == expected.split()
