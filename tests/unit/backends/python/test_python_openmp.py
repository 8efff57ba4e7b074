"""Threads that compute for a model with OpenMP, as those of PyTorch do."""

from __future__ import annotations

from pathlib import Path

import torch

import conch.testing
from conch.backends.python.python_backend import end_openmp_threads

MODEL = """
import os

import numpy as np
import torch
import triton_python_backend_utils as pb_utils


def compute():
    torch.ones(1_000_000).sum()


class TritonPythonModel:
    def initialize(self, args):
        before = set(os.listdir("/proc/self/task"))
        compute()
        self.started = set(os.listdir("/proc/self/task")) - before

    async def execute(self, requests):
        compute()
        left = self.started & set(os.listdir("/proc/self/task"))
        counts = np.array([len(self.started), len(left)], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("counts", counts)]) for _ in requests]
"""
CONFIG = """backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "counts" data_type: TYPE_INT32 dims: [ 2 ] }
"""


def test_threads_that_computed_in_initialize_end_before_coroutines_compute(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.py").write_text(MODEL)
    (tmp_path / "config.pbtxt").write_text(CONFIG)
    threads = torch.get_num_threads()
    end_openmp_threads()  # those of tests before this one
    torch.set_num_threads(4)
    try:
        with conch.testing.load(tmp_path) as model:
            assert model(x=[1.0])["counts"].tolist() == [3, 0]
    finally:
        end_openmp_threads()
        torch.set_num_threads(threads)
