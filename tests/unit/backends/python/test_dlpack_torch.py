"""Tensors that PyTorch and a model exchange in memory, without a copy."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from conch.backends.python.pb_utils import Tensor, TritonModelException


def test_torch_sees_the_memory_of_a_tensor() -> None:
    array = np.arange(4, dtype=np.float32)
    seen = torch.from_dlpack(Tensor("T", array))
    array[0] = 9
    assert seen.tolist() == [9, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bool, torch.uint8])
def test_tensor_keeps_the_memory_of_torch_alive(dtype: torch.dtype) -> None:
    theirs = torch.ones(2, 3).to(dtype)
    tensor = Tensor.from_dlpack("T", theirs)
    theirs[0, 0] = 0
    del theirs
    gc.collect()
    assert tensor.as_numpy().tolist() == [[0, 1, 1], [1, 1, 1]]


def test_bf16_goes_through_unread() -> None:
    tensor = Tensor.from_dlpack("T", torch.arange(3, dtype=torch.bfloat16))
    with pytest.raises(TritonModelException, match="cannot be converted to NumPy"):
        tensor.as_numpy()
    again = torch.from_dlpack(tensor)
    assert (again.dtype, again.tolist()) == (torch.bfloat16, [0, 1, 2])


def test_torch_tensor_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(TritonModelException, match="not contiguous"):
        Tensor.from_dlpack("T", torch.ones(2, 3).T)
