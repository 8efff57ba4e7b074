"""Threads that GNU's OpenMP keeps for each thread that computes, as PyTorch does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit.backends.python.worker import LaunchWorker

MODEL = """
import ctypes

gomp = ctypes.CDLL({path!r})
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: None)


def compute():
    gomp.GOMP_parallel(function, None, 4, 0)


class TritonPythonModel:
    def initialize(self, args):
        before = set(os.listdir("/proc/self/task"))
        compute()
        self.started = set(os.listdir("/proc/self/task")) - before

    async def execute(self, requests):
        compute()
        left = self.started & set(os.listdir("/proc/self/task"))
        return [answer(f"{{len(left)}} of {{len(self.started)}}") for _ in requests]
"""


@pytest.mark.extras
def test_threads_that_computed_in_initialize_end_before_others_compute(launch: LaunchWorker) -> None:
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    packages = Path(torch.origin).parent.parent
    path = next(path for folder in ("torch/lib", "torch.libs") for path in (packages / folder).glob("libgomp*"))
    assert launch(MODEL.format(path=str(path))).text("x") == "0 of 3"
